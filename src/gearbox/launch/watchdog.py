"""A thread that looks after a rank: signals, the launcher's and the other ranks' lives, and time without progress.

A signal sets a flag, on which all ranks agree at the next boundary of a step: acting inside a handler would leave ranks
that disagree waiting for each other. The thread works while the main one waits inside a collective.
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
from typing import Any, NoReturn

import psutil

from gearbox import processes
from gearbox.errors import UserError
from gearbox.launch import cli, outcome
from gearbox.redact import redact

LOOK_SECONDS = 0.5
GRACE_SECONDS = 30.0  # beyond the limit, until a collective gives up by itself
ANSWER_SECONDS = 5.0  # for the other ranks' stacks, once this one's is written
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
HANGING = signal.SIGUSR2  # from a rank that has waited too long: write your stack too, and end


class Watchdog:
    """Made by each rank as it starts, in the main thread.

    Before `guard` and after `rest` there is nothing to save: a signal ends the rank at once.
    """

    def __init__(self) -> None:
        self.stop_signal: str | None = None
        """The signal (or the launcher's end) that asked this rank to save and end."""
        self.loop_handles_stop = False
        """Whether a stop is left to the loop, which saves."""
        self._rank = int(os.environ.get("RANK", "0"))
        self._beats, self._doing, self._last = 0, "start", time.monotonic()
        self._siblings: dict[int, psutil.Process] = {}
        self._ranks_here: list[int] = []
        self._timeout = float("inf")
        self._stacks: Any = None
        self._looking = threading.Lock()
        self._parent = os.getppid() if _has_launcher() else None
        if self._parent is not None:
            # Each rank has a session of its own, so killing the launcher's group would leave it.
            processes.die_with_parent(signal.SIGTERM)
        self._wakeup, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*STOPPING, HANGING):
            signal.signal(number, lambda *_: None)  # the thread is woken, and decides
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def heartbeat(self, doing: str) -> None:
        """This rank gets on: it now does this. All ranks beat alike, so that the fewest beats tell the late one."""
        self._beats += 1
        self._doing, self._last = doing, time.monotonic()

    def watch_peers(self, pids: dict[int, int]) -> None:
        """From here on a stop is for the loop to see, and a dead rank of this machine (rank to pid) ends this one."""
        self._ranks_here = sorted(pids)
        self._siblings = {rank: psutil.Process(pid) for rank, pid in pids.items() if rank != self._rank}
        self.loop_handles_stop = True

    def arm(self, folder: Path, seconds: float) -> None:
        """From here on that long without a beat ends the run, with each rank's stack in the folder."""
        folder.mkdir(exist_ok=True)
        self._stacks = (folder / f"rank-{self._rank}.{os.getpid()}.txt").open("w", encoding="utf-8")
        self._last, self._timeout = time.monotonic(), seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Rest when this is left. What fails because another rank died is no failure of this one."""
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

    def disarm(self, ignores_signals: bool = False) -> None:
        """The loop is over: other ranks may end, and nothing is timed. What is not saved yet is worth no stop."""
        with self._looking:
            self._siblings, self._timeout, self.loop_handles_stop = {}, float("inf"), ignores_signals
            faulthandler.cancel_dump_traceback_later()
            stacks, self._stacks = self._stacks, None
        if stacks is not None:
            stacks.close()
            Path(stacks.name).unlink(missing_ok=True)
            with suppress(OSError):  # another rank's is still there, or it was the first to remove the folder
                Path(stacks.name).parent.rmdir()

    def lost_ranks(self) -> list[int]:
        """Ranks of this machine that are gone though nobody rests yet."""
        return [rank for rank, process in self._siblings.items() if not processes.is_alive(process)]

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wakeup], [], [], LOOK_SECONDS)
            for number in os.read(self._wakeup, 64) if ready else b"":
                if number in STOPPING:
                    self._stop(signal.Signals(number).name)
                with self._looking:
                    if number == HANGING and self._stacks is not None:
                        self._hang()
            if self._parent is not None and os.getppid() != self._parent:
                self._parent = None
                self._stop("the launcher's end")
            with self._looking:
                if lost := self.lost_ranks():
                    self._end_without(lost)
                if self._timeout < float("inf"):
                    # Should a C function keep Python's lock, no thread of Python's can speak: then C does.
                    faulthandler.dump_traceback_later(self._timeout + ANSWER_SECONDS, exit=True, file=self._stacks)
                    if time.monotonic() - self._last > self._timeout:
                        self._hang()

    def _stop(self, name: str) -> None:
        if name == self.stop_signal == "SIGINT":
            os._exit(130)
        if not self.loop_handles_stop:
            outcome.exit_without_saving(name)
        if self.stop_signal is None and self._rank == 0:
            print(f"gearbox: {name}: saving after this step; SIGINT again ends at once", file=sys.stderr, flush=True)
        self.stop_signal = name

    def _end_without(self, lost: list[int]) -> NoReturn:
        alive = [rank for rank in self._ranks_here if rank not in lost]
        if self._rank == min(alive):
            said = f"gearbox: rank {', '.join(map(str, lost))} has died ({self._doing}); the other ranks end"
            print(said, file=sys.stderr, flush=True)
        os._exit(outcome.EXIT_CRASHED)

    def _hang(self) -> NoReturn:
        """Write this rank's stacks, wait for the others', and let the first that could write name the late one."""
        mine, folder = self._stacks, Path(self._stacks.name).parent
        stopped = [
            rank for rank, process in self._siblings.items() if processes.is_alive(process, (psutil.STATUS_STOPPED,))
        ]
        facts: dict[str, Any] = {
            "rank": self._rank, "pid": os.getpid(), "host": socket.gethostname(), "beats": self._beats,
            "doing": self._doing, "seconds_ago": round(time.monotonic() - self._last, 1), "stopped": stopped,
        }  # fmt: skip
        mine.write(json.dumps(facts) + "\n" + redact(_stacks()))
        mine.flush()
        for process in self._siblings.values():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(HANGING)
                process.send_signal(signal.SIGCONT)  # one that is stopped could not write
        deadline = time.monotonic() + ANSWER_SECONDS
        found = {self._rank: facts}
        while len(found) < len(self._ranks_here) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 5)
            for rank, process in self._siblings.items():
                path = folder / f"rank-{rank}.{process.pid}.txt"
                if rank not in found and path.is_file() and path.stat().st_size:
                    found[rank] = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        if self._rank == min(rank for rank in found if not any(rank in facts["stopped"] for facts in found.values())):
            said = f"gearbox: no step for {self._timeout:g} s: {_who_is_late(self._ranks_here, found)}"
            print(f"{said}; every stack lies in {folder}", file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS)  # a rank that was woken writes before the launcher ends it
        os._exit(outcome.EXIT_CRASHED)


def _who_is_late(ranks: list[int], found: dict[int, dict[str, Any]]) -> str:
    stopped = sorted({rank for facts in found.values() for rank in facts["stopped"]})
    silent = [rank for rank in ranks if rank not in found]
    if stopped or silent:
        rank = [*stopped, *silent][0]
        return f"rank {rank} {'is stopped' if stopped else 'does not answer'}"
    fewest = min(facts["beats"] for facts in found.values())
    late = [rank for rank, facts in found.items() if facts["beats"] == fewest]
    if len(late) == len(found):
        return f"all ranks wait in {found[late[0]]['doing']}; did they call different collectives?"
    others = next(facts for rank, facts in found.items() if rank not in late)
    return (
        f"rank {', '.join(map(str, late))} is late: in {found[late[0]]['doing']}, while the others are in "
        f"{others['doing']}"
    )


def _stacks() -> str:
    """Of all threads but this one, the main one first. Places in the code, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    main = threading.main_thread().ident
    return "".join(
        f"\nthread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: ident != main)
    )


def _has_launcher() -> bool:
    """Whether the parent is accelerate's launcher or torchrun, and not a shell, whose end is no reason to stop."""
    return "TORCHELASTIC_RUN_ID" in os.environ or (
        (launcher := cli.launcher_process()) is not None and launcher.pid == os.getppid()
    )
