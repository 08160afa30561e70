"""Provide the fixture that runs the doctor on forked ranks."""

import json
import os

import pytest

import doctor
from gearbox.config.gear import load_gear
from gearbox.doctor import comm_benchmark
from support.examination import DDP
from support.ranks import fork_ranks, launcher_environment


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Run the doctor on forked ranks: examine(plant, "--timeout", "2") -> exit codes, output, JSON report."""
    monkeypatch.setattr(doctor, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(comm_benchmark, "message_sizes", lambda device: [2**16])

    def call(plant=lambda rank: None, *arguments: str, ranks: int = 2, meanwhile=lambda children: None):
        gear = load_gear(DDP, {"num_processes": str(ranks)})

        def work() -> int:
            plant(int(os.environ["RANK"]))
            return doctor.main(["--json", *arguments], gear)

        codes, output = fork_ranks(ranks, launcher_environment(DDP, ranks), work, meanwhile)
        reports = [line for line in output.splitlines() if line.startswith("{")]
        assert len(reports) == 1, output  # only one rank prints
        assert "Traceback" not in output, output
        return codes, output, json.loads(reports[0])

    return call
