"""Whether checkpoints will fit, and why one could not be written."""

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
    """Where the checkpoints of a run go, and what they take there."""

    folder: Path
    save: Save
    num_bytes: int
    """Of one checkpoint."""
    free_bytes: int
    rename_problem: str
    """Why no rename commits a checkpoint here; empty where one does."""

    @property
    def renames(self) -> bool:
        """Whether a rename commits a checkpoint; else its manifest does, written last."""
        return not self.rename_problem

    def describe(self) -> str:
        """Return one line for the log."""
        size, every = format_bytes(self.num_bytes), self.save.every
        when = f"each, every {every:,} steps, {self.save.keep} and the best kept"
        said = f"{size} {when}" if every else f"{size}, only when a signal ends the run"
        said += f"; {format_bytes(self.free_bytes)} free"
        return said + (f"; complete with their manifest: {self.rename_problem}" if self.rename_problem else "")


def plan_checkpoints(folder: Path, save: Save, num_bytes: int) -> DiskPlan:
    """Plan for checkpoints of `num_bytes` each. Raises UserError where they do not fit, or nothing can be written.

    In addition to those kept (and the best), one more is written before the oldest is deleted.
    """
    num_kept = save.keep + 2
    there = sum(path.stat().st_size for path in folder.glob("step-*/*"))
    need, free = num_kept * num_bytes - there, free_bytes(folder)
    if save.every and need > free:
        raise UserError(
            f"run.dir: {folder} has {format_bytes(free)} free, but {num_kept} checkpoints of {format_bytes(num_bytes)} "
            f"(save.keep, the best, and one being written) need {format_bytes(need)} more; free some, or move run.dir"
        )
    try:
        problem = filesystem.rename_problem(folder)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}") from None
    return DiskPlan(folder, save, num_bytes, free, problem)


def explain_write_error(error: Exception, folder: Path, need: int) -> str:
    """Return in one line why a shard of `need` bytes could not be written."""
    if isinstance(error, OSError) and error.errno in filesystem.NO_SPACE:
        folder = Path(error.filename or folder)
        free = format_bytes(free_bytes(folder))
        return f"{folder}: {os.strerror(error.errno)}: {format_bytes(need)} are needed, {free} are free"
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror}"
    return one_line_with_type(error)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds the folder, or its nearest parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
