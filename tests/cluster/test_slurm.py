"""`make slurm-test`: submit jobs to a real Slurm of two nodes as docs/slurm.md shows; most launchers are stubs."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from gearbox import ROOT
from support import slurm as slurms
from support.slurm import DDP, TRAIN, outcome

pytestmark = pytest.mark.slurm
SCRIPTS = sorted((ROOT / "cluster" / "slurm").iterdir())


def test_two_nodes_train_like_one_process(slurm, clone, chats, train):
    job = slurm.submit(
        "--wait", "--nodes=2", "--gpus-per-node=1", TRAIN, *DDP, *slurms.small(chats), cwd=clone, GEARBOX_ENV=sys.prefix
    )
    log = (clone / f"slurm-{job}.out").read_text()
    assert slurm.job(job)["JobState"] == "COMPLETED", log
    assert slurms.losses(clone / "runs/tiny-ddp") == pytest.approx(train("single").losses, rel=1e-5)
    assert "0: [rank 0] rank 0  node1  cpu\n0: [rank 0] rank 1  node2  cpu\n" in log
    for node in ("node1", "node2"):
        assert list((clone / f"runs/slurm/{job}/{node}").glob("*/attempt_0/0/stdout.log"))


def test_nodes_that_did_not_connect_are_refused(slurm, clone, chats):
    launch = f"{sys.prefix}/bin/accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 1".split()
    result = slurm.run("srun", "-N2", "--ntasks-per-node=1", *launch, "src/train.py", *slurms.small(chats), cwd=clone)
    assert result.returncode == 137, "the refusing rank ends its launcher"
    for node in ("node1", "node2"):
        error = f"gearbox: SLURM_STEP_NUM_NODES=2, but the 1 ranks of this job are all on {node}: each machine would"
        assert error in result.stderr


def test_each_exit_code_ends_the_job_with_its_state(slurm, job):
    jobs = {code: job(CODE=code) for code in ("0", "1", "2", "93")}
    outcomes = {code: outcome(slurm, number) for code, number in jobs.items()}
    assert outcomes.pop("0") == ("COMPLETED", "0", "0")
    assert outcomes == {code: ("FAILED", code, "0") for code in ("1", "2", "93")}


def test_signals_save_and_requeue_but_cancelling_does_not(slurm, clone, job):
    signals = {"steps": "", "batch": "--batch", "full": "--full", "term": "--signal=TERM --batch"}
    jobs = {}
    for name, flags in signals.items():
        jobs[name] = job()
        slurm.run("scancel", "--signal=USR1", *flags.split(), jobs[name])
    slurm.until(lambda: "restart 1" in slurms.log(clone, jobs["term"]), "the restart of the jobs")
    preempted = job()
    slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=clone)
    requeued = job()
    slurm.run("scontrol", "requeue", requeued)
    no_requeue = job("--no-requeue")
    slurm.run("scancel", "--signal=USR1", no_requeue)
    cancelled = job()
    slurm.run("scancel", cancelled)
    assert outcome(slurm, cancelled) == ("CANCELLED", "85", "0")
    assert outcome(slurm, no_requeue) == ("FAILED", "85", "0")
    for number in (*jobs.values(), preempted, requeued):
        assert outcome(slurm, number) == ("COMPLETED", "0", "1"), slurms.log(clone, number)
        log = slurms.log(clone, number)
        assert (log.count("restart 0 on 2 at node1:"), log.count("restart 1 on 2 at node1:")) == (2, 2)


def test_the_warning_comes_before_the_time_limit(slurm, clone, job):
    number = job("--time=60")
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=2")  # less time remains than the warning needs
    assert outcome(slurm, number) == ("COMPLETED", "0", "1"), slurms.log(clone, number)


def test_tasks_of_an_array_are_independent(slurm, clone, job):
    (clone / "sweep.txt").write_text("recipes/tiny.yaml run.name=a\nrecipes/tiny.yaml run.name=b optim.lr=1e-4\n")
    number = job("--array=1-2", "--nodes=1", arguments=["ddp", "@sweep.txt", "train.steps=7"])
    tasks = [f"{number}_1", f"{number}_2"]
    slurm.until(lambda: all("restart 0" in slurms.log(clone, task) for task in tasks), "both tasks")
    logs = [slurms.log(clone, task) for task in tasks]
    assert "--tee=3 recipes/tiny.yaml run.name=a train.steps=7\n" in logs[0]
    assert "--tee=3 recipes/tiny.yaml run.name=b optim.lr=1e-4 train.steps=7\n" in logs[1]
    ports = {re.search(r" at node\d:(\d+) ", log)[1] for log in logs}
    assert len(ports) == 2
    # The last task has the job id of the array, but the signal must reach only this task.
    slurm.run("scancel", "--signal=USR1", tasks[1])
    slurm.until(lambda: "restart 1" in slurms.log(clone, tasks[1]), "the restart of the second task")
    assert slurm.job(tasks[0])["JobState"] == "RUNNING" and "restart 1" not in slurms.log(clone, tasks[0])
    slurm.run("scancel", tasks[0])
    assert outcome(slurm, tasks[0])[0] == "CANCELLED"


def test_jobs_that_cannot_run_are_refused_in_one_line(slurm, clone, environment, tmp_path):
    def refused(*argv: str, cwd=clone, **variables: str) -> str:
        result = slurm.run(*argv, cwd=cwd, **variables)
        assert result.returncode == 2, result.stderr
        return result.stderr

    srun = "cluster/slurm/srun.sh"
    assert "not in a Slurm job" in refused(srun, *DDP)
    salloc = ["salloc", "--nodes=2", srun]
    assert ".venv/bin/python: not found; run make setup" in refused(*salloc, *DDP)
    assert "Slurm allocated no GPUs" in refused(*salloc, *DDP, GEARBOX_ENV=environment)
    assert "usage: " in refused(*salloc)
    (clone / "short.txt").write_text("recipes/tiny.yaml\n\n")
    for arguments, flags, message in [
        (["ddp", "@short.txt"], ["--array=2"], "short.txt: line 2 is missing or blank"),
        (["ddp", "@short.txt"], [], "@short.txt: @FILE needs a job array"),
        (DDP, [f"--chdir={tmp_path}"], f"{tmp_path}: not the repository; run sbatch from the repository"),
    ]:
        number = slurm.submit("--wait", *flags, "--output=log", TRAIN, *arguments, cwd=clone, fails=True)
        log = (tmp_path if "--chdir" in str(flags) else clone) / "log"
        assert message in log.read_text()
        assert outcome(slurm, number)[:2] == ("FAILED", "2")


def test_slurms_allocation_reaches_the_launcher(slurm, clone, environment):
    """Request two GPUs per node, and withhold the environment with --export=NONE as some sites do."""
    given = ["--nodes=2", "--gpus-per-node=2", f"--export=NONE,GEARBOX_ENV={environment},CODE=0"]
    number = slurm.submit("--wait", *given, TRAIN, *DDP, cwd=clone)
    port = 10000 + int(number)
    for i in (1, 2):
        place, command = f"restart 0 on 2 at node1:{port} of 2", f"ddp --doctor --log_dir=runs/slurm/{number}/node{i}"
        assert f"{i - 1}: {place}: src/launch.py {command} --tee=3 recipes/tiny.yaml\n" in slurms.log(clone, number)


def test_command_lines_of_apptainer_and_pyxis(clone, tmp_path):
    """Apptainer and Pyxis are not installed, so check only their command lines."""
    (tmp_path / "bin").mkdir()
    for name, script in {"srun": 'printf "%s\\n" "$@"', "scontrol": "printf 'n3\\nn4\\n'"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def line(image: str) -> list[str]:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[3-4]"}
        given = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "GEARBOX_MOUNTS": "/data:/data"}
        result = subprocess.run(
            ["cluster/slurm/srun.sh", *DDP], cwd=clone, env=job | given | {"GEARBOX_IMAGE": image},
            text=True, capture_output=True, check=True,
        )  # fmt: skip
        return result.stdout.splitlines()

    slurms_own = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --export=ALL --label".split()
    ours = ["cluster/slurm/node.sh", *DDP]
    mounts = f"{clone}:{clone},{tmp_path}/.cache/gearbox:/cache,/data:/data"
    assert line("") == [*slurms_own, *ours]
    for image in ("some.sif", str(tmp_path)):
        apptainer = ["apptainer", "exec", "--nv", f"--bind={mounts}", f"--pwd={clone}", image]
        assert line(image) == [*slurms_own, *apptainer, *ours]
    assert (tmp_path / ".cache/gearbox").is_dir(), "the folder to mount must exist"
    for image in ("registry.example.org#gearbox:latest", "some.sqsh"):
        mounted = [f"--container-mounts={mounts}", f"--container-workdir={clone}", "--no-container-entrypoint"]
        assert line(image) == [*slurms_own, f"--container-image={image}", *mounted, *ours]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    subprocess.run(["shellcheck", script], check=True)


DOCUMENT = (ROOT / "docs" / "slurm.md").read_text()
LINES = re.findall(r"^(?:\w+=\S+ )?((?:sbatch|salloc|srun) .*)$", DOCUMENT, re.M)


@pytest.mark.parametrize("line", LINES)
def test_slurm_accepts_the_documents_lines(slurm, clone, line):
    tool, *rest = shlex.split(line)
    here = next(i for i, word in enumerate(rest) if word.startswith("cluster/slurm/"))
    # The nodes are small. salloc has no --test-only, so it runs `true`.
    sizes = {"--gpus-per-node": slurms.NUM_GPUS, "--cpus-per-task": slurms.NUM_CPUS}
    names = [flag.partition("=")[0] for flag in rest[:here]]
    flags = [f"{name}={sizes[name]}" if name in sizes else flag for name, flag in zip(names, rest[:here], strict=True)]
    tools = {"sbatch": ["sbatch", "--test-only", *flags, *rest[here:]], "salloc": ["salloc", *flags, "true"]}
    result = slurm.run(*tools[tool], cwd=clone)
    assert result.returncode == 0, result.stderr
    assert (clone / rest[here]).is_file()


def test_the_document_has_lines():
    assert {line.split()[0] for line in LINES} == {"sbatch", "salloc"} and len(LINES) >= 5


def test_the_tasks_of_an_array_prepare_one_index(slurm, clone, chats):
    given = [f"data.path={chats}", "--records", "50"]
    arguments = ["cluster/slurm/prepare.sbatch", "recipes/tiny.yaml", "prepared", *given]
    job = slurm.submit("--wait", "--array=0-1", *arguments, cwd=clone, GEARBOX_ENV=sys.prefix)
    logs = [(clone / f"slurm-{job}_{task}.out").read_text() for task in range(2)]
    assert (clone / "prepared" / "index.json").is_file(), logs
    assert [f"part {task} of 2" in log for task, log in enumerate(logs)] == [True, True]
