"""Read metrics.jsonl, one JSON object per line, and set the lines aside that are damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gearbox import filesystem

MAX_LINE_BYTES = 2**20  # a longer line is not one of ours; it counts as several bad lines
Record = dict[str, Any]
LARGEST_LOG = 700.0  # exp of more is infinite
MAX_STEP = 2**53  # larger numbers are not exact as floats


@dataclass
class Records:
    """The content of a metrics.jsonl."""

    good: list[Record] = field(default_factory=list)
    """The records in order. Each has a step."""
    bad: list[bytes] = field(default_factory=list)
    """The lines that are not records, with their line ends."""


def read(path: Path) -> Records:
    """Return the records of a metrics.jsonl, none if it is missing or not a regular file.

    Records after a place that cannot be read are missing, so nothing may replace the file with them.
    """
    return _sorted(_parsed(path, suppress(OSError)))


def take_over(path: Path, tell: Callable[[str], None]) -> Records:
    """Return the records of a file that the caller replaces. Rename a file that cannot be read, and tell so.

    Raise OSError if that fails as well.
    """
    try:
        return _sorted(_parsed(path, nullcontext()))
    except OSError as error:
        number = 1
        while (aside := path.with_name(f"{path.name}.unread-{number}")).exists():
            number += 1
        filesystem.rename(path, aside)
        tell(f"{path}: cannot be read: {error.strerror}; renamed to {aside.name}, and its lines are not used")
        return Records()


def _sorted(lines: Iterable[tuple[bytes, Record | None]]) -> Records:
    found = Records()
    for line, record in lines:
        if record is not None:
            found.good.append(record)
        else:
            found.bad.append(line)
    return found


def records(path: Path) -> Iterator[Record | None]:
    """Yield the records of a metrics.jsonl one by one, and None for each damaged line."""
    return (record for _, record in _parsed(path, suppress(OSError)))


def _parsed(path: Path, guard: AbstractContextManager[None]) -> Iterator[tuple[bytes, Record | None]]:
    """Yield each line with its record, or None. A last line that a kill has cut off is left out."""
    for line in _lines(path, guard) if path.is_file() else ():
        record = parse(line)
        if record is not None or line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
            yield line, record


def _lines(path: Path, guard: AbstractContextManager[None]) -> Iterator[bytes]:
    with guard, path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def parse(line: bytes) -> Record | None:
    """Return the record of a line, or None if the line is damaged: an object with a step and numbers of usual size."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    numbers = [number for number in record.values() if isinstance(number, int)]
    return record if record["step"] >= 0 and all(abs(number) < MAX_STEP for number in numbers) else None


def drop_after(path: Path, step: int, evaluated: int, tell: Callable[[str], None]) -> tuple[Records, Path]:
    """Drop the records after `step` and the evaluations after `evaluated`, which are run again. Atomic.

    Bad lines are appended to another file first. Return what was kept, the bad lines, and the other file. A file that
    can be neither read nor renamed stays as it is.
    """
    aside = path.with_name(f"{path.name}.bad")
    try:
        found = take_over(path, tell)
    except OSError as error:
        tell(f"{path}: cannot be read or renamed: {error.strerror}; new lines are appended to it")
        return Records(), aside
    kept = [r for r in found.good if r["step"] <= step and ("eval_loss" not in r or r["step"] <= evaluated)]
    if found.bad:
        filesystem.append(aside, b"".join(found.bad))
        filesystem.sync(aside)
    filesystem.atomic_write(path, "".join(json.dumps(record) + "\n" for record in kept))
    return Records(kept, found.bad), aside


def perplexity(loss: float) -> float:
    """Return the perplexity of a held-out loss; infinite if the loss is too large for a float, or not finite."""
    return math.exp(loss) if loss < LARGEST_LOG else math.inf
