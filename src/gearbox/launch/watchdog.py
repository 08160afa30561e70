"""Watch a rank in a thread: signals, the launcher, the other ranks, and time without progress.

A signal sets a flag, and all ranks agree on it at the next step boundary. A handler that acted at once could leave
ranks waiting for each other. The thread keeps running while the main thread waits in a collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn, TypedDict

import psutil

from gearbox import console, processes
from gearbox.errors import UserError
from gearbox.launch import lifeline, outcome
from gearbox.launch.environment import LaunchEnvironment
from gearbox.redact import redact

LOOK_SECONDS = 0.5
GRACE_SECONDS = 30.0  # after the limit, until a collective times out by itself
ANSWER_SECONDS = 5.0  # for the other ranks' stacks, after this rank has written its own
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
HANG_SIGNAL = signal.SIGUSR2  # from a rank that has waited too long: write your stack and exit


class HangFacts(TypedDict):
    """The first line of a rank's stack file, as JSON."""

    rank: int
    pid: int
    host: str
    beats: int
    doing: str
    seconds_ago: float
    stopped: list[int]
    """Other ranks on this machine that are stopped (SIGSTOP)."""


class Watchdog:
    """A thread that watches a rank, and its state. Each rank creates one at start-up, in the main thread.

    Before `watch_peers` and after `disarm`, there is nothing to save, so a signal ends the rank at once.
    """

    def __init__(self) -> None:
        """Install the signal handlers and start the thread."""
        self.stop_signal: str | None = None
        """The signal (or the launcher's end) that asked this rank to save and exit."""
        self._on_stop = ""
        """What the main thread does about a stop, for the screen. Empty while there is nothing to save."""
        self._rank = LaunchEnvironment.read().rank
        self._beats, self._doing, self._last_beat = 0, "start", time.monotonic()
        self._siblings: dict[int, psutil.Process] = {}
        self._local_ranks: list[int] = []
        self._timeout = float("inf")
        self._stacks: IO[str] | None = None
        self._looking = threading.Lock()
        self._parent = lifeline.LAUNCHER
        self._wakeup, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, HANG_SIGNAL):
            signal.signal(number, lambda *_: None)  # only wakes the thread, which decides
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    @property
    def stop_requested(self) -> bool:
        """True if this rank was asked to save and exit."""
        return self.stop_signal is not None

    def heartbeat(self, doing: str) -> None:
        """Record progress and the current activity. Ranks beat equally often, so a late rank has the fewest beats."""
        self._beats += 1
        self._doing, self._last_beat = doing, time.monotonic()

    def watch_peers(self, pids: dict[int, int]) -> None:
        """Leave stops to the loop from now on, and exit if another rank on this machine (rank to pid) dies."""
        self._local_ranks = sorted(pids)
        self._siblings = {rank: psutil.Process(pid) for rank, pid in pids.items() if rank != self._rank}
        self._on_stop = "saving after this step"

    def arm(self, folder: Path, seconds: float) -> None:
        """End the run after `seconds` without a heartbeat, from now on, with every rank's stack in `folder`."""
        folder.mkdir(exist_ok=True)
        self._stacks = (folder / f"rank-{self._rank}.{os.getpid()}.txt").open("w", encoding="utf-8")
        self._last_beat, self._timeout = time.monotonic(), seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Disarm at the end. If another rank has died, report its death, not the error that follows here."""
        try:
            yield
        except UserError:
            raise
        except Exception:
            time.sleep(LOOK_SECONDS)
            if lost := self.lost_ranks():
                self._end_without(lost)
            raise
        finally:
            self.disarm()

    def disarm(self, on_stop: str = "") -> None:
        """Stop watching peers and time after the loop. A stop ends this rank at once, unless `on_stop` is given.

        `on_stop` is what the screen shows after the signal. The caller looks at `stop_requested`, or ignores the stop.
        """
        with self._looking:
            self._siblings, self._timeout, self._on_stop = {}, float("inf"), on_stop
            faulthandler.cancel_dump_traceback_later()
            stacks, self._stacks = self._stacks, None
        if stacks is not None:
            stacks.close()
            Path(stacks.name).unlink(missing_ok=True)
            with suppress(OSError):  # another rank's file is still there, or another rank removed the folder
                Path(stacks.name).parent.rmdir()

    def lost_ranks(self) -> list[int]:
        """Return the watched ranks on this machine that have died."""
        return [rank for rank, process in self._siblings.items() if not processes.is_alive(process)]

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wakeup], [], [], LOOK_SECONDS)
            for number in os.read(self._wakeup, 64) if ready else b"":
                if number in STOP_SIGNALS:
                    self._stop(signal.Signals(number).name)
                with self._looking:
                    if number == HANG_SIGNAL and self._stacks is not None:
                        self._hang()
            if self._parent is not None and os.getppid() != self._parent:
                self._parent = None
                self._stop("the launcher's end")
            with self._looking:
                if lost := self.lost_ranks():
                    self._end_without(lost)
                if self._timeout < float("inf"):
                    assert self._stacks is not None
                    # If a C function holds the GIL, no Python thread can run. Then C code writes the stacks.
                    faulthandler.dump_traceback_later(self._timeout + ANSWER_SECONDS, exit=True, file=self._stacks)
                    if time.monotonic() - self._last_beat > self._timeout:
                        self._hang()

    def _stop(self, name: str) -> None:
        if name == self.stop_signal == "SIGINT":
            os._exit(outcome.EXIT_INTERRUPTED)
        if name == "SIGINT":
            lifeline.note_interrupt()
        if not self._on_stop:
            lifeline.exit_without_saving(name)
        if self.stop_signal is None and self._rank == 0:
            console.report(f"gearbox: {name}: {self._on_stop}; send SIGINT again to exit at once")
        self.stop_signal = name

    def _end_without(self, lost: list[int]) -> NoReturn:
        """Exit because other ranks have died. The first living rank reports it."""
        alive = [rank for rank in self._local_ranks if rank not in lost]
        if self._rank == min(alive):
            line = f"gearbox: rank {', '.join(map(str, lost))} died ({self._doing}); the other ranks exit"
            console.report(line)
        os._exit(outcome.EXIT_CRASHED)

    def _hang(self) -> NoReturn:
        """Write this rank's stacks, wait for the other ranks' stacks, print the late rank, and exit.

        Only the first rank that answered and was not stopped prints.
        """
        assert self._stacks is not None
        folder = Path(self._stacks.name).parent
        stopped = [
            rank for rank, process in self._siblings.items() if processes.is_alive(process, (psutil.STATUS_STOPPED,))
        ]
        facts: HangFacts = {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beats": self._beats,
            "doing": self._doing,
            "seconds_ago": round(time.monotonic() - self._last_beat, 1),
            "stopped": stopped,
        }
        self._stacks.write(json.dumps(facts) + "\n" + redact(_format_stacks()))
        self._stacks.flush()
        for process in self._siblings.values():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(HANG_SIGNAL)
                process.send_signal(signal.SIGCONT)  # a stopped rank could not write
        answers = self._await_answers(folder, facts)
        all_stopped = {rank for answer in answers.values() for rank in answer["stopped"]}
        if self._rank == min(rank for rank in answers if rank not in all_stopped):
            line = f"gearbox: no step for {self._timeout:g} s: {_who_is_late(self._local_ranks, answers)}"
            console.report(f"{line}; stacks saved to {folder}")
        time.sleep(LOOK_SECONDS)  # lets a woken rank write before the launcher ends it
        os._exit(outcome.EXIT_CRASHED)

    def _await_answers(self, folder: Path, own: HangFacts) -> dict[int, HangFacts]:
        """Return the facts that each rank on this machine wrote in time, by rank."""
        answers = {self._rank: own}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < len(self._local_ranks) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 5)
            for rank, process in self._siblings.items():
                path = folder / f"rank-{rank}.{process.pid}.txt"
                if rank not in answers and path.is_file() and path.stat().st_size:
                    answers[rank] = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        return answers


def _who_is_late(ranks: list[int], answers: dict[int, HangFacts]) -> str:
    stopped = sorted({rank for facts in answers.values() for rank in facts["stopped"]})
    silent = [rank for rank in ranks if rank not in answers]
    if stopped or silent:
        rank = [*stopped, *silent][0]
        return f"rank {rank} {'is stopped' if stopped else 'does not answer'}"
    fewest = min(facts["beats"] for facts in answers.values())
    late = [rank for rank, facts in answers.items() if facts["beats"] == fewest]
    if len(late) == len(answers):
        return f"all ranks are waiting in {answers[late[0]]['doing']}; did they call different collectives?"
    others = next(facts for rank, facts in answers.items() if rank not in late)
    return (
        f"rank {', '.join(map(str, late))} is late: in {answers[late[0]]['doing']}, while the others are in "
        f"{others['doing']}"
    )


def _format_stacks() -> str:
    """Return the stacks of all other threads, the main thread first. They contain lines of code but no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    main = threading.main_thread().ident
    return "".join(
        f"\nthread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: ident != main)
    )
