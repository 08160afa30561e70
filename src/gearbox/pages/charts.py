"""Draw charts as SVG between HTML labels, so that lines stretch with the page while letters keep their size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Literal

from gearbox.pages.scale import Points, Scale, compact, thinned, tick_labels, value_label

UNITS = 1000  # width and height of the drawing, in its own units
DASHES = ("", "7 3", "2 3", "9 3 2 3")  # so that lines differ by more than their colour
NUM_COLOURS = 8
MAX_SIGNS = 80  # of one kind, in one lane
X_TICKS = 6
X_TICKS_WIDE = 9
SIGNS = {  # paths in a box of 10 x 10
    "resume": "M1 0V10M1 0L9 3L1 6Z",
    "skipped": "M1 1L9 9M9 1L1 9",
    "spike": "M5 0L9 9H1Z",
    "save": "M5 1A4 4 0 1 0 5.01 1Z",
    "failed save": "M1 1H9V9H1ZM1 1L9 9",
}
Style = Literal["line", "faint", "dots", "area", "stripes"]


@dataclass(frozen=True)
class Line:
    """A line of a chart over steps."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: Style = "line"
    colour: int = 0
    """Number of the colour from 1; 0 takes the next one."""
    dash: int | None = None
    """Number of the dash pattern; None changes it after all colours are used."""
    value: str = ""
    """A text for the legend instead of the last value."""

    @property
    def last(self) -> float:
        """The last finite value; NaN without one."""
        return next((y for y in reversed(self.ys) if math.isfinite(y)), math.nan)


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps, or over another quantity."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    """bytes, percent, s, or a text that the caption shows."""
    x_name: str = "step"
    from_zero: bool = False
    log: bool | None = None
    """Whether the scale is logarithmic; None decides by the values."""
    limit: float | None = None
    """A value that is drawn as a dashed line, and what it is called."""
    limit_name: str = "limit"
    signs: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """Place and description of each sign below the chart, by a key of SIGNS."""
    bars: Sequence[float] = ()
    """Places of thin vertical lines: where the run was resumed."""
    is_wide: bool = False


def section(charts: Iterable[Chart]) -> str:
    """Return a section with all charts that have lines; the last of an odd number takes the whole width."""
    shown = [chart for chart in charts if any(any(map(math.isfinite, line.ys)) for line in chart.lines)]
    if sum(not chart.is_wide for chart in shown) % 2:
        last = max(place for place, chart in enumerate(shown) if not chart.is_wide)
        shown[last] = replace(shown[last], is_wide=True)
    drawn = "".join(map(draw, shown))
    return f'<h2>Curves</h2><div class="columns">{drawn}</div>' if drawn else ""


def draw(chart: Chart) -> str:
    """Return a chart as a figure, or an empty text if there is nothing to draw."""
    lines = [line for line in chart.lines if any(map(math.isfinite, line.ys))]
    if not lines:
        return ""
    numbered = [_with_look(line, number) for number, line in enumerate(chart.lines) if line in lines]
    across = _across(lines)
    values = _stacked_heights(numbered) if chart.lines[0].style == "area" else [y for line in lines for y in line.ys]
    up = Scale.of([*values, *([chart.limit] if chart.limit is not None else [])], chart.from_zero, chart.log)
    ticks = up.ticks(unit=chart.unit)
    labels = tick_labels(ticks, chart.unit)
    gutter = max((len(label) for label in labels), default=2) * 0.95 + 1.5
    scale = " ".join(f"{number:.12g}" for number in (across.low, across.high, up.low, up.high))
    kind = "percent" if chart.unit == "percent" else "bytes" if chart.unit == "bytes" else ""
    most = X_TICKS_WIDE if chart.is_wide else X_TICKS
    plot = (
        f'<div class="plot" style="--gutter:{gutter:.1f}ch" data-range="{scale}" data-unit="{kind}"'
        f' data-x="{escape(chart.x_name)}"{" data-log" if up.is_log else ""}>'
        f'<div class="ys">{_y_labels(up, ticks, labels)}</div>'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(chart.title)}">'
        f"{''.join(_drawing(chart, numbered, across, up, ticks))}</svg>"
        f'<div class="xs">{_x_labels(across, most)}</div>{_lanes(chart, across)}</div>'
    )
    unit = {"bytes": "", "percent": "", "s": "seconds"}.get(chart.unit, chart.unit)
    notes = ", ".join(filter(None, (unit, "logarithmic scale" if up.is_log else "", f"by {chart.x_name}")))
    caption = f'<figcaption><h3>{escape(chart.title)}</h3><span class="unit">{escape(notes)}</span></figcaption>'
    wide = " wide" if chart.is_wide else ""
    return f'<figure class="card{wide}">{caption}{_legend(chart, numbered)}{plot}</figure>'


def _across(lines: Sequence[Line]) -> Scale:
    """Return the horizontal scale of lines: from 0 if they start there."""
    first, last = min(min(line.xs) for line in lines), max(max(line.xs) for line in lines)
    first = 0.0 if first <= 1 else first
    return Scale(first, last if last > first else first + 1)


def _with_look(line: Line, number: int) -> Line:
    """Return a line with its colour and its dash pattern, given its number in the chart."""
    colour = line.colour or number % NUM_COLOURS + 1
    dash = number // NUM_COLOURS % len(DASHES) if line.dash is None else line.dash
    return Line(line.name, line.xs, line.ys, line.style, colour, dash, line.value)


def _stacked_heights(lines: Sequence[Line]) -> list[float]:
    """Return the heights of a stack of areas, which all have the same steps."""
    return [sum(y for y in heights if math.isfinite(y)) for heights in zip(*(line.ys for line in lines), strict=True)]


def _drawing(chart: Chart, lines: list[Line], across: Scale, up: Scale, ticks: list[float]) -> list[str]:
    """Return the paths of a chart, from the back to the front."""
    heights = "".join(f"M0 {_y(up, tick)}H{UNITS}" for tick in ticks)
    drawn = [f'<path class="grid" d="{heights}"/>']
    bars = "".join(f"M{_x(across, place)} 0V{UNITS}" for place in chart.bars[:MAX_SIGNS])
    drawn += [f'<path class="resume" d="{bars}"/>'] * bool(bars)
    if lines[0].style == "area":
        drawn += _stack(lines, across, up)
    else:
        for number, line in enumerate(lines):
            drawn += _strokes(line, number, len(lines), across, up)
    if chart.limit is not None:
        drawn.append(f'<path class="limit" d="M0 {_y(up, chart.limit)}H{UNITS}"/>')
    return [*drawn, f'<path class="axis" d="M0 {UNITS}H{UNITS}"/>']


def _strokes(line: Line, number: int, num_lines: int, across: Scale, up: Scale) -> list[str]:
    """Return a line as paths. Few points, and those of held-out values, are also drawn as dots."""
    points = thinned(line.xs, line.ys)
    pieces = _pieces(points, across, up)
    name = "" if line.style == "faint" and num_lines > 1 else f' data-name="{escape(line.name)}"'
    dash = DASHES[line.dash or 0]
    look = f"stroke:var(--s{line.colour})"
    if line.style == "stripes":  # lines that coincide stay visible
        look += f";stroke-width:2.5px;stroke-dasharray:6 {6 * num_lines - 6};stroke-dashoffset:{-6 * number}"
    elif dash:
        look += f";stroke-dasharray:{dash}"
    kind = ' class="faint"' if line.style == "faint" and num_lines > 1 else ""
    drawn = [f'<path{kind}{name} style="{look}" d="{pieces}"/>']
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if (line.style == "dots" and len(finite) <= 60) or len(finite) < 3:
        spots = "".join(f"M{_x(across, x)} {_y(up, y)}h0" for x, y in finite)
        drawn.append(f'<path class="dots" style="stroke:var(--s{line.colour})" d="{spots}"/>')
    return drawn


def _stack(lines: list[Line], across: Scale, up: Scale) -> list[str]:
    """Return lines with the same steps as areas upon each other."""
    below = [0.0] * len(lines[0].xs)
    drawn = []
    for line in lines:
        above = [base + (y if math.isfinite(y) else 0.0) for base, y in zip(below, line.ys, strict=True)]
        top = [f"{_x(across, x)} {_y(up, y)}" for x, y in zip(line.xs, above, strict=True)]
        bottom = [f"{_x(across, x)} {_y(up, y)}" for x, y in zip(line.xs, below, strict=True)]
        area = "L".join([*top, *reversed(bottom)])
        drawn.append(f'<path class="area" style="fill:var(--s{line.colour})" d="M{area}Z"/>')
        edge = f'style="stroke:var(--s{line.colour})" d="M{"L".join(top)}"'
        drawn.append(f'<path data-name="{escape(line.name)}" data-base {edge}/>')
        below = above
    return drawn


def _pieces(points: Points, across: Scale, up: Scale) -> str:
    """Return the path data of points. A value that is not finite interrupts the line."""
    parts, is_open = [], False
    for x, y in points:
        if math.isfinite(y):
            parts.append(f"{'L' if is_open else 'M'}{_x(across, x)} {_y(up, y)}")
        is_open = math.isfinite(y)
    return "".join(parts)


def _x(across: Scale, value: float) -> str:
    return f"{UNITS * across.place(value):.1f}".removesuffix(".0")


def _y(up: Scale, value: float) -> str:
    return f"{UNITS * (1 - up.place(value)):.1f}".removesuffix(".0")


def _y_labels(up: Scale, ticks: list[float], labels: list[str]) -> str:
    return "".join(
        f'<span style="bottom:{100 * up.place(tick):.1f}%">{label}</span>'
        for tick, label in zip(ticks, labels, strict=True)
    )


def _x_labels(across: Scale, most: int) -> str:
    """Return the labels of the horizontal axis. Those at its ends do not reach beyond it."""
    spans = []
    for tick in across.ticks(most):
        place = across.place(tick)
        kind = ' class="first"' if place < 0.02 else ' class="last"' if place > 0.98 else ""
        spans.append(f'<span{kind} style="left:{100 * place:.1f}%">{compact(tick)}</span>')
    return "".join(spans)


def _legend(chart: Chart, lines: list[Line]) -> str:
    """Return a legend with the last value of each line, and the number of each kind of sign."""
    items = []
    for line in lines:
        dash = DASHES[line.dash or 0]
        dots = ";stroke-dasharray:0" if not dash else f";stroke-dasharray:{dash}"
        spot = '<path class="dots" style="stroke:inherit" d="M12 5h0"/>' if line.style == "dots" else ""
        width = 8 if line.style == "area" else 1.2 if line.style == "faint" and len(lines) > 1 else 2.4
        sample = f'<svg viewBox="0 0 24 10" aria-hidden="true" style="stroke:var(--s{line.colour})">'
        sample += f'<path style="stroke:inherit;stroke-width:{width}px{dots}" d="M0 5H24"/>{spot}</svg>'
        value = escape(line.value or value_label(line.last, chart.unit))
        items.append(f"<li>{sample}{escape(line.name)} <b>{value}</b></li>")
    if chart.limit is not None:
        sample = '<svg viewBox="0 0 24 10" aria-hidden="true"><path class="limit" d="M0 5H24"/></svg>'
        items.append(f"<li>{sample}{escape(chart.limit_name)} <b>{value_label(chart.limit, chart.unit)}</b></li>")
    for kind, places in chart.signs.items():
        if places:
            shown = f" ({MAX_SIGNS} shown)" if len(places) > MAX_SIGNS else ""
            sign = f'<svg class="sign" viewBox="-7 0 24 10" aria-hidden="true"><path d="{SIGNS[kind]}"/></svg>'
            items.append(f"<li>{sign}{kind} <b>{len(places):,}</b>{shown}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _lanes(chart: Chart, across: Scale) -> str:
    """Return one row of signs for each kind that occurs."""
    lanes: list[str] = []
    for kind, places in chart.signs.items():
        chosen = places[:: -(-len(places) // MAX_SIGNS)] if places else []
        signs = "".join(
            f'<svg viewBox="0 0 10 10" style="left:{100 * across.place(place):.2f}%" role="img">'
            f'<title>{escape(text)}</title><path d="{SIGNS[kind]}"/></svg>'
            for place, text in chosen
            if across.low <= place <= across.high
        )
        lanes += [f'<div class="lane" style="grid-row:{3 + len(lanes)}">{signs}</div>'] * bool(signs)
    return "".join(lanes)
