"""Read and write docs/pictures/measured.json: the figures that the pictures show."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
FILE = FOLDER / "measured.json"

Record = dict[str, Any]  # the figures of one picture, with `made`: date, machine and versions


def read() -> dict[str, Record]:
    """Return the records by the name of their picture."""
    records: dict[str, Record] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return records


def write(records: dict[str, Record]) -> None:
    """Write the records, one line for each figure or list of figures."""
    parts = []
    for name, record in sorted(records.items()):
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    FOLDER.mkdir(exist_ok=True)
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of a run's losses from the reference's."""
    return max(relative_differences(losses, reference))


def relative_differences(losses: list[float], reference: list[float]) -> list[float]:
    """Return the relative difference of each step's loss from the reference's."""
    return [abs(loss - expected) / abs(expected) for loss, expected in zip(losses, reference, strict=True)]
