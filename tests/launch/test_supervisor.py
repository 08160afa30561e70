"""Test src/launch.py in fresh processes: killed ranks restart, stopped runs resume, and each end has its exit code."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gearbox import ROOT
from support.cold import ENVIRONMENT, last_line, shell, small, survivors

pytestmark = pytest.mark.cold


@pytest.fixture
def launched(tmp_path, chats):
    """Yield a function that starts src/launch.py in the background and returns the process and the run folder.

    launched("ddp --num_processes=2 train.steps=40") -> process, folder
    """
    processes = []

    def start(line: str) -> tuple[subprocess.Popen, Path]:
        gear, *arguments = line.split()
        given = [
            *arguments[: line.count("--")],
            *small(tmp_path, chats).split(),
            *arguments[line.count("--") :],
            "run.name=x",
        ]
        log = (tmp_path / "log").open("a")
        command = [sys.executable, "src/launch.py", gear, *given]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log))
        return processes[-1], tmp_path / "runs" / "x"

    yield start
    for process in processes:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()


def until(condition, process) -> None:
    while not condition():
        assert process.poll() is None, "the process ended too early"
        time.sleep(0.05)


def ranks_of(process) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # the child has just ended
            if str(ROOT / "src/train.py") in child.cmdline()[:4]:
                found.append(child)
    return found


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if "rows_hash" in line]


def test_a_killed_rank_leads_to_a_restart(launched, tmp_path):
    process, folder = launched("ddp --num_processes=2 train.steps=60 save.every=5 schedule.name=constant")
    until(lambda: (folder / "checkpoints" / "step-10").exists(), process)
    ranks_of(process)[-1].kill()
    assert process.wait() == 0
    log = (tmp_path / "log").read_text()
    assert "restart 1 resumes from step " in log and f"resuming from {folder}/checkpoints/step-" in log
    assert steps(folder) == list(range(1, 61))
    assert '"seconds_without_a_step"' in (folder / "metrics.jsonl").read_text()


def test_a_stopped_run_exits_with_85_and_the_same_command_resumes_it(launched, tmp_path):
    line = "fsdp train.steps=2000 save.every=1000"
    process, folder = launched(line)
    until(lambda: len(steps(folder)) >= 3, process)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 85
    assert survivors(ranks, 10) == []
    status = json.loads((folder / "status.json").read_text())
    assert status["outcome"] == "saved" and status["saved_step"] == status["step"] >= 3
    again, _ = launched(line.replace("2000", str(status["step"] + 5)))
    assert again.wait() == 0
    assert steps(folder) == list(range(1, status["step"] + 6))


def test_a_refusal_by_several_ranks_keeps_its_exit_code(train):
    """The error occurs when ranks already wait for each other, and torch's launcher ends the remaining ranks."""
    folder = train("ddp", "run.name=y", "save.every=3", ranks=2).folder
    status = (folder / "status.json").read_text()
    again = f"{folder}/resolved.yaml run.name=y run.resume=latest optim.lr=1e-5"
    refused = shell(f"python src/launch.py ddp --num_processes=2 {again}")
    assert refused.returncode == 2, refused.stderr
    assert "optim.lr changed from 0.002 to 1e-05" in last_line(refused.stderr)
    assert (folder / "status.json").read_text() == status, "a refusal must not change the existing run"


def test_three_restarts_without_progress_end_with_93(launched, tmp_path, monkeypatch):
    """Non-finite steps end with 93 at once. A rank that keeps dying ends with 93 after three restarts."""
    process, folder = launched("single optim.lr=1e30 optim.max_grad_norm=0 train.steps=20 schedule.warmup=0")
    assert process.wait() == 93
    assert "gearbox: step " in (tmp_path / "log").read_text()
    assert json.loads((folder / "status.json").read_text())["outcome"] == "failed"
    process, folder = launched("single train.steps=5000 save.every=4000 run.resume=never")
    folder = folder.with_name("x-2")

    def has_begun() -> bool:
        status = json.loads((folder / "status.json").read_text()) if (folder / "status.json").exists() else {}
        return status.get("step", 0) > 0 and status["pid"] in [rank.pid for rank in ranks_of(process)]

    for _ in range(4):
        until(has_begun, process)
        killed = ranks_of(process)
        for rank in killed:
            rank.kill()
        psutil.wait_procs(killed)  # otherwise the same rank may be killed twice
    assert process.wait() == 93
    log = (tmp_path / "log").read_text()
    assert log.count("; restart ") == 3
    assert "3 restarts in a row saved no checkpoint after step 0" in log
