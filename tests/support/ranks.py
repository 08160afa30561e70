"""Run train.py on forked ranks (gearbox.distributed.forked_ranks), and read what a run leaves."""

from support.environment import ROOT  # isort: skip  first: it sets variables that other imports read

import gc
import io
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file

import ask
import train as train_script
from gearbox.config.gear import load_gear
from gearbox.distributed import forked_ranks
from gearbox.distributed.forked_ranks import Limits, launcher_environment
from gearbox.launch.environment import CALLER_RELOADS
from gearbox.reporting import preview
from gearbox.training import finish, loop, session  # noqa: F401  warm: they import all that a run does
from support import kinds

forked_ranks.warm_up()
PATIENCE, TIMEOUT = Limits().patience, Limits().hang  # read at each fork, so that a test can change them
ADDED: dict[str, str] = {}  # to the environment of each run


@dataclass
class Outcome:
    """The result of a run: exit codes by rank, printed output and run folder."""

    codes: list[int]
    output: str
    folder: Path | None

    def lines(self, key: str) -> list[dict]:
        assert self.folder is not None, self.output
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if key in record]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines("loss")]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        assert self.folder is not None, self.output
        (file,) = (self.folder / "model").glob("*.safetensors")
        return load_file(file)


def fork_ranks(
    num_ranks: int, environment: dict[str, str], work, meanwhile=lambda children: None
) -> tuple[list[int], str]:
    """Call forked_ranks.fork_ranks, but not in a unit test."""
    kinds.refuse_in_unit_tests("ranks", "ranks")
    return forked_ranks.fork_ranks(num_ranks, environment, work, meanwhile, Limits(TIMEOUT, PATIENCE))


def skip_loading_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the fresh process at the end of a run that reloads the model, which takes 5 s."""
    monkeypatch.setattr(sys.modules[__name__], "ADDED", {CALLER_RELOADS: "1"})


@contextmanager
def loaded_back_warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a process forked from here reload the model of the next run, because a fresh process takes 5 s to start.

    Like a fresh process, it has never been a rank.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        _answer(theirs)

    def ask_saved(folder: Path, command: list[str], _) -> str:
        with ours.makefile("rw") as pipe:
            print(json.dumps(command), file=pipe, flush=True)
            answer, error = json.loads(pipe.readline())
        if error:
            raise RuntimeError(f"{folder} was saved but cannot be reloaded:\n{error}")
        return preview.short(answer)

    with monkeypatch.context() as patch:
        patch.setattr(finish, "ask_saved", ask_saved)
        yield
    os.kill(child, 9)
    os.waitpid(child, 0)
    ours.close()
    theirs.close()


def _answer(connection: socket.socket) -> None:
    """Run src/ask.py with the arguments that arrive, send what it prints or its error, and exit."""
    gc.freeze()
    torch.set_num_threads(1)  # as in a rank
    printed, error = io.StringIO(), ""
    with connection.makefile("rw") as pipe:
        command = json.loads(pipe.readline())
        try:
            with redirect_stdout(printed):
                ask.main(command[1:])
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([printed.getvalue(), error]), file=pipe, flush=True)
    os._exit(0)


def supervise_warm(runs: Path, flags: list[str], arguments: list[str], output: IO[str]) -> int:
    """Train on forked ranks in the place of `supervisor.supervise`. Return the exit code."""
    gear, num_ranks = (flag.partition("=")[2] for flag in flags)
    outcome = run_ranks(gear, arguments, runs, int(num_ranks))
    output.write(outcome.output)
    return max(outcome.codes)


def run_ranks(
    gear_name: str, arguments: list[str], runs: Path, num_processes: int | None = None, meanwhile=lambda children: None
) -> Outcome:
    path = ROOT / "accelerate_configs" / f"{gear_name}.yaml" if "/" not in gear_name else Path(gear_name)
    flags = {} if num_processes is None else {"num_processes": str(num_processes)}
    gear = load_gear(path, flags)
    environment = launcher_environment(path, num_processes) | ADDED
    before = set(runs.glob("*")) if runs.exists() else set()

    def work() -> int:
        return train_script.main(arguments, gear)

    codes, output = fork_ranks(gear.num_processes, environment, work, meanwhile)
    made = (set(runs.glob("*")) if runs.exists() else set()) - before
    named = [runs / argument.partition("=")[2] for argument in arguments if argument.startswith("run.name=")]
    return Outcome(codes, output, made.pop() if made else next(iter(named), None))
