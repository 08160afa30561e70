"""Check that checkpoints fit on the disk, and explain failed writes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from gearbox import filesystem
from gearbox.config.recipe import Save
from gearbox.console import format_bytes
from gearbox.errors import UserError, one_line_with_type


@dataclass(frozen=True)
class DiskPlan:
    """The folder for a run's checkpoints and the space they need there."""

    folder: Path
    save: Save
    num_bytes: int
    """Size of one checkpoint."""
    free_bytes: int
    rename_problem: str
    """The reason why a rename cannot commit a checkpoint here; empty if it can."""

    @property
    def renames(self) -> bool:
        """True if a rename commits a checkpoint; otherwise its manifest does, which is written last."""
        return not self.rename_problem

    def describe(self) -> str:
        """Return one line for the log."""
        size, every = format_bytes(self.num_bytes), self.save.every
        when = f"each, every {every:,} steps; newest {self.save.keep} and the best kept"
        line = f"{size} {when}" if every else f"{size}, only when a signal ends the run"
        line += f"; {format_bytes(self.free_bytes)} free"
        return line + (f"; committed by their manifest: {self.rename_problem}" if self.rename_problem else "")


def plan_checkpoints(folder: Path, save: Save, num_bytes: int) -> DiskPlan:
    """Plan for checkpoints of `num_bytes` each. Raise UserError if they do not fit or the folder is not writable.

    The disk holds the checkpoints to keep, the best one, and one more that is written before the oldest is deleted.
    """
    num_kept = save.keep + 2
    there = sum(path.lstat().st_size for path in folder.glob("step-*/*"))
    need, free = num_kept * num_bytes - there, free_bytes(folder)
    if save.every and need > free:
        raise UserError(
            f"run.dir: {folder} has {format_bytes(free)} free; {num_kept} checkpoints of {format_bytes(num_bytes)} "
            f"(save.keep, best, one in progress) need another {format_bytes(need)}; free space or move run.dir"
        )
    try:
        problem = filesystem.rename_problem(folder)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}") from None
    return DiskPlan(folder, save, num_bytes, free, problem)


def explain_write_error(error: Exception, folder: Path, need: int) -> str:
    """Explain in one line why a shard of `need` bytes could not be written."""
    if isinstance(error, OSError) and error.errno in filesystem.NO_SPACE:
        folder = Path(error.filename or folder)
        free = format_bytes(free_bytes(folder))
        return f"{folder}: {os.strerror(error.errno)}: needs {format_bytes(need)}, has {free} free"
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror}"
    return one_line_with_type(error)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of the folder, or of its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
