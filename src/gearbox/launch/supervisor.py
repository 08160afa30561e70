"""Run a script under `accelerate launch` until its run ends, and launch it again if a rank or the launcher dies.

Each attempt has its own launcher and rendezvous, so restarts work the same way under every gear. An attempt makes
progress if it saves a newer checkpoint. Only MAX_RESTARTS attempts in a row may make none.
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

from gearbox import ROOT, console, processes
from gearbox.launch import report_process
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
MAX_RESTARTS = 3  # in a row, without a newer checkpoint
SHUTDOWN_SECONDS = 600  # for ranks to save and exit
JOIN_SECONDS = 300  # for machines to meet, after the time that one may wait for a dead rank
MAX_ALONE = 5  # attempts in a row in which this machine met no other
LAUNCHER_SECONDS = 30  # for a launcher without ranks, which may wait for a machine that is gone
LOOK_SECONDS = 1.0
GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/kfd")  # of NVIDIA and AMD


def supervise(
    flags: list[str],
    arguments: list[str],
    script: Path = TRAIN,
    output: IO[str] | None = None,
    node: Node | None = None,
    join_seconds: float = float("inf"),
) -> int:
    """Run the script under `accelerate launch` until it is done, saved or failed, and return the exit code.

    Print to the screen, or to `output`. On several machines, each machine supervises its launchers. It has
    `join_seconds` to meet the others at the start and after each attempt.
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
        """Store the parameters, which are those of `supervise`. Start nothing."""
        node_flags = [] if node is None else node.flags(join_seconds)
        self.command = [*flags, *node_flags, str(script), *arguments]
        self.script, self.output, self.node = script, output, node
        self.join_seconds, self.deadline = join_seconds, time.monotonic() + join_seconds
        """Time at which this machine stops waiting for the others."""
        self.num_alone = 0
        """Number of attempts in a row in which this machine met no other."""
        self.run_folder: str | None = None
        """The run folder, known once the run has taken a step. Later attempts resume in it."""
        self.saved_step = self.num_restarts = 0
        """Step of the newest checkpoint, and the number of restarts since."""
        self.signals: list[int] = []
        """The signals that asked the run to stop."""

    def run(self) -> int:
        """Launch until the run has ended, and return the exit code."""
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
        """Launch once. Return the launcher's exit code, and whether it started ranks.

        A launcher starts no ranks until it has met the launchers of the other machines.
        """
        environment = os.environ | {
            OUTCOME_FILE: str(outcome_file),
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1",  # else SIGUSR1 kills torch's launcher, not its ranks
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),  # else ranks that save for over 30 s are killed
            "LOGLEVEL": os.environ.get("LOGLEVEL", "ERROR"),  # else torch's launcher advises on OMP_NUM_THREADS
        }
        if not any(map(os.path.exists, GPU_DRIVERS)):  # else DeepSpeed warns that it has found no GPU
            environment.setdefault("DS_ACCELERATOR", "cpu")
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
        return code, bool(launcher.ranks) or code == 0  # ranks may end between two checks

    @contextmanager
    def _forward_signals(self, launcher: Launcher) -> Iterator[None]:
        """Record each stop signal, and forward it to the ranks."""

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
        """Return whether missing machines may still join."""
        return self.node is None or (time.monotonic() < self.deadline and self._code_of_other_machine() is None)

    def _code_of_other_machine(self) -> int | None:
        """Return the exit code if another machine's launcher has ended the run, or None while the run continues."""
        status = {} if self.run_folder is None else read_outcome(Path(self.run_folder) / "status.json")
        return EXIT_CODES.get(status.get("outcome", ""))

    def _after_meeting_none(self, node: Node) -> int | None:
        """Return the exit code, or None to try again, because another machine may still be in its last attempt."""
        self.num_alone += 1
        if (code := self._code_of_other_machine()) is not None:
            return code
        if time.monotonic() < self.deadline and self.num_alone < MAX_ALONE:
            return None
        self._print(
            f"gearbox: {node.num_machines} machines did not meet at {node.address}:{node.port} within "
            f"{self.join_seconds:g} s"
        )
        return EXIT_CRASHED if self.run_folder is None else EXIT_SAVED

    def _after_attempt(self, code: int, status: dict[str, Any]) -> int | None:
        """Return the exit code from the launcher's code and the ranks' outcome, or None to try again."""
        self.deadline, self.num_alone = time.monotonic() + self.join_seconds, 0
        outcome, saved_step = status.get("outcome", ""), status.get("saved_step", self.saved_step)
        if status.get("step"):
            self.run_folder = status.get("run", self.run_folder)
        if outcome in ("refused", "failed"):
            self._print(status.get("text", outcome))
        if outcome == "saved" and code == -signal.SIGKILL and not self.signals:
            outcome = "running"  # no stop was requested: the launcher was killed, and its ranks saved
        if (
            self.run_folder is not None
            and outcome not in ("done", "saved")
            and (self.node is None or not self.node.rank)
        ):
            report_process.write(Path(self.run_folder))  # its ranks had no time to
        if outcome in EXIT_CODES or self.signals:
            if self.signals.count(signal.SIGINT) > 1:
                return EXIT_INTERRUPTED
            return EXIT_CODES.get(outcome, EXIT_SAVED)  # stopped with nothing to save, or without time to save
        if self.run_folder is None:
            return code  # it failed before its first step, and would fail again
        return self._restart(code, saved_step)

    def _restart(self, code: int, saved_step: int) -> int | None:
        """Count and print a restart. Return an exit code after too many restarts without progress."""
        self.num_restarts = 1 if saved_step > self.saved_step else self.num_restarts + 1
        self.saved_step = max(self.saved_step, saved_step)
        if self.num_restarts > MAX_RESTARTS:
            self._print(
                f"gearbox: {MAX_RESTARTS} restarts in a row saved no checkpoint after step {self.saved_step}; see the "
                f"errors above; {self.run_folder} keeps the results so far"
            )
            return EXIT_FAILED
        self._print(
            f"gearbox: run exited with code {code}; restart {self.num_restarts} resumes from step {self.saved_step}"
        )
        return None

    def _print(self, line: str) -> None:
        if self.output is None:
            console.report(line, over_line_of_rank=True)
        else:
            print(line, file=self.output, flush=True)


class Launcher:
    """An `accelerate launch` process on this machine, and the ranks that it starts."""

    def __init__(self, script: Path) -> None:
        """Store the script, and start nothing. Ranks are the launcher's children that run the script."""
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None
        self.ranks: list[psutil.Process] = []
        """The ranks that were last seen; empty until some have started."""

    def start(self, command: list[str], environment: dict[str, str], output: IO[str] | None) -> None:
        """Start the launcher in its own session, so that Ctrl-C reaches only this process, which forwards it once."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *command],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM),
        )

    def forward(self, number: int) -> None:
        """Send a signal to the ranks, or end a launcher that has no ranks yet."""
        self._find_ranks()
        for rank in self.ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if self.process is not None and not self.ranks:
            self.process.terminate()

    def wait(self, may_wait: Callable[[], bool]) -> int:
        """Wait until the launcher and its ranks have ended, and return the exit code.

        A launcher without ranks waits for other machines. End it once `may_wait` returns False.
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
