"""Whether checkpoints will fit, and why one could not be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gearbox import filesystem
from gearbox.config.recipe import Save
from gearbox.console import format_bytes
from gearbox.errors import UserError


def explain_write_error(error: Exception, folder: Path, need: int) -> str:
    """Why a shard could not be written, in one line."""
    if isinstance(error, OSError) and error.errno in filesystem.NO_SPACE:
        folder = Path(error.filename or folder)
        return f"{folder}: {os.strerror(error.errno)}: {format_bytes(need)} are needed, {format_bytes(free_bytes(folder))} are free"
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: Path, save: Save, size: int) -> tuple[str, bool]:
    """What the checkpoints will take, for the log, and whether a rename commits them.

    Raises UserError where that much is not free, or nothing can be written.

    Beside those kept (and the best), one more is written before the oldest goes.
    """
    num_kept = save.keep + 2
    there = sum(path.stat().st_size for path in folder.glob("step-*/*"))
    need, free = num_kept * size - there, free_bytes(folder)
    if save.every and need > free:
        raise UserError(
            f"run.dir: {folder} has {format_bytes(free)} free, but {num_kept} checkpoints of {format_bytes(size)} (save.keep, the best, "
            f"and one being written) need {format_bytes(need)} more; free some, or move run.dir"
        )
    try:
        reason = filesystem.rename_problem(folder)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}") from None
    said = f"{format_bytes(size)}, only when a signal ends the run"
    if save.every:
        said = f"{format_bytes(size)} each, every {save.every:,} steps, {save.keep} and the best kept"
    said += f"; {format_bytes(free)} free" + (f"; complete with their manifest: {reason}" if reason else "")
    return said, not reason
