"""Write report.html: one page with a run's settings, curves, answers and sample documents.

The page is a single file without scripts or network access.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gearbox import filesystem
from gearbox.metrics import metrics_file
from gearbox.redact import redact

if TYPE_CHECKING:
    from gearbox.reporting.preview import Runs

WIDTH, HEIGHT = 420, 150  # pixels of one figure
MAX_POINTS = 1000  # points of one curve; a longer one is drawn with every n-th point
CURVES = {
    "loss": ("loss", "eval_loss"),
    "exact match": ("eval_exact_match",),
    "load imbalance of the experts": ("router_loss", "expert_load", "rank_load"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("lr",),
    "tokens per second": ("tokens_per_second",),
    "peak memory, bytes": ("memory_peak_bytes", "memory_predicted_bytes"),
}
COLOURS = ("var(--line)", "var(--second)", "#2563eb", "#a21caf", "#ca8a04", "#64748b")
LOWEST = 1e-9  # smallest value drawn on a logarithmic scale, which cannot show 0
STYLE = """
:root { color-scheme: light dark; --line: #0a7d32; --second: #c2410c; --soft: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2rem; font-size: 1.1rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; vertical-align: top; text-align: left; }
td:first-child { white-space: nowrap; opacity: .7; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--soft); padding: .6rem; opacity: .95; }
pre span { opacity: .6; } pre b { color: var(--line); font-weight: 600; }
.curves { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; max-width: 422px; }
figcaption, text, pre { font-size: 12px; }
text { fill: currentColor; } svg { border: 1px solid var(--soft); }
"""

Lines = dict[str, list[tuple[float, float]]]  # (step, value) points by line name


def write(
    folder: Path,
    facts: dict[str, str],
    documents: list[tuple[str, Runs]],
    samples: list[dict[str, str]],
) -> None:
    """Write folder/report.html from the arguments and folder/metrics.jsonl."""
    points = metrics_file.read(folder / "metrics.jsonl").good
    sections = [
        table(facts.items()),
        "<h2>Curves</h2>",
        f'<div class="curves">{"".join(_figures(points))}</div>',
        "<h2>Answers before and after training</h2>" if samples else "",
        *(table(sample.items()) + "<hr>" for sample in samples),
        "<h2>Training documents</h2><p>Supervised text is coloured.</p>",
        *(f"<p>{escape(location)}</p><pre>{_coloured(runs)}</pre>" for location, runs in documents),
    ]
    write_page(folder / "report.html", folder.name, sections)


def write_page(path: Path, title: str, sections: list[str]) -> None:
    """Write a page with the given HTML sections, secrets redacted."""
    head = f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
    page = "\n".join(['<!doctype html><html lang="en"><meta charset="utf-8">' + head, *sections]) + "</html>\n"
    filesystem.atomic_write(path, redact(page))


def table(rows: Iterable[Iterable[str]], head: Iterable[str] = ()) -> str:
    """Return an HTML table; the cells are plain text and are escaped."""
    lines = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    lines.insert(0, "".join(f"<th>{escape(text)}</th>" for text in head))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines if line)}</table>"


def _coloured(runs: Runs) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text, trained in runs for tag in ["b" if trained else "span"])


def _figures(points: list[dict[str, Any]]) -> Iterator[str]:
    for title, keys in CURVES.items():
        lines = {key: [(r["step"], r[key]) for r in points if isinstance(r.get(key), int | float)] for key in keys}
        lines = {key: points[:: -(-len(points) // MAX_POINTS)] for key, points in lines.items() if points}
        if lines:
            yield figure(title, lines)


def figure(title: str, lines: Lines, limit: float | None = None, striped: bool = False) -> str:
    """Return a figure of lines over steps; the caption shows each line's last value.

    A name without points still takes a colour. A limit is drawn dashed and makes the scale logarithmic. Striped lines
    stay visible where they coincide.
    """
    last = (
        f' <span style="color: {colour}">{escape(name)} {points[-1][1]:{".4g" if limit is None else ".0e"}}</span>'
        for colour, (name, points) in zip(COLOURS, lines.items(), strict=False)
        if points
    )
    return f"<figure><figcaption>{escape(title)}: {','.join(last)}</figcaption>{_curve(lines, limit, striped)}</figure>"


def _curve(lines: Lines, limit: float | None, striped: bool) -> str:
    """Return an SVG drawing of the lines, with both ends of each axis labelled."""
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points if abs(value) < float("inf")] or [0.0]
    if limit is not None:
        values = [max(value, LOWEST) for value in [*values, limit]]
    low, high, last = min(values), max(values), max(*steps, 1)
    left, bottom = 64, HEIGHT - 18

    def height(value: float) -> float:
        """Return the relative height of a value, from 0 to 1."""
        if high == low:
            return 0.5
        if limit is not None:
            return math.log(max(value, LOWEST) / low) / math.log(high / low)
        return (value - low) / (high - low)

    def coordinate(step: float, value: float) -> str:
        x = left + (WIDTH - left - 8) * step / last
        return f"{x:.1f},{bottom - (bottom - 8) * height(value):.1f}"

    drawn = []
    if limit is not None:
        ends = f'points="{coordinate(0, limit)} {coordinate(last, limit)}"'
        drawn.append(f'<polyline {ends} fill="none" stroke="currentColor" stroke-dasharray="3 4"/>')
    for number, (colour, points) in enumerate(zip(COLOURS, lines.values(), strict=False)):
        coordinates = [coordinate(step, value) for step, value in points if abs(value) < float("inf")]
        stripes = (6 * len(lines) - 6, -6 * number) if striped else None
        drawn.append(_polyline(coordinates, colour, stripes))
        if len(points) < 30 and not striped:  # a line of one point would be invisible
            dots = (dot.split(",") for dot in coordinates)
            drawn += [f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in dots]
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img"><text x="4" y="16">{high:.4g}</text>'
        f'<text x="4" y="{bottom}">{low:.4g}</text><text x="{left}" y="{HEIGHT - 4}">step 0</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">{last:g}</text>{"".join(drawn)}</svg>'
    )


def _polyline(coordinates: list[str], colour: str, stripes: tuple[int, int] | None) -> str:
    """Return a coloured line; `stripes` are the gap between its dashes and their offset."""
    dashes = f'stroke-dasharray="6 {stripes[0]}" stroke-dashoffset="{stripes[1]}"' if stripes else ""
    look = f'fill="none" stroke="{colour}" stroke-width="{2.5 if stripes else 1.5}" {dashes}'
    return f'<polyline points="{" ".join(coordinates)}" {look}/>'
