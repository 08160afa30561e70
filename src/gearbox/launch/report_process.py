"""Write a run's report in another process, at the lowest priority, so that training does not wait for it.

A thread would hold the interpreter's lock for seconds where a run has 100,000 steps. The process reads files only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from gearbox import ROOT, filesystem
from gearbox.launch.environment import without_launcher

SCRIPT = ROOT / "src" / "report.py"
WRITTEN = ("report.html", "loss.png")
FIRST_SECONDS = 10  # before the first report: a run that ends sooner writes one at its end
REFRESH_SECONDS = 300  # until the next report of a run that neither evaluates nor saves meanwhile
REST = 20  # times the last report's duration, until the next one starts
REST_SECONDS = 5
LOWEST_PRIORITY = 19
WAIT_SECONDS = 120  # for a report at the end of a run that has failed


class ReportProcess:
    """Rewrites the report of a run when it is asked to, with one process at a time. No failure reaches the run."""

    def __init__(self, folder: Path, is_first_rank: bool) -> None:
        """Store the run's folder. Only the first rank starts processes."""
        self.folder, self.is_first_rank = folder, is_first_rank
        self.is_due = True
        """Whether something has changed since the last report."""
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()
        self._not_before = self._started + FIRST_SECONDS

    def request(self) -> None:
        """Ask for a report, now or as soon as the last one is written."""
        self.is_due = True
        self.start_if_due()

    def start_if_due(self) -> None:
        """Start a process if a report is due and none is being written. It takes microseconds otherwise."""
        now = time.monotonic()
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._process, self._not_before = None, now + max(REST_SECONDS, REST * (now - self._started))
        is_due = self.is_due or now - self._started > REFRESH_SECONDS
        if self.is_first_rank and is_due and now >= self._not_before:
            self._process, self._started, self.is_due = _start(self.folder), now, False

    def close(self) -> None:
        """End a process that is still writing, because the run writes the last report itself."""
        if self._process is not None:
            _end(self._process, self.folder)
            self._process = None


def write(folder: Path) -> None:
    """Write the report of a run that has ended without doing so, and wait for it."""
    if (process := _start(folder)) is not None:
        try:
            process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process, folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill a process and remove what it has not completed."""
    process.kill()
    process.wait()
    for name in WRITTEN:
        for leftover in folder.glob(f"{name}.tmp-*"):
            filesystem.remove(leftover)


def _start(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start src/report.py at the lowest priority. Return None if that is not possible."""
    silent = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env=without_launcher(),
            stdin=silent,
            stdout=silent,
            stderr=silent,
            start_new_session=True,
        )
    except OSError:  # no memory, or too many processes
        return None
    with suppress(psutil.Error, OSError):
        started = psutil.Process(process.pid)
        started.nice(LOWEST_PRIORITY)
        started.ionice(psutil.IOPRIO_CLASS_IDLE)
    return process
