"""Check that checkpoints fit on the disk and their copies in host memory, and explain failed saves."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from gearbox import filesystem, processes
from gearbox.config.recipe import Save
from gearbox.console import format_bytes
from gearbox.errors import UserError, one_line_with_type
from gearbox.world import World

HOST_MEMORY = "host memory"
"""The place that an error names if memory is short."""


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
    memory_problem: str = ""
    """The reason why training waits until a checkpoint is written; empty if it continues meanwhile."""

    @property
    def renames(self) -> bool:
        """True if a rename commits a checkpoint; otherwise its manifest does, which is written last."""
        return not self.rename_problem

    def describe(self) -> str:
        """Return one line for the log."""
        size, every = format_bytes(self.num_bytes), self.save.every
        when = [f"every {every:,} steps"] * bool(every) + ["at each new best"] * self.save.best
        kept = f"newest {self.save.keep} and the best kept"
        line = f"{size} each, {', '.join(when)}; {kept}" if when else f"{size}, only when a signal ends the run"
        line += f"; {format_bytes(self.free_bytes)} free"
        line += f"; saved in the foreground: {self.memory_problem}" if self.memory_problem else ""
        return line + (f"; committed by their manifest: {self.rename_problem}" if self.rename_problem else "")


def memory_problem(save: Save, num_bytes: int, num_bytes_to_come: int, world: World) -> str:
    """Return why the copies of a checkpoint's shards do not fit in host memory; an empty string if they do.

    Every rank calls it. `num_bytes_to_come` of host memory are not taken yet, but will be before the first save.
    """
    if save.stage is not None:
        return ""
    free_by_rank = world.gather((socket.gethostname(), processes.free_memory()))
    for host in dict(free_by_rank):
        free = [bytes_free for name, bytes_free in free_by_rank if name == host]
        need = (num_bytes + num_bytes_to_come) * len(free) // world.size
        if need > min(free):
            where = "" if len(dict(free_by_rank)) == 1 else f" on {host}"
            return f"{format_bytes(min(free))} of host memory free{where}, {format_bytes(need)} needed"
    return ""


def plan_checkpoints(folder: Path, save: Save, num_bytes: int, memory_problem: str = "") -> DiskPlan:
    """Plan for checkpoints of `num_bytes` each. Raise UserError if they do not fit or the folder is not writable.

    The disk holds the checkpoints to keep, the best one, and one more that is written before the oldest is deleted.
    """
    num_kept = save.keep + 2
    there = sum(path.lstat().st_size for path in folder.glob("step-*/*"))
    need, free = num_kept * num_bytes - there, free_bytes(folder)
    if (save.every or save.best) and need > free:
        raise UserError(
            f"run.dir: {folder} has {format_bytes(free)} free; {num_kept} checkpoints of {format_bytes(num_bytes)} "
            f"(save.keep, best, one in progress) need another {format_bytes(need)}; free space or move run.dir"
        )
    try:
        problem = filesystem.rename_problem(folder)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}") from None
    return DiskPlan(folder, save, num_bytes, free, problem, memory_problem)


def explain_write_error(error: Exception, folder: Path, need: int) -> str:
    """Explain in one line why a shard of `need` bytes could not be staged or written."""
    if lacks_memory(error):
        free = format_bytes(processes.free_memory())
        return f"host memory: has {free} free, but a copy of the checkpoint needs {format_bytes(need)}"
    if isinstance(error, OSError) and error.errno in filesystem.NO_SPACE:
        folder = Path(error.filename or folder)
        free = format_bytes(free_bytes(folder))
        return f"{folder}: {os.strerror(error.errno)}: needs {format_bytes(need)}, has {free} free"
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror}"
    return one_line_with_type(error)


def lacks_memory(error: Exception) -> bool:
    """Return True if an error is a lack of host memory."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of the folder, or of its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
