"""Draw the losses of a run as loss.png, with Pillow, which is also TensorBoard's and needs no fonts of the system."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from gearbox import filesystem
from gearbox.pages.charts import Chart, Line
from gearbox.pages.scale import Scale, compact, thinned, tick_labels, value_label
from gearbox.redact import redact

SIZE = (1200, 640)
FINE = 2  # each pixel is the mean of so many squared
LEFT, RIGHT, TOP, BOTTOM = 92, 28, 104, 62
TEXT, MUTED, GRID, BACK = "#1a2330", "#566173", "#dde2e9", "#ffffff"
COLOURS = {1: ("#1f57c3", "#b4c8ee"), 2: ("#b04a00", "#b04a00")}  # strong, and faint


def write(path: Path, chart: Chart, title: str) -> None:
    """Write a chart as a PNG file with a light background. Raise OSError if it cannot be written."""
    from PIL import Image, ImageDraw, ImageFont  # only here: 0.1 s that a page without a picture does not need

    lines = [line for line in chart.lines if any(map(math.isfinite, line.ys))]
    if not lines:
        return
    image = Image.new("RGB", (SIZE[0] * FINE, SIZE[1] * FINE), BACK)
    draw = ImageDraw.Draw(image)
    large, normal = (ImageFont.load_default(size * FINE) for size in (25, 18))
    last = max(max(line.xs) for line in lines)
    across, up = Scale(0, last or 1), Scale.of([y for line in lines for y in line.ys])
    right, bottom = SIZE[0] - RIGHT, SIZE[1] - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        left = LEFT + across.place(x) * (right - LEFT)
        return FINE * left, FINE * (bottom - up.place(y) * (bottom - TOP))

    ticks = up.ticks(6)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        start, end = place(0, tick), place(last, tick)
        draw.line([start, end], fill=GRID, width=FINE)
        draw.text((start[0] - 12 * FINE, start[1]), label, font=normal, fill=MUTED, anchor="rm")
    for tick in across.ticks(8):
        point = (place(tick, up.low)[0], (bottom + 10) * FINE)
        draw.text(point, compact(tick), font=normal, fill=MUTED, anchor="mt")
    draw.line([place(0, up.low), place(last, up.low)], fill=MUTED, width=FINE)
    draw.text((right * FINE, (bottom + 36) * FINE), "step", font=normal, fill=MUTED, anchor="rt")
    note = f"{chart.title.lower()}, {chart.unit}{', logarithmic scale' if up.is_log else ''}"
    draw.text((LEFT * FINE, 22 * FINE), _plain(title), font=large, fill=TEXT)
    draw.text((right * FINE, 28 * FINE), note, font=normal, fill=MUTED, anchor="ra")
    left = float(LEFT)
    for line in lines:
        _draw_line(draw, line, [place(x, y) for x, y in thinned(line.xs, line.ys) if math.isfinite(y)])
        strong, faint = COLOURS[line.colour]
        colour, width = (faint, 2) if line.style == "faint" else (strong, 4)
        draw.line([(left * FINE, 77 * FINE), ((left + 26) * FINE, 77 * FINE)], colour, width * FINE)
        name = f"{line.name} {value_label(line.last)}"
        draw.text(((left + 34) * FINE, 77 * FINE), name, font=normal, fill=TEXT, anchor="lm")
        left += 34 + draw.textlength(name, font=normal) / FINE + 26
    picture = io.BytesIO()
    image.reduce(FINE).quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(picture, "PNG")
    filesystem.atomic_write(path, picture.getvalue())


def _draw_line(draw: object, line: Line, points: Sequence[tuple[float, float]]) -> None:
    """Draw a line, and a dot at each of a few points."""
    from PIL import ImageDraw

    assert isinstance(draw, ImageDraw.ImageDraw)
    strong, faint = COLOURS[line.colour]
    is_faint = line.style == "faint"
    draw.line([*points], fill=faint if is_faint else strong, width=(1 if is_faint else 3) * FINE, joint="curve")
    if (line.style == "dots" and len(points) <= 60) or len(points) < 3:
        for x, y in points:
            draw.ellipse([x - 5 * FINE, y - 5 * FINE, x + 5 * FINE, y + 5 * FINE], fill=strong)


def _plain(title: str) -> str:
    """Return a title of one short line. The font has no control characters."""
    line = "".join(letter if letter.isprintable() else "·" for letter in redact(title))
    return line if len(line) <= 60 else f"{line[:59]}…"
