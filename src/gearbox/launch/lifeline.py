"""Tie this process to its launcher. Each script that may be a rank imports this module first.

A rank has its own session, so killing the launcher's process group does not reach it. From this import on, the kernel
sends SIGTERM to the rank when its launcher ends. Python's own handling of SIGTERM ends the process at once, even during
imports; later the watchdog's handler saves first.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from gearbox import console, processes
from gearbox.launch import outcome
from gearbox.launch.environment import LaunchEnvironment

PARENT = "GEARBOX_PARENT"
LAUNCHER: int | None = None
"""The process id of the launcher that started this rank, or None."""
interrupted = False
"""True once Ctrl-C (SIGINT) has reached this rank."""


def exit_without_saving(why: str) -> NoReturn:
    """Exit at once from any thread, if there is nothing to save. The exit code is a failure's, so all ranks end.

    Write no outcome, because torch's launcher also sends SIGTERM when another rank has failed.
    """
    launched = LaunchEnvironment.read()
    has_launcher = launched.is_rank or processes.launcher_process() is not None
    if launched.rank == 0:
        console.report(f"gearbox: {why}: nothing to save")
        if why == "SIGINT":
            end_launcher()
    os._exit(
        outcome.EXIT_INTERRUPTED if why == "SIGINT" else outcome.EXIT_CRASHED if has_launcher else outcome.EXIT_SAVED
    )


def end_launcher() -> None:
    """End the launcher after this rank has printed its last line, because it would print 14 to 60 lines more.

    Torch's launcher turns SIGTERM into a traceback, so it is killed. A launcher that prints elsewhere is left.
    """
    if LAUNCHER in (None, 1):  # process 1 of a container cannot be killed from inside
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):
        screen = console.screen_stream(stderr=True).fileno()  # 2, unless libraries print elsewhere
        if os.path.samestat(Path(f"/proc/{LAUNCHER}/fd/2").stat(), os.fstat(screen)) and os.getppid() == LAUNCHER:
            os.kill(LAUNCHER, signal.SIGKILL if LaunchEnvironment.read().is_elastic else signal.SIGTERM)


def note_interrupt() -> None:
    """Remember Ctrl-C, which the launcher receives as well.

    Torch's launcher waits for its ranks and then prints a traceback, so `gearbox.launch.cli` ends it after the last
    line. Accelerate's own launcher shares its rank's process group, and waits for a quarter of a second only.
    """
    global interrupted
    interrupted = True
    with suppress(OSError):
        if LAUNCHER is not None and os.getpgid(LAUNCHER) == os.getpgrp():
            end_launcher()


def _tie() -> int | None:
    """Ask for a signal at the parent's end, and exit if it has already ended. Return the launcher's pid, if any."""
    parent, launched = os.environ.get(PARENT), LaunchEnvironment.read()
    if parent is None and not launched.is_launched:
        return None
    processes.die_with_parent(signal.SIGTERM)
    if parent is not None:
        if os.getppid() != int(parent):
            os._exit(outcome.EXIT_CRASHED)
        return None
    if _is_orphan():
        exit_without_saving("the launcher's end")
    launcher = os.getppid() if processes.is_python(psutil.Process(os.getppid())) else None
    signal.signal(signal.SIGINT, _interrupt)
    return launcher


def _is_orphan() -> bool:
    """Return whether the launcher ended before this process could ask for a signal.

    Its successor as parent is process 1 or a session manager. That is rarely Python, while each launcher is.
    src/launch.py is Python and may be process 1, but it starts ranks only by `accelerate launch`.
    """
    if outcome.outcome_file() is not None:
        return processes.launcher_process() is None
    return not any(map(processes.is_python, psutil.Process().parents()))


def _interrupt(*_: object) -> None:
    """End at once on Ctrl-C during imports, without Python's traceback."""
    note_interrupt()
    os._exit(outcome.EXIT_INTERRUPTED)


LAUNCHER = _tie()
