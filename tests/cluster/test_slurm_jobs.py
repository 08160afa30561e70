"""`make slurm-test`: train on two nodes of a real Slurm under several gears, and interrupt the jobs in every way."""

import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from support import slurm as slurms
from support.slurm import DDP, TRAIN, outcome

pytestmark = [pytest.mark.long, pytest.mark.slurm]
STEPS = 80
LONG = {"train__steps": str(STEPS), "schedule__name": "constant", "save__every": "20"}


@pytest.fixture
def submit(slurm, clone, chats):
    """Submit a job that trains and return its id: submit("ddp", "--nodes=2", ranks=1, run__name="x")."""

    def call(gear: str, *flags: str, ranks: int = 1, recipe: str = "recipes/tiny.yaml", **changes: str) -> str:
        arguments = [gear, *recipe.split(), *slurms.small(chats, **changes)]
        return slurm.submit(
            *flags, f"--gpus-per-node={ranks}", TRAIN, *arguments, cwd=clone, GEARBOX_ENV=sys.prefix
        )  # fmt: skip

    return call


@pytest.fixture(scope="module")
def undisturbed(slurm, clone, chats) -> Path:
    """Return the folder of an uninterrupted run on two nodes."""
    given = slurms.small(chats, **LONG, run__name="undisturbed")
    flags = ["--wait", "--nodes=2", "--gpus-per-node=1"]
    number = slurm.submit(*flags, TRAIN, *DDP, *given, cwd=clone, GEARBOX_ENV=sys.prefix)
    assert slurm.job(number)["JobState"] == "COMPLETED", slurms.log(clone, number)
    return clone / "runs" / "undisturbed"


def weights(run: Path):
    (file,) = (run / "model").glob("*.safetensors")
    return load_file(file)


def assert_equal(run: Path, undisturbed: Path) -> None:
    """Assert that every step ran once, and that losses and weights are equal bit for bit."""
    assert [line["step"] for line in slurms.metrics(run)] == list(range(1, STEPS + 1))
    assert slurms.losses(run) == slurms.losses(undisturbed)
    ours, theirs = weights(run), weights(undisturbed)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("gear", "ranks"), [("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("hsdp", 2), ("zero3", 1), ("zero3", 2)]
)
def test_every_kind_of_gear_trains_like_one_process(slurm, clone, submit, train, gear, ranks):
    number = submit(gear, "--wait", "--nodes=2", ranks=ranks, run__name=f"{gear}-{ranks}")
    assert slurm.job(number)["JobState"] == "COMPLETED", slurms.log(clone, number)
    assert slurms.losses(clone / "runs" / f"{gear}-{ranks}") == pytest.approx(train("single").losses, rel=1e-5)


def test_hsdp_has_too_few_ranks(slurm, clone, submit):
    number = submit("hsdp", "--nodes=2")
    assert outcome(slurm, number) == ("FAILED", "2", "0")
    assert "gearbox: " in slurms.log(clone, number)


def signals(slurm, job):
    slurm.run("scancel", "--signal=USR1", job)


def signals_the_batch_script(slurm, job):
    slurm.run("scancel", "--signal=USR1", "--batch", job)


def signals_all(slurm, job):
    slurm.run("scancel", "--signal=USR1", "--full", job)


def preempts(slurm, job):
    """Submit a job to the higher partition; a job in the lower one has a grace time."""
    slurm.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")


def requeues(slurm, job):
    slurm.run("scontrol", "requeue", job)


def ranks_of(node) -> list[psutil.Process]:
    found = [psutil.Process(pid) for pid in node.pids()]
    return [process for process in found if process.cmdline()[2:3] and process.cmdline()[2].endswith("src/train.py")]


def takes_its_time(slurm, job):
    """Set the time limit so that the warning is due. Slurm checks only periodically, so suspend a rank meanwhile."""
    (rank,) = ranks_of(slurm.nodes[0])
    rank.suspend()
    hours, minutes, _ = slurm.job(job)["RunTime"].split(":")
    limit = int(hours) * 60 + int(minutes) + 2
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    status = Path(f"/proc/{rank.pid}/status")
    pending = re.compile(r"^ShdPnd:\s*(\w+)", re.M)
    slurm.until(lambda: int(pending.search(status.read_text())[1], 16) >> signal.SIGUSR1 - 1 & 1, "the warning")
    rank.resume()
    slurm.until(lambda: slurm.job(job)["JobState"] != "RUNNING", "the save")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")


@pytest.mark.parametrize(
    "interrupts", [signals, signals_the_batch_script, signals_all, preempts, requeues, takes_its_time]
)
def test_an_interrupted_job_equals_an_uninterrupted_one(slurm, clone, submit, undisturbed, interrupts):
    name = interrupts.__name__
    run = clone / "runs" / name
    number = submit("ddp", "--nodes=2", "--time=60", **LONG, run__name=name)
    slurm.until(lambda: len(slurms.metrics(run)) >= 5, "five steps")
    interrupts(slurm, number)
    assert outcome(slurm, number) == ("COMPLETED", "0", "1"), slurms.log(clone, number)
    assert "saving after this step" in slurms.log(clone, number)
    assert_equal(run, undisturbed)


@pytest.mark.parametrize("signals", [signals_the_batch_script, "--signal=TERM --batch", preempts])
def test_a_save_may_outlast_kill_wait(slurm, clone, job, signals):
    """Use the stub launcher. If srun itself received SIGTERM, it would kill its launchers after KillWait."""
    number = job(SAVE="28")
    if callable(signals):
        signals(slurm, number)
    else:
        slurm.run("scancel", *signals.split(), number)
    assert outcome(slurm, number) == ("COMPLETED", "0", "1"), slurms.log(clone, number)
    assert "Killed" not in slurms.log(clone, number)


def test_a_cancelled_job_saves_and_the_same_command_resumes(slurm, clone, submit, undisturbed):
    run = clone / "runs" / "cancelled"
    number = submit("ddp", "--nodes=2", **LONG, run__name="cancelled")
    slurm.until(lambda: len(slurms.metrics(run)) >= 5, "five steps")
    slurm.run("scancel", number)
    assert outcome(slurm, number)[::2] == ("CANCELLED", "0")
    assert "saving after this step" in slurms.log(clone, number)
    assert not list(run.glob("model"))
    submit("ddp", "--wait", "--nodes=2", **LONG, run__name="cancelled")
    assert_equal(run, undisturbed)


@pytest.mark.parametrize("node", [0, 1])
def test_killed_ranks_of_a_node_restart_on_both(slurm, clone, submit, undisturbed, node):
    name = f"killed-{node}"
    run = clone / "runs" / name
    number = submit("ddp", "--nodes=2", **LONG, run__name=name)
    slurm.until(lambda: (run / "checkpoints" / "step-20").exists(), "a checkpoint")
    for rank in ranks_of(slurm.nodes[node]):
        rank.kill()
    assert outcome(slurm, number) == ("COMPLETED", "0", "0"), slurms.log(clone, number)
    assert slurms.log(clone, number).count("; restart 1 resumes from step ") == 2
    assert_equal(run, undisturbed)


def test_two_tasks_of_an_array_train_on_one_node(slurm, clone, submit, train):
    (clone / "list.txt").write_text("recipes/tiny.yaml run.name=task-1\nrecipes/tiny.yaml run.name=task-2\n")
    number = submit("ddp", "--wait", "--array=1-2", "--nodes=1", "--nodelist=node1", recipe="@list.txt")
    assert {outcome(slurm, f"{number}_{task}") for task in (1, 2)} == {("COMPLETED", "0", "0")}
    for task in (1, 2):
        assert slurms.losses(clone / f"runs/task-{task}") == pytest.approx(train("single").losses, rel=1e-5)


def test_a_run_resumes_on_another_number_of_nodes(slurm, clone, submit, undisturbed):
    run = clone / "runs" / "elastic"
    for nodes in (2, 1):
        begun = len(slurms.metrics(run))
        number = submit("ddp", f"--nodes={nodes}", "--no-requeue", **LONG, run__name="elastic")
        slurm.until(lambda begun=begun: len(slurms.metrics(run)) >= begun + 5, "five steps")
        slurm.run("scancel", "--signal=USR1", number)
        assert outcome(slurm, number) == ("FAILED", "85", "0"), slurms.log(clone, number)
    submit("ddp", "--wait", "--nodes=2", **LONG, run__name="elastic")
    assert [line["step"] for line in slurms.metrics(run)] == list(range(1, STEPS + 1))
    assert slurms.losses(run) == pytest.approx(slurms.losses(undisturbed), rel=1e-5)
