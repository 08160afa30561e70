"""Diagrams: what a recipe and a gear make, and a packed row with its attention mask."""

from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

from pictures import style
from pictures.records import Record
from pictures.style import BLUE, FAINT, GREEN, INK, ORANGE, SOFT, tint

DOCUMENTS = (BLUE, ORANGE, GREEN, style.PINK, style.SKY, style.RED, style.YELLOW)
CELL, PER_LINE = 33, 16
DARK_ORANGE = "#a36200"  # for text
LETTER = 7.867  # pixels of a letter in the command lines
OTHER_GEAR = "zero3"  # to shift to
ENGINES = {  # by Gear.engine, in the order of the picture
    "single": "one device",
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "zero": "ZeRO",
    "tp": "tensor parallel",
    "pp": "pipeline",
}
SHOWN = (
    "model.name",
    "data.path",
    "batch.rows",
    "optim.name",
    "optim.lr",
    "schedule.name",
    "train.steps",
    "train.seed",
)
FILES = {
    "resolved.yaml": "every value in force",
    "metrics.jsonl": "one line per step",
    "report.html": "the run on one page",
    "loss.png": "the losses as a picture",
    "run.json": "what the report needs",
    "answers.jsonl": "answers through the run",
    "status.json": "running, saved or done",
    "checkpoints/": "for any gear",
    "tensorboard/": "curves",
    "model/": "from_pretrained loads it",
    "base/": "the random first weights",
    "lock": "one run per folder",
}


def packing(record: Record) -> bytes:
    """Draw a row of tokens in the colours of its documents, and which token sees which."""
    figure = style.figure(3.78)
    axes = style.blank(figure)
    supervised = [*record["supervised"], *[0] * (len(record["tokens"]) - len(record["supervised"]))]
    left, top = 16, 66
    axes.text(left, 26, "One packed row", fontsize=13, fontweight="bold", va="center")
    text = (
        f"row {record['row']:,} of {record['num_rows']:,}, trained in step {record['step']}; solid: supervised tokens"
    )
    axes.text(left, 48, text, fontsize=10.5, color=SOFT, va="center")
    for place, (token, document) in enumerate(zip(record["tokens"], record["documents"], strict=True)):
        line, column = divmod(place, PER_LINE)
        cell(axes, (left + CELL * column, top + CELL * line), token, document, bool(supervised[place]))
    mask(axes, record, (644, top), CELL * len(record["tokens"]) // PER_LINE)
    axes.text(644, 26, "Its attention mask", fontsize=13, fontweight="bold", va="center")
    axes.text(644, 48, "measured from the model's gradients", fontsize=10.5, color=SOFT, va="center")
    return style.svg(figure, "A packed row and its attention mask")


def colour(document: int) -> str:
    """Return the colour of a document; -1 is padding."""
    return DOCUMENTS[document] if document >= 0 else "#b4bcc4"


def cell(axes: Axes, corner: tuple[float, float], token: str, document: int, solid: bool) -> None:
    """Draw a token, special ones by their short name."""
    x, y = corner
    face = colour(document) if solid else tint(colour(document), 0.22)
    axes.add_patch(Rectangle((x + 0.75, y + 0.75), CELL - 1.5, CELL - 1.5, facecolor=face, linewidth=0))
    special = token.startswith("<|")
    shown = {"<|assistant|>": "asst"}.get(token, token.strip("<|>")) if special else token
    ink = INK if document in (-1, 1, 4, 6) or not solid else "white"
    mono(
        axes, x + CELL / 2, y + CELL / 2, shown, ha="center", va="center_baseline", fontsize=7.6 if special else 13,
        color=SOFT if document < 0 else ink, fontweight="bold" if solid else "normal",
    )  # fmt: skip


def mask(axes: Axes, record: Record, corner: tuple[float, float], side: float) -> None:
    """Draw which tokens have an influence on the output at each token."""
    left, top = corner
    unit = side / len(record["tokens"])
    axes.add_patch(Rectangle(corner, side, side, facecolor="#f3f5f7", edgecolor=FAINT, linewidth=1))
    places = list(enumerate(zip(record["documents"], record["influence"], strict=True)))
    for document, group in groupby(places, key=lambda place: place[1][0]):
        rows = list(group)
        steps = [(left + unit * first, top + unit * (y + down)) for y, (_, (first, _)) in rows for down in (0, 1)]
        for y, (_, (_, last)) in reversed(rows):
            steps += [(left + unit * (last + 1), top + unit * (y + 1)), (left + unit * (last + 1), top + unit * y)]
        axes.add_patch(Polygon(steps, closed=True, facecolor=colour(document), linewidth=0))
    axes.text(left + side / 2, top + side + 15, "attended token", ha="center", va="center", fontsize=10.5, color=SOFT)
    axes.text(
        left - 13, top + side / 2, "attending token", ha="center", va="center", rotation=90, fontsize=10.5, color=SOFT
    )


def shift(record: Record) -> bytes:
    """Draw a recipe and a gear, the engine that runs, and the folder of the run."""
    figure = style.figure(4.72)
    axes = style.blank(figure)
    axes.add_patch(rounded((16, 14), 928, 66, 8, facecolor="#f3f5f7", linewidth=0))
    for y, gear in ((36, record["gear"]), (60, OTHER_GEAR)):
        (engine,) = (name for key, name in ENGINES.items() if gear in record["engines"][key])
        command(axes, y, gear, record["recipe"], f"runs {engine}")
    top, height, middle = 100, 340, 270

    card(axes, (16, top, 258, height), "recipe: what to train", record["recipe"], BLUE)
    for number, key in enumerate(SHOWN):
        group, name = key.split(".")
        y = top + 86 + 27 * number
        mono(axes, 32, y, key, color=SOFT)
        mono(axes, 260, y, str(record["settings"][group][name]), ha="right")
    mono(axes, 32, top + 86 + 27 * len(SHOWN), "...", color=SOFT)

    card(axes, (312, top, 330, height), "gear: how to run it", "accelerate_configs/*.yaml", ORANGE)
    y = top + 76.0
    for engine, name in ENGINES.items():
        y = engine_row(axes, y, name, record["engines"][engine], record["gear"])

    card(axes, (680, top, 264, height), "run: what it leaves", f"{record['run']}/", GREEN)
    for number, name in enumerate(record["files"]):
        y = top + 86 + 27 * number
        mono(axes, 696, y, name)
        axes.text(932, y, FILES.get(name, ""), fontsize=8.6, va="center", ha="right", color=SOFT)

    axes.text(293, middle, "+", fontsize=24, ha="center", va="center", color=SOFT)
    ends = (645, middle), (677, middle)
    axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=22, color=SOFT, linewidth=2.2))
    return style.svg(figure, "A recipe and a gear make a run")


def mono(axes: Axes, x: float, y: float, text: str, **look: object) -> None:
    """Write a name of the repository."""
    axes.text(x, y, text, **({"family": "DejaVu Sans Mono", "fontsize": 10, "va": "center"} | look))


def rounded(corner: tuple[float, float], width: float, height: float, radius: float, **look: object) -> FancyBboxPatch:
    """Return a box with round corners."""
    return FancyBboxPatch(corner, width, height, boxstyle=f"round,pad=0,rounding_size={radius}", **look)


def command(axes: Axes, y: float, gear: str, recipe: str, result: str) -> None:
    """Draw a command line, with recipe and gear in the colours of their cards."""
    launch = "accelerate launch --config_file accelerate_configs/"
    x = 32.0
    for text, ink in ((launch, INK), (gear, DARK_ORANGE), (".yaml src/train.py ", INK), (recipe, BLUE)):
        weight = "normal" if ink == INK else "bold"
        mono(axes, x, y, text, fontsize=9.8, va="center_baseline", color=ink, fontweight=weight)
        x += LETTER * len(text)
    axes.text(930, y, result, fontsize=10, va="center_baseline", ha="right", color=SOFT)


def card(axes: Axes, box: tuple[float, float, float, float], title: str, path: str, colour: str) -> None:
    """Draw a box with a title and the path of a file or folder."""
    x, y, width, height = box
    axes.add_patch(rounded((x, y), width, height, 8, facecolor="white", edgecolor=colour, linewidth=2))
    axes.text(x + 16, y + 24, title, fontsize=12.5, fontweight="bold", va="center")
    mono(axes, x + 16, y + 47, path, color=SOFT)


def engine_row(axes: Axes, y: float, engine: str, gears: list[str], chosen: str) -> float:
    """Draw an engine and the gears that choose it; return where the next one goes."""
    axes.text(328, y + 10, engine, fontsize=9.8, va="center", color=SOFT)
    left, right, height = 436.0, 634.0, 20
    x = left
    for gear in gears:
        width = 7.2 * len(gear) + 12
        if x + width > right:
            x, y = left, y + height + 5
        face = {chosen: ORANGE, OTHER_GEAR: tint(ORANGE, 0.4)}.get(gear, "#f3f5f7")
        axes.add_patch(rounded((x, y), width, height, 5, facecolor=face, linewidth=0))
        weight = "bold" if gear in (chosen, OTHER_GEAR) else "normal"
        mono(axes, x + width / 2, y + 10, gear, fontsize=9, ha="center", va="center_baseline", fontweight=weight)
        x += width + 5
    return y + height + 11
