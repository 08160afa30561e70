"""Colours, sizes and the writing of SVG: the same figures give the same bytes."""

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDTH = 10.0  # inches: 960 pixels
INK, SOFT, FAINT = "#1f2328", "#59636e", "#d9dee3"
# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW = "#56B4E9", "#D55E00", "#F0E442"
GEARS = {"single": INK, "ddp": BLUE, "fsdp": ORANGE, "zero3": GREEN, "pp": PINK}
SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "svg.fonttype": "path",  # no font of the reader's machine changes the picture
    "svg.hashsalt": "gearbox",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def tint(colour: str, share: float) -> tuple[float, float, float]:
    """Return a colour mixed with white; `share` is that of the colour."""
    red, green, blue = matplotlib.colors.to_rgb(colour)
    return tuple(1 - share * (1 - part) for part in (red, green, blue))


def figure(height: float) -> Figure:
    """Return an empty figure of this height in inches."""
    made = Figure(figsize=(WIDTH, height))
    FigureCanvasSVG(made)
    return made


def blank(made: Figure) -> Axes:
    """Return axes without a frame over the whole figure, in pixels from the top left."""
    axes = made.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 96 * made.get_figwidth())
    axes.set_ylim(96 * made.get_figheight(), 0)
    axes.axis("off")
    return axes


def svg(made: Figure, title: str) -> bytes:
    """Return the figure as SVG, without a date."""
    written = io.BytesIO()
    made.savefig(written, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return b"\n".join(line.rstrip() for line in written.getvalue().splitlines()) + b"\n"
