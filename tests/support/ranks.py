"""Run train.py on forked ranks (gearbox.distributed.forked_ranks), and read what a run leaves."""

from support.environment import ROOT  # isort: skip  first: it sets variables that other imports read

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train as train_script
from gearbox.config.gear import load_gear
from gearbox.distributed import forked_ranks
from gearbox.distributed.forked_ranks import Limits, launcher_environment
from gearbox.launch.environment import CALLER_RELOADS
from gearbox.training import loop, session  # noqa: F401  warm: they import all that a run does
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
