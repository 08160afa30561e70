"""The doctor names a rank that is missing, dies, fails, hangs or is stopped, and refuses machines that have not met."""

import json
import os
import re
import signal
import time

import psutil
import pytest
import torch

import doctor
from gearbox.config.gear import load_gear
from gearbox.doctor import comm_benchmark, gpus
from support.examination import DDP, HOST, of_colour, on_rank_1
from support.ranks import fork_ranks, launcher_environment


def release(children: list[int]) -> None:
    """Kill rank 1 once rank 0 has ended."""
    first = psutil.Process(children[0])
    while first.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    os.kill(children[1], signal.SIGKILL)


def in_broadcast(act):
    """Return a fault that calls `act` on rank 1, in the middle of the doctor's work."""
    return on_rank_1(lambda: comm_benchmark.COLLECTIVES.update(broadcast=lambda *_: act()))


def test_a_rank_that_never_starts(examine):
    codes, _, report = examine(on_rank_1(lambda: time.sleep(60)), "--timeout", "2", meanwhile=release)
    assert of_colour(report, "red") == {"ranks": f"rank 1 ({HOST}) did not start within 2 s"}
    assert codes[0] == 1


def test_a_rank_that_dies(examine):
    codes, _, report = examine(in_broadcast(lambda: os._exit(9)))
    assert of_colour(report, "red") == {"ranks": f"rank 1 ({HOST}) died in broadcast of 64 KiB"}
    assert codes == [1, 9]


def test_a_rank_that_dies_where_nothing_fails_by_itself(examine, monkeypatch):
    """The other rank waits outside any collective, so no call fails; NCCL's collectives behave like this."""
    monkeypatch.setattr(gpus, "take_device", lambda local_rank: os._exit(9) if local_rank else torch.device("cpu"))
    _, _, report = examine(lambda rank: None, "--timeout", "8")
    assert of_colour(report, "red") == {"ranks": f"rank 1 ({HOST}) died in check-in"}


def test_a_first_rank_that_dies(examine):
    """Another rank prints the report in place of rank 0."""
    fault = {"broadcast": lambda *_: os._exit(9)}
    codes, _, report = examine(lambda rank: comm_benchmark.COLLECTIVES.update(fault) if rank == 0 else None)
    assert of_colour(report, "red") == {"ranks": f"rank 0 ({HOST}) died in broadcast of 64 KiB"}
    assert codes == [9, 1]


def test_a_rank_that_fails(examine):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand a page more")

    _, _, report = examine(in_broadcast(fail))
    line = f"rank 1 ({HOST}) failed in broadcast of 64 KiB: CUDA error: an illegal memory access was encountered"
    assert of_colour(report, "red") == {"ranks": line}


def test_a_rank_that_is_busy_elsewhere(examine):
    _, _, report = examine(in_broadcast(lambda: time.sleep(60)), "--timeout", "4", meanwhile=release)
    line = rf"rank 1 \({HOST}\) did not join broadcast of 64 KiB within 4 s; running .*\(test_rank_registry.py:\d+\)"
    assert re.fullmatch(line, of_colour(report, "red")["ranks"]), report["findings"]


def test_a_rank_that_is_stopped(examine):
    stop = in_broadcast(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    _, _, report = examine(stop, "--timeout", "4", meanwhile=release)
    line = f"rank 1 ({HOST}) does not respond in broadcast of 64 KiB: dead, stopped or disconnected"
    assert of_colour(report, "red") == {"ranks": line}


def test_the_launcher_learns_why(examine, tmp_path, monkeypatch):
    monkeypatch.setenv("GEARBOX_OUTCOME_FILE", str(tmp_path / "outcome"))
    examine(in_broadcast(lambda: os._exit(9)))
    outcome = json.loads((tmp_path / "outcome").read_text())
    assert outcome["outcome"] == "failed" and f"rank 1 ({HOST}) died" in outcome["text"]


@pytest.mark.ranks
def test_machines_that_have_not_met_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "RUNS", tmp_path)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    gear = load_gear(DDP, {"num_processes": "2"})
    codes, output = fork_ranks(2, launcher_environment(DDP, 2), lambda: doctor.main(["--json"], gear))
    assert codes == [2, 2] and "each machine would train a separate model" in output
