"""Cold starts, as the README writes them: each gear, plain python, torchrun, launch.py, and what mistakes bring."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

import ask
from gearbox import ROOT
from matrix import disk_operations_are_built

GEARS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
BIN = os.path.dirname(sys.executable)  # noqa: PTH120  a symlinked interpreter must stay in its environment


@pytest.fixture
def shell(tmp_path):
    """Run a command line in the repository with this environment's programs first on the PATH."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "DS_", "CUDA_"))}

    def run(line: str, **variables: str) -> subprocess.CompletedProcess:
        variables["PATH"] = f"{BIN}:{os.environ['PATH']}"
        return subprocess.run(
            line, shell=True, cwd=ROOT, env=environment | variables, text=True, capture_output=True, check=False
        )

    return run


@pytest.fixture
def small(tmp_path, chats):
    return (
        f"run.dir={tmp_path}/runs data.path={chats} batch.rows=4 batch.row_tokens=128 train.steps=2 "
        "schedule.warmup_steps=1 eval.every=0 eval.sample_tokens=4"
    )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("gear", GEARS)
def test_every_gear(shell, small, tmp_path, gear):
    if gear == "zero3_nvme" and not disk_operations_are_built():
        pytest.skip("DeepSpeed would build its disk operations for minutes; make matrix does")
    if gear == "ring":
        outcome = shell(f"accelerate launch --config_file accelerate_configs/{gear}.yaml src/train.py {small}")
        assert outcome.returncode == 1 and "ring attention runs on GPUs only" in last_line(outcome.stderr)
        return
    outcome = shell(f"accelerate launch --config_file accelerate_configs/{gear}.yaml src/train.py {small}")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    folder = tmp_path / "runs" / f"tiny-{gear}"
    assert f"the model lies in {folder}/model" in last_line(outcome.stdout)
    assert sorted(path.name for path in folder.iterdir()) == [
        "base", "checkpoints", "lock", "metrics.jsonl", "model", "report.html", "resolved.yaml", "status.json",
        "tensorboard",
    ]  # fmt: skip
    ranks = yaml.safe_load((ROOT / f"accelerate_configs/{gear}.yaml").read_text())["num_processes"]
    assert f"ranks{ranks:>20}" in outcome.stdout
    for line in ("held-out loss", "before", "after", "loaded back in a fresh process", "no GPU: rehearsal"):
        assert outcome.stdout.count(line) == (2 if line in ("before", "after", "held-out loss") else 1), line
    assert "Warning" not in outcome.stderr, outcome.stderr


def test_a_saved_model_answers(train, capsys):
    folder = train("fsdp", "adapter.method=lora").folder
    ask.main([f"{folder}/model", "sort dbca", "max_new_tokens=3"])
    said = capsys.readouterr()
    assert said.err == ""
    assert len(said.out.strip()) <= 3 * 4, "three byte tokens, shown as at most three characters"


@pytest.mark.parametrize("gear", ["single", "fsdp", "zero3"])
def test_a_mistake_is_the_last_line_on_the_screen_once(shell, tmp_path, gear):
    line = (
        f"accelerate launch --config_file accelerate_configs/{gear}.yaml src/train.py optim.lrr=1 run.dir={tmp_path}/r"
    )
    outcome = shell(line + " 2>&1")
    assert outcome.returncode == 1
    said = "gearbox: recipes/tiny.yaml: optim.lrr: there is no such key; did you mean 'lr'?"
    assert last_line(outcome.stdout) == said
    assert outcome.stdout.count(said) == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py optim.lrr=1", "recipes/tiny.yaml: optim.lrr: there is no such key; did you mean 'lr'?"),
        ("train.py recipes/tinny.yaml", "recipes/tinny.yaml: there is no such file; did you mean 'tiny.yaml'?"),
        ("train.py model.name=nobody/no-such-model model.init=pretrained", "nor can the hub be reached"),
        ("train.py run.resume=latest run.name=none", "holds no run 'none'"),
        ("train.py 'model.add_tokens=[<|end|>]'", "'<|end|>' is a token of recipes/tiny already; take it out"),
        ("launch.py zero2 optim.name=adamw_8bit", "use adamw or paged_adamw, or the fsdp gear"),
        ("launch.py fsdpp", "fsdpp: there is no such gear; did you mean 'fsdp'?"),
        ("launch.py", "usage: python src/launch.py GEAR [--doctor] [RECIPE]"),
        ("launch.py ddp --num_processes 3", "write the launcher's flags as --num_processes=VALUE"),
        ("launch.py zero2 optim.max_grad_norm=x", "optim.max_grad_norm: input should be a valid number"),
        ("ask.py /nowhere hello", "/nowhere: holds no model"),
    ],
)
def test_python_src_says_it_in_one_line_with_code_2(shell, tmp_path, line, said):
    outcome = shell(f"python src/{line}" + ("" if "=" not in line else f" run.dir={tmp_path}/r"))
    assert outcome.returncode == 2
    assert len(outcome.stderr.strip().splitlines()) == 1, outcome.stderr
    assert outcome.stderr.startswith("gearbox: ")
    assert said in outcome.stderr
    assert not list(tmp_path.glob("r/*"))


def test_launch_says_what_only_the_ranks_can_know(shell, small, tmp_path):
    """Found after the start of torch, by all ranks: still one line, still code 2."""
    outcome = shell(f"python src/launch.py ddp --num_processes=2 {small} 'model.add_tokens=[<|end|>]'")
    assert outcome.returncode == 2
    assert last_line(outcome.stderr) == (
        "gearbox: model.add_tokens: '<|end|>' is a token of recipes/tiny already; take it out"
    )
    assert not (tmp_path / "runs").exists(), "no half-written folder"


@pytest.fixture
def launched(small, tmp_path):
    """src/launch.py in the background: launched("ddp --num_processes=2 train.steps=40") -> process, run's folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "DS_", "CUDA_"))}
    processes = []

    def start(line: str) -> tuple[subprocess.Popen, Path]:
        gear, *arguments = line.split()
        given = [*arguments[: line.count("--")], *small.split(), *arguments[line.count("--") :], "run.name=x"]
        log = (tmp_path / "log").open("a")
        command = [sys.executable, "src/launch.py", gear, *given]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        return processes[-1], tmp_path / "runs" / "x"

    yield start
    for process in processes:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()


def until(condition, process) -> None:
    while not condition():
        assert process.poll() is None, "it ended too early"
        time.sleep(0.05)


def ranks_of(process) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
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
    assert "restart 1 goes on from step " in log and f"goes on from {folder}/checkpoints/step-" in log
    assert steps(folder) == list(range(1, 61))
    assert '"seconds_without_a_step"' in (folder / "metrics.jsonl").read_text()


def test_stopped_with_85_and_gone_on_with_by_the_same_command(launched, tmp_path):
    line = "fsdp train.steps=2000 save.every=1000"
    process, folder = launched(line)
    until(lambda: len(steps(folder)) >= 3, process)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 85
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    status = json.loads((folder / "status.json").read_text())
    assert status["outcome"] == "saved" and status["saved_step"] == status["step"] >= 3
    again, _ = launched(line.replace("2000", str(status["step"] + 5)))
    assert again.wait() == 0
    assert steps(folder) == list(range(1, status["step"] + 6))


def test_a_refusal_of_several_ranks_is_told_with_its_code(shell, train):
    """Found when the ranks already wait for each other, and torch's launcher ends those that are left."""
    folder = train("ddp", "run.name=y", "save.every=3", ranks=2).folder
    status = (folder / "status.json").read_text()
    again = f"{folder}/resolved.yaml run.name=y run.resume=latest optim.lr=1e-5"
    refused = shell(f"python src/launch.py ddp --num_processes=2 {again}")
    assert refused.returncode == 2, refused.stderr
    assert "optim.lr was 0.002 and is 1e-05" in last_line(refused.stderr)
    assert (folder / "status.json").read_text() == status, "a refusal says nothing of the run that was there"


def test_three_restarts_without_progress_end_with_93(launched, tmp_path, monkeypatch):
    """Bad numbers end with 93 at once; a rank that dies again and again after three restarts."""
    process, folder = launched("single optim.lr=1e30 optim.max_grad_norm=0 train.steps=20 schedule.warmup_steps=0")
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
        psutil.wait_procs(killed)  # else the same rank may be killed twice
    assert process.wait() == 93
    log = (tmp_path / "log").read_text()
    assert log.count("; restart ") == 3
    assert "3 restarts in a row came to no checkpoint after step 0" in log


def test_out_of_memory_says_what_to_change(shell):
    """No GPU here to fill: the command raises torch's own error."""
    outcome = shell(
        "cd src && python -c 'import torch; from gearbox.launch import cli\n"
        'def main(_): raise torch.OutOfMemoryError("CUDA out of memory")\n'
        "cli.run(main)'"
    )
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("gearbox: out of GPU memory: lower batch.micro_rows")
    assert len(outcome.stderr.splitlines()) == 1
