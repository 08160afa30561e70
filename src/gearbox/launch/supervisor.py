"""Run a script under `accelerate launch` until its run has ended, and launch it again where a rank has died.

Each attempt has its own launcher and rendezvous: so a restart works the same under every gear, and a launcher that dies
is no exception. An attempt that saves a newer checkpoint is progress; only a few in a row may be without.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from gearbox import ROOT, processes
from gearbox.launch.outcome import (
    EXIT_CODES,
    EXIT_CRASHED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_SAVED,
    OUTCOME_FILE,
    RUN_FOLDER,
    read_outcome,
)
from gearbox.launch.topology import Node

TRAIN = ROOT / "src" / "train.py"
DOCTOR = ROOT / "src" / "doctor.py"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MAX_RESTARTS = 3  # without a newer checkpoint between them
SHUTDOWN_SECONDS = 600  # for ranks that are asked to end: they save first
JOIN_SECONDS = 300  # for machines to meet, beyond the time in which one may still wait for a rank that is gone
MAX_ALONE = 5  # attempts in which this machine met no other
LAUNCHER_SECONDS = 30  # for a launcher without ranks, which may wait for one on a machine that is gone
LOOK_SECONDS = 1.0


def supervise(
    flags: list[str],
    arguments: list[str],
    script: Path = TRAIN,
    output: IO[str] | None = None,
    node: Node | None = None,
    join_seconds: float = float("inf"),
) -> int:
    """Run the script under `accelerate launch` until it is done, saved or failed; return the exit code.

    Everything is printed to the screen, or to `output`. Where there are several machines, each supervises its own
    launchers, and has `join_seconds` to meet the others at the start and after each attempt.
    """
    return Supervisor(flags, arguments, script, output, node, join_seconds).run()


class Supervisor:
    """The attempts of one run on this machine."""

    def __init__(
        self,
        flags: list[str],
        arguments: list[str],
        script: Path,
        output: IO[str] | None,
        node: Node | None,
        join_seconds: float,
    ) -> None:
        """Start nothing yet. The parameters are those of `supervise`."""
        node_flags = [] if node is None else node.flags(join_seconds)
        self.command = [*flags, *node_flags, str(script), *arguments]
        self.script, self.output, self.node = script, output, node
        self.join_seconds, self.deadline = join_seconds, time.monotonic() + join_seconds
        """When this machine gives up meeting the others."""
        self.num_alone = 0
        """Attempts in a row in which it met none of them."""
        self.run_folder: str | None = None
        """Known once the run has taken a step; from then on attempts resume."""
        self.saved_step = self.num_restarts = 0
        """The newest checkpoint's step, and the restarts since."""
        self.signals: list[int] = []
        """The signals that asked the run to stop."""

    def run(self) -> int:
        """Launch until the run has ended; return the exit code."""
        with tempfile.TemporaryDirectory() as folder:
            outcome_file = Path(folder) / "outcome"
            while True:
                outcome_file.unlink(missing_ok=True)
                code, has_met = self._attempt(outcome_file)
                if has_met or self.node is None or self.signals:
                    exit_code = self._after_attempt(code, read_outcome(outcome_file))
                else:
                    exit_code = self._after_meeting_none(self.node)
                if exit_code is not None:
                    return exit_code

    def _attempt(self, outcome_file: Path) -> tuple[int, bool]:
        """Launch once; return the launcher's exit code, and whether there were any ranks.

        A launcher has none until it has met those of the other machines.
        """
        environment = os.environ | {
            OUTCOME_FILE: str(outcome_file),
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1",  # else SIGUSR1 kills torch's launcher, not its ranks
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),  # else it kills ranks that save for over 30 s
        }
        if self.run_folder is not None:
            environment[RUN_FOLDER] = self.run_folder
        launcher = Launcher(self.script)
        with self._forward_signals(launcher):
            if self.node is not None:
                while not self.node.is_reachable():
                    if self.signals or not self._may_wait():
                        return EXIT_CRASHED, False
                    time.sleep(LOOK_SECONDS)
                environment |= self.node.environment()
            launcher.start(self.command, environment, self.output)
            code = launcher.wait(self._may_wait)
        return code, bool(launcher.ranks) or code == 0  # ranks may end between two looks

    @contextmanager
    def _forward_signals(self, launcher: Launcher) -> Iterator[None]:
        """Note each signal that asks for a stop, and send it to the ranks."""

        def forward(number: int, _: FrameType | None) -> None:
            self.signals.append(number)
            launcher.forward(number)

        usual = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def _may_wait(self) -> bool:
        """Return whether machines that have not come may still come."""
        return self.node is None or (time.monotonic() < self.deadline and self._code_of_other_machine() is None)

    def _code_of_other_machine(self) -> int | None:
        """Return the exit code of a run that another machine's launcher has ended, None while it continues."""
        status = {} if self.run_folder is None else read_outcome(Path(self.run_folder) / "status.json")
        return EXIT_CODES.get(status.get("outcome", ""))

    def _after_meeting_none(self, node: Node) -> int | None:
        """Return the exit code, None for another attempt: another machine may still be in the one before this."""
        self.num_alone += 1
        if (code := self._code_of_other_machine()) is not None:
            return code
        if time.monotonic() < self.deadline and self.num_alone < MAX_ALONE:
            return None
        self._print(
            f"{node.num_machines} machines did not meet at {node.address}:{node.port} within {self.join_seconds:g} s"
        )
        return EXIT_CRASHED if self.run_folder is None else EXIT_SAVED

    def _after_attempt(self, code: int, status: dict[str, Any]) -> int | None:
        """Return the exit code by the launcher's and by what the ranks have written, None for another attempt."""
        self.deadline, self.num_alone = time.monotonic() + self.join_seconds, 0
        outcome, saved_step = status.get("outcome", ""), int(status.get("saved_step", self.saved_step))
        if status.get("step"):
            self.run_folder = status["run"]
        if outcome in ("refused", "failed"):
            print(status["text"], file=self.output or sys.stderr)
        if outcome == "saved" and code == -signal.SIGKILL and not self.signals:
            outcome = "running"  # nobody asked for this end: the launcher was killed, and its ranks have saved
        if outcome in EXIT_CODES or self.signals:
            if self.signals.count(signal.SIGINT) > 1:
                return EXIT_INTERRUPTED
            return EXIT_CODES.get(outcome, EXIT_SAVED)  # asked to stop with nothing to save, or too little time for it
        if self.run_folder is None:
            return code  # it has not come to its first step, and would not come there next time
        return self._restart(code, saved_step)

    def _restart(self, code: int, saved_step: int) -> int | None:
        """Count a restart and print it; return an exit code where there were too many without progress."""
        self.num_restarts = 1 if saved_step > self.saved_step else self.num_restarts + 1
        self.saved_step = max(self.saved_step, saved_step)
        if self.num_restarts > MAX_RESTARTS:
            self._print(
                f"{MAX_RESTARTS} restarts in a row came to no checkpoint after step {self.saved_step}; the reason "
                f"stands above; {self.run_folder} keeps what there is"
            )
            return EXIT_FAILED
        self._print(f"the run ended with code {code}; restart {self.num_restarts} goes on from step {self.saved_step}")
        return None

    def _print(self, line: str) -> None:
        print(f"gearbox: {line}", file=self.output or sys.stderr, flush=True)


class Launcher:
    """One `accelerate launch` on this machine, and the ranks that it starts."""

    def __init__(self, script: Path) -> None:
        """Start nothing yet. Ranks are the launcher's children that run the script."""
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None
        self.ranks: list[psutil.Process] = []
        """Those seen last; empty until there are any."""

    def start(self, command: list[str], environment: dict[str, str], output: IO[str] | None) -> None:
        """Start it in its own session: a terminal's Ctrl-C comes to this process only, which forwards it once."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *command],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM),
        )

    def forward(self, number: int) -> None:
        """Send a signal to the ranks. End the launcher where it has none yet."""
        self._find_ranks()
        for rank in self.ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if self.process is not None and not self.ranks:
            self.process.terminate()

    def wait(self, may_wait: Callable[[], bool]) -> int:
        """Wait until neither launcher nor ranks are left; return the exit code.

        A launcher without ranks waits for other machines: end it once `may_wait` is False.
        """
        assert self.process is not None
        last_seen = math.inf
        while not self._ends_within(LOOK_SECONDS):
            self._find_ranks()
            if not self.ranks and not may_wait():
                self.process.terminate()
            if any(map(processes.is_alive, self.ranks)):
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > LAUNCHER_SECONDS:
                self.process.kill()
                self.process.wait()
                return EXIT_CRASHED
        _, alive = psutil.wait_procs(self.ranks, timeout=SHUTDOWN_SECONDS)
        for rank in alive:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        return self.process.returncode

    def _ends_within(self, seconds: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _find_ranks(self) -> None:
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children() if self.process else []
            self.ranks = [child for child in children if str(self.script) in child.cmdline()] or self.ranks
