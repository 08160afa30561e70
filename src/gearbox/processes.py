"""Find parents and launchers, end with them, check whether a process is alive, and what this machine gives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
MEBIBYTE = 2**20
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent dies (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def is_alive(process: psutil.Process, states: tuple[str, ...] = ()) -> bool:
    """Return whether the process exists and is not a zombie; with `states`, whether it is in one of these states."""
    try:
        state = process.status() if process.is_running() else psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    return state in states if states else state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def is_python(process: psutil.Process) -> bool:
    """Return whether the process runs a Python interpreter. Unreadable processes belong to another user: False."""
    try:
        return Path(process.exe()).name.startswith("python")
    except (psutil.Error, OSError):
        return False


def check_launcher(launcher: int, awaited: Path) -> None:
    """Raise RuntimeError if this process has lost its launcher, the parent with this PID, while it waits for a file."""
    if os.getppid() != launcher:
        raise RuntimeError(f"the launcher exited while this rank waited for {awaited}")


def launcher_command() -> list[str] | None:
    """Return the command line of the `accelerate launch` above this process, or None without a launcher."""
    launcher = launcher_process()
    return launcher.cmdline() if launcher else None


def launcher_process() -> psutil.Process | None:
    """Return the `accelerate launch` process above this one, or None without a launcher."""
    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        names = [Path(part).name for part in command[:4]]
        is_command = "accelerate-launch" in names or ("accelerate" in names and "launch" in command)
        if is_command or {"accelerate.commands.launch", "accelerate.commands.accelerate_cli"} & {*command[:4]}:
            return process
    return None


def num_visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process can use, without asking torch, whose import takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(path) for path in NVIDIA_GPUS.glob("*")] if visible is None else visible.split(",")
    return len([gpu for gpu in gpus if gpu not in ("", "-1")])


@contextlib.contextmanager
def returning_free_memory(for_good: bool = False) -> Iterator[None]:
    """Return each block of 1 MiB or more to the system as soon as it is freed, where the C library can do so.

    The GNU C library otherwise keeps freed blocks up to 32 MiB for itself. Loading a model tensor by tensor would leave
    as much free memory as the model has. Afterwards the library's usual upper limits hold, unless `for_good` is true.
    SmolLM2 135M then trains in 0.5 to 0.8 times the memory, and takes 1.2 to 1.5 times as long.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        yield
        return
    set_option(M_MMAP_THRESHOLD, MEBIBYTE)
    set_option(M_TRIM_THRESHOLD, MEBIBYTE)
    try:
        yield
    finally:
        if not for_good:
            set_option(M_MMAP_THRESHOLD, 32 * MEBIBYTE)
            set_option(M_TRIM_THRESHOLD, 64 * MEBIBYTE)


def return_free_memory() -> None:
    """Return memory that is free inside this process to the system, where the C library can do so."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not glibc
        ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> int:
    """Return the bytes of memory that this process can still take on this machine, or in its container if less."""
    free, room = psutil.virtual_memory().available, cgroup_room()
    return free if room is None else min(free, room)


def resident_memory() -> int:
    """Return the bytes of memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left below the memory limits of this process's control groups; None without a limit.

    Cached files do not count, because the system frees them when memory is needed.
    """
    rooms = []
    for folder in _memory_groups(root):
        for limit, used, cached in (
            ("memory.max", "memory.current", ("file", "shmem")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache", "total_shmem")),  # version 1
        ):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                room = int((folder / limit).read_text()) - int((folder / used).read_text())
                rooms.append(room + _cached(folder / "memory.stat", *cached))
    return max(0, min(rooms)) if rooms else None


def _memory_groups(root: Path) -> list[Path]:
    """Return the folders of the control groups that limit this process's memory. A container may show only `root`."""
    folders = [root, root / "memory"]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds or "memory" in kinds.split(","):
                base = root / "memory" if kinds else root
                group = base / path.strip("/")
                folders += [one for one in (group, *group.parents) if one.is_relative_to(base) and one != base]
    return folders


def _cached(statistics: Path, files: str, shared: str) -> int:
    """Return the bytes of cached files, without the shared memory that is counted as files; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        numbers = dict(line.split(maxsplit=1) for line in statistics.read_text().splitlines())
        return int(numbers[files]) - int(numbers[shared])
    return 0
