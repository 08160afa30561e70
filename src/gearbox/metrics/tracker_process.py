"""Run a tracker in a separate process, which answers one request after another.

A tracker's library patches others, handles signals, prints, and may hang or crash. Here it can do so: its output goes
to run.log, and this process can be killed. If the training process is killed, its pipe ends, and the tracker finishes.

Usage: python -m gearbox.metrics.tracker_process
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gearbox import filesystem
from gearbox.errors import one_line_with_type
from gearbox.launch.environment import python_path, without_launcher
from gearbox.metrics.tracker_start import ENVIRONMENT, Description, LocalTracker, Opened

JsonObject = dict[str, Any]
ORPHAN_SECONDS = 20.0  # to finish after the training process was killed
NICENESS = 10  # imports take seconds of a core
LOCK_SECONDS = 30.0  # to wait for such a process of an earlier attempt


class TrackerError(Exception):
    """An error in a tracker's process, in one line."""

    def __str__(self) -> str:
        return str(self.args[0])


class RemoteTracker:
    """A tracker in a separate process (a `Tracker` of trackers.py)."""

    def __init__(self, name: str, description: Description) -> None:
        self.name, self.description = name, description
        self.process: subprocess.Popen[str] | None = None

    def open(self, run_id: str, resumes: bool, after: int) -> Opened:
        """Start the process and the tracker."""
        module = [sys.executable, "-m", "gearbox.metrics.tracker_process"]
        own = {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        with log_of(self.description.folder / "run.log") as log:
            self.process = subprocess.Popen(
                module,
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                text=True,
                env=ENVIRONMENT | without_launcher() | own,
                start_new_session=True,  # Ctrl-C is for the training process
            )
        run = {"name": self.name, "run": self.description.to_json()}
        reply = self._ask("open", **run, run_id=run_id, resumes=resumes, after=after)
        return Opened(**reply)

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Record the numbers of a step."""
        self._ask("log", numbers=numbers, step=step)

    def close(self) -> None:
        """Finish the run, and wait for the process."""
        self._ask("close")
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def abandon(self) -> None:
        """Kill the process and those that it has started."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _ask(self, do: str, **arguments: object) -> JsonObject:
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        answer = ""
        with suppress(OSError):  # the process may have ended
            process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            raise TrackerError(f"its process ended with exit code {process.wait()}; see run.log")
        reply: JsonObject = json.loads(answer)
        if "error" in reply:
            raise TrackerError(reply["error"])
        return reply


def log_of(path: Path) -> IO[str]:
    """Return the run's log, or nowhere where files cannot be appended to, as in a bucket."""
    try:
        return path.open("a")
    except OSError:
        return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def main() -> None:
    """Answer the requests of the training process until it closes the tracker or ends."""
    os.nice(NICENESS)
    requests, replies = take_streams()
    tracker: LocalTracker | None = None
    locks: list[filesystem.Lock] = []
    for line in requests:
        request = json.loads(line)
        reply: dict[str, object] = {}
        try:
            if request["do"] == "open":
                tracker, opened = start_tracker(request, locks)
                reply = opened._asdict()
            elif tracker is not None:
                tracker.log(request["numbers"], request["step"]) if request["do"] == "log" else tracker.close()
        except BaseException as error:  # a library may also raise SystemExit
            reply = {"error": one_line_with_type(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    threading.Timer(ORPHAN_SECONDS, lambda: os._exit(1)).start()
    if tracker is not None:
        tracker.close()
    os._exit(0)


def take_streams() -> tuple[IO[str], IO[str]]:
    """Return the pipes of requests and replies. What libraries print goes to standard error from now on."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def start_tracker(request: JsonObject, locks: list[filesystem.Lock]) -> tuple[LocalTracker, Opened]:
    """Start the tracker of a request, after the process of an earlier attempt has finished with the run.

    Append the lock of the run, which is held as long as the list.
    """
    from accelerate import PartialState

    from gearbox.redact import guard_streams

    guard_streams()
    run = Description(**{**request["run"], "folder": Path(request["run"]["folder"])})
    run.data.mkdir(exist_ok=True)
    lock = filesystem.Lock(run.data / f"{request['name']}.lock", LOCK_SECONDS)
    if lock.is_taken:
        raise TrackerError("the process of an earlier attempt still uses the run")
    locks.append(lock)
    PartialState(cpu=True)  # of one process: Accelerate's loggers need it
    tracker = LocalTracker(request["name"], run)
    return tracker, tracker.open(request["run_id"], request["resumes"], request["after"])


if __name__ == "__main__":
    main()
