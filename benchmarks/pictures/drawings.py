"""Draw every picture as SVG from the measured figures."""

import matplotlib

from pictures import charts, diagrams, style
from pictures.records import Record

DRAWINGS = {
    "parity.svg": ("parity", charts.parity),
    "resume.svg": ("resume", charts.resume),
    "memory.svg": ("memory", charts.memory),
    "packing.svg": ("packing", diagrams.packing),
    "shift.svg": ("report", diagrams.shift),
}


def draw(records: dict[str, Record]) -> dict[str, bytes]:
    """Return the SVG of each picture by its file name."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the user's own settings
        matplotlib.rcParams.update(style.SETTINGS)
        return {name: drawing(records[part]) for name, (part, drawing) in DRAWINGS.items() if part in records}
