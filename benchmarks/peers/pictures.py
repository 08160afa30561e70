"""Draw the rates of the systems as bars, and the curves of Gearbox."""

from __future__ import annotations

import statistics

from peers import figures
from peers.cases import CASES, SYSTEMS
from pictures import records, style


def draw(record: figures.Record) -> None:
    """Write the pictures whose figures are there."""
    cases = [name for name in CASES if figures.collect(record, name)]
    if cases:
        (records.FOLDER / "peers.svg").write_bytes(bars(record, cases))
    if "curves" in record:
        (records.FOLDER / "curves.svg").write_bytes(curves(record))


def bars(record: figures.Record, cases: list[str]) -> bytes:
    """Draw the tokens per CPU second of each system, with the range of its rounds."""
    figure = style.figure(0.9 + 2.3 * len(cases))
    places = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.21, right=0.97, top=1 - 0.45 / figure.get_figheight(), bottom=0.05, hspace=0.35)
    for axes, case in zip(places, cases, strict=True):
        found = figures.collect(record, case)
        for place, (name, runs) in enumerate(found.items()):
            rates = [run["cpu_rate"] for run in runs]
            middle = statistics.median(rates)
            colour = style.BLUE if name == "gearbox" else style.tint(style.BLUE, 0.35)
            axes.barh(place, middle, height=0.72, color=colour)
            axes.plot([min(rates), max(rates)], [place, place], color=style.INK, linewidth=1.4)
            axes.text(max(rates), place, f"  {middle:,.0f}", va="center", fontweight="bold")
        axes.set_yticks(range(len(found)), labels=[SYSTEMS[name].title for name in found])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.14 * max(run["cpu_rate"] for runs in found.values() for run in runs))
        axes.set_title(f"{CASES[case].title}: real tokens per CPU second")
    return style.svg(figure, "Tokens per CPU second of Gearbox and other trainers")


def curves(record: figures.Record) -> bytes:
    """Draw each curve of Gearbox on logarithmic axes."""
    from peers.inside import slope

    figure = style.figure(6)
    places = figure.subplots(2, 3, sharey=True).flatten()
    figure.subplots_adjust(left=0.09, right=0.98, top=0.93, bottom=0.1, wspace=0.12, hspace=0.5)
    for axes in places[len(record["curves"]) :]:
        axes.set_visible(False)
    for axes, (name, points) in zip(places, record["curves"].items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=style.BLUE, marker="o", linewidth=2)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_yticks(ticks := [500, 700, 1000, 1400, 2000], labels=[f"{tick:,}" for tick in ticks])
        axes.set_xticks([x for x, _ in points], labels=[f"{x:,}" for x, _ in points])
        axes.minorticks_off()
        axes.set_xlabel(name)
        axes.set_title(f"slope {slope(points):+.2f}", fontsize=11)
    for axes in places[::3]:
        axes.set_ylabel("tokens per second")
    return style.svg(figure, "Tokens per CPU second of Gearbox over rows, layers and documents")
