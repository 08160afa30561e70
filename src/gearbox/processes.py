"""Parents and launchers: find them, end with them, ask whether one is alive."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Let this process get a signal when its parent dies, which nothing else would tell it (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def is_alive(process: psutil.Process, states: tuple[str, ...] = ()) -> bool:
    """Whether the process is there and no zombie, and in one of the states if any are given."""
    try:
        state = process.status() if process.is_running() else psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    return state in states if states else state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def launcher_command() -> list[str] | None:
    """The command line of the `accelerate launch` above this process, or None."""
    launcher = launcher_process()
    return launcher.cmdline() if launcher else None


def launcher_process() -> psutil.Process | None:
    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        names = [Path(part).name for part in command[:4]]
        if (
            ("accelerate" in names and "launch" in command)
            or "accelerate-launch" in names
            or ("accelerate.commands.launch" in command)
        ):
            return process
    return None
