"""Charts: losses under five gears, bytes by gear, losses of a run that is killed and resumed."""

from itertools import accumulate

from matplotlib.axes import Axes

from pictures import style
from pictures.records import Record, largest_difference, relative_differences
from pictures.style import BLUE, GEARS, GREEN, INK, ORANGE, RED, SOFT

LOWEST = 1e-8  # where a difference of 0 is drawn


def parity(record: Record) -> bytes:
    """Draw the losses on each other, and below them how far each gear is from one device."""
    losses, tolerance = record["losses"], record["tolerance"]
    steps = range(1, len(losses["single"]) + 1)
    figure = style.figure(5.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.1, 1])
    figure.subplots_adjust(left=0.085, right=0.868, top=0.915, bottom=0.105, hspace=0.16)

    # From thick to thin, so that each line shows at the rims of those on it.
    for number, (gear, values) in enumerate(losses.items()):
        above.plot(steps, values, color=colour(gear), linewidth=thickness(number), solid_joinstyle="round")
    above.set_title("One recipe, five gears, one loss curve")
    above.set_ylabel("loss")
    above.set_ylim(-0.3, None)
    worst = max(largest_difference(values, losses["single"]) for values in losses.values())
    text = f"largest relative difference in {len(steps)} steps: {power(worst)}"
    above.text(0.985, 0.93, text, transform=above.transAxes, ha="right", va="top", fontsize=12, fontweight="bold")
    swatches(above, list(losses))

    below.plot(steps, largest_so_far(record["nudged"], losses["single"]), color="#9aa4ae", linewidth=4)
    for gear, values in losses.items():
        if gear != "single":
            below.plot(steps, largest_so_far(values, losses["single"]), color=colour(gear), linewidth=1.8)
    below.axhline(tolerance, color=RED, linewidth=1.6, linestyle=(0, (5, 3)))
    below.set_yscale("log")
    below.set_ylim(LOWEST, tolerance * 5)
    below.set_yticks(
        [1e-8, 1e-7, 1e-6, 1e-5], labels=["0", *(power(1 / 10**exponent, digits=0) for exponent in (7, 6, 5))]
    )
    below.minorticks_off()
    below.set_ylabel("difference so far")
    _, _, recipe, *_, override = record["command"].split()
    below.set_xlabel(f"step of {recipe} with {override}, in fp32 on CPUs")
    below.set_xlim(0, len(steps))
    beside(below, tolerance, "tolerance", RED)
    below.text(
        1.012, 0.06, "grey: single\nwith one weight\none bit off", transform=below.transAxes, color=SOFT, fontsize=9.5
    )
    return style.svg(figure, "Loss of one recipe under five gears")


def colour(gear: str) -> str:
    """Return the colour of a gear; the reference is a light grey below the others."""
    return "#c3cad1" if gear == "single" else GEARS[gear]


def thickness(number: int) -> float:
    """Return the width of a line that all later ones are drawn on."""
    return (11.5, 8.6, 6.0, 3.7, 1.5)[number]


def power(value: float, digits: int = 1) -> str:
    """Return a number in powers of ten, such as 10⁻⁶ without digits."""
    factor, _, exponent = f"{value:.{digits}e}".partition("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{factor} \u00d7 10{raised}" if digits else f"10{raised}"


def largest_so_far(losses: list[float], reference: list[float]) -> list[float]:
    """Return for each step the largest relative difference of all steps up to it."""
    return list(accumulate([LOWEST, *relative_differences(losses, reference)], max))[1:]


def swatches(axes: Axes, gears: list[str]) -> None:
    """Draw a legend as a cut through the lines, from thick to thin."""
    for number, gear in enumerate(gears):
        height = 0.80 - 0.105 * number
        axes.plot(
            [0.815, 0.865],
            [height, height],
            transform=axes.transAxes,
            color=colour(gear),
            linewidth=thickness(number),
            solid_capstyle="butt",
        )
        axes.text(0.882, height, gear, transform=axes.transAxes, va="center", fontsize=12, family="monospace")


def beside(axes: Axes, value: float, text: str, colour: str) -> None:
    """Write a text to the right of the axes at a value."""
    transform = axes.get_yaxis_transform()
    axes.text(1.012, value, text, transform=transform, va="center", color=colour, fontsize=10.5)


def memory(record: Record) -> bytes:
    """Draw the bytes that a rank holds between two steps and at the optimizer's, per trained weight, by gear."""
    parts = {"parameters": "weights", "masters": "fp32 copy of them", "gradients": "gradients"}
    parts["optimizer"] = "optimizer state"
    colours = {"parameters": BLUE, "masters": style.SKY, "gradients": ORANGE, "optimizer": GREEN}
    figure = style.figure(4.9)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.165, right=0.975, top=0.775, bottom=0.105)
    gears = list(record["gears"])
    for place, gear in enumerate(gears):
        fullest = max(record["gears"][gear], key=lambda rank: sum(rank[part] for part in parts))
        left = 0.0
        for part in parts:
            width = fullest[part] / record["num_weights"]
            axes.barh(place, width, left=left, height=0.72, color=colours[part], edgecolor="white", linewidth=1.2)
            if width >= 0.9:
                ink = INK if part != "parameters" else "white"
                axes.text(
                    left + width / 2, place, f"{round(width, 2):g}", ha="center", va="center", fontsize=10, color=ink
                )
            left += width
        axes.text(left + 0.15, place, f"{round(left, 1):g}", va="center", fontweight="bold", fontsize=12)
        num_ranks = len(record["gears"][gear])
        axes.text(-0.42, place, "1 GPU" if num_ranks == 1 else f"{num_ranks} GPUs", ha="right", va="center", color=SOFT)
        axes.text(-3.1, place, gear, va="center", ha="left", fontsize=12, family="monospace", fontweight="bold")
    axes.set_ylim(len(gears) - 0.45, -0.55)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, 17)
    axes.set_xticks(range(0, 17, 2))
    axes.set_xlabel("bytes per trained weight")
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=style.FAINT, linewidth=0.8)
    figure.text(0.016, 0.948, "What each GPU holds, by gear", fontsize=13, fontweight="bold")
    how = "counted on each rank in a real training step, in the precision that the gear has on GPUs"
    figure.text(0.016, 0.893, how, fontsize=10.5, color=SOFT)
    x = 0.016
    for part, name in parts.items():
        figure.text(x, 0.822, "■", color=colours[part], fontsize=15, va="center")
        figure.text(x + 0.022, 0.826, name, va="center")
        x += 0.050 + 0.0095 * len(name)
    return style.svg(figure, "Bytes per trained weight that one GPU holds, by gear")


def resume(record: Record) -> bytes:
    """Draw the losses of a run that is killed and resumed under other gears on those of an undisturbed run."""
    undisturbed, segments = record["undisturbed"], record["segments"]
    figure = style.figure(5.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.3, 1])
    figure.subplots_adjust(left=0.085, right=0.975, top=0.91, bottom=0.11, hspace=0.12)
    steps = range(1, len(undisturbed) + 1)
    above.plot(steps, undisturbed, color=colour("single"), linewidth=9, solid_joinstyle="round")
    for lane, segment in enumerate(segments):
        first, killed, gear = segment["resumed_from"], segment["killed_in"], segment["gear"]
        places = range(first + 1, first + 1 + len(segment["losses"]))
        above.plot(places, segment["losses"], color=GEARS[gear], linewidth=2.6)
        end = killed or places[-1]
        below.barh(lane, end - first, left=first, height=0.66, color=GEARS[gear])
        ink = INK if gear == "fsdp" else "white"
        text = f"{gear} from step {first}" if first else gear
        below.text(first + 0.9, lane, text, va="center_baseline", color=ink, fontsize=11, fontweight="bold")
        if killed:
            for axes in (above, below):
                axes.axvline(
                    killed,
                    ymax=0.62 if axes is above else 1,
                    color=RED,
                    linewidth=1.3,
                    linestyle=(0, (4, 3)),
                    zorder=0.5,
                )
            below.plot([killed], [lane], marker="X", markersize=13, color=RED, markeredgecolor="white")
            note = f"SIGKILL in step {killed}"
            below.text(killed + 1.6, lane, note, va="center_baseline", color=RED, fontsize=10.5, fontweight="bold")
    above.set_title("Killed twice, resumed under another gear each time")
    above.set_ylabel("loss")
    above.set_ylim(0, max(undisturbed) * 1.04)
    worst = largest_difference(record["resumed"], undisturbed)
    text = f"largest relative difference in {len(steps)} steps: {power(worst)}"
    above.text(0.985, 0.90, text, transform=above.transAxes, ha="right", va="top", fontsize=12, fontweight="bold")
    above.plot([0.70, 0.75], [0.745, 0.745], transform=above.transAxes, color=colour("single"), linewidth=9)
    above.text(0.765, 0.745, "single, undisturbed", transform=above.transAxes, va="center", fontsize=11)
    below.set_xlabel("step")
    below.set_xlim(0, len(undisturbed))
    below.set_ylim(len(segments) - 0.5, -0.5)
    below.set_yticks([])
    below.spines["left"].set_visible(False)
    return style.svg(figure, "Loss of a run that is killed twice and resumed under other gears")
