"""Start a real Slurm on this machine: a controller, a slurmd on each of two hosts, and all state in one folder."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gearbox import ROOT
from gearbox.processes import die_with_parent
from support import hosts

TOOLS = {
    "munge": ["munged"],
    "slurm-wlm": ["slurmctld", "slurmd", "sbatch", "salloc", "srun", "scancel", "scontrol", "squeue"],
}
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"}
NUM_GPUS = 2  # that each node claims to have
NUM_CPUS = 4


def why_not() -> str | None:
    """Return why Slurm cannot run here, or None if it can."""
    missing = [package for package, tools in TOOLS.items() if any(shutil.which(tool) is None for tool in tools)]
    return f"Slurm needs apt-get install {' '.join(missing)}" if missing else hosts.why_not()


@dataclass(frozen=True)
class Slurm:
    """A running Slurm: its folder and its two nodes."""

    folder: Path
    nodes: tuple[hosts.Host, hosts.Host]

    @property
    def environment(self) -> dict[str, str]:
        """The environment for Slurm commands, without the variables of a job that this test may run in."""
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "PET_"))}
        return mine | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *argv: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command on this machine."""
        return subprocess.run(
            argv, cwd=cwd, env=self.environment | variables, text=True, capture_output=True, check=False, timeout=500
        )

    def submit(self, *argv: str, cwd: Path, fails: bool = False, **variables: str) -> str:
        """Submit with sbatch, and return the job's id. `fails`: sbatch must fail, as with --wait if the job does."""
        given = self.run("sbatch", "--parsable", *argv, cwd=cwd, **variables)
        assert (given.returncode == 0) != fails, given.stderr
        return given.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what scontrol shows for a job: JobState, ExitCode, Restarts, ..."""
        shown = self.run("scontrol", "show", "job", "--oneliner", job).stdout
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def until(self, condition, what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.run('squeue').stdout}"
            time.sleep(0.2)

    def end(self, job: str) -> dict[str, str]:
        """Wait until a job has ended for good, and return it."""
        self.until(lambda: self.job(job).get("JobState") in ENDED, f"the end of job {job}")
        return self.job(job)


def clone(folder: Path) -> Path:
    """Copy the parts of the repository that a job needs to a user's folder, and return it."""
    for part in ("accelerate_configs", "cluster", "ds_configs", "recipes", "src"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


def small(chats: Path, **changes: str) -> list[str]:
    """Return overrides for a small run. Keyword arguments change them, with two underscores for a dot."""
    given = {
        "run.rehearse": "true", "data.path": str(chats), "batch.rows": "6", "batch.row_tokens": "128",
        "batch.micro_rows": "1", "train.steps": "3", "schedule.warmup": "1", "eval.every": "0",
        "eval.samples": "0", "save.every": "0",
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    return [f"{key}={value}" for key, value in given.items()]


def log(clone: Path, job: str) -> str:
    path = clone / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def losses(run: Path) -> list[float]:
    """Return the loss of every step in metrics.jsonl, in its order."""
    return [line["loss"] for line in metrics(run)]


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if '"rows_hash"' in line]


@contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """Yield a Slurm with node1 and node2, two pretended GPUs on each, and partitions `low` and `high`.

    `high` preempts `low`, whose jobs then have 40 s from SIGTERM to their end. Killed jobs have 20 s.
    """
    daemons: list[subprocess.Popen] = []
    with hosts.two_hosts() as nodes:
        slurm = Slurm(folder, nodes)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # Slurm reads it even if unused
        for number in range(NUM_GPUS):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={folder}/gpu[0-{NUM_GPUS - 1}]\n")
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        bridge = nodes[0].address.rpartition(".")[0] + ".1"
        addresses = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs={NUM_CPUS} RealMemory=4000 Gres=gpu:{NUM_GPUS}"
            for node in nodes
        )
        (folder / "slurm.conf").write_text(f"""\
ClusterName=gearbox
SlurmctldHost={socket.gethostname()}({bridge})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
GresTypes=gpu
{addresses}
PartitionName=low Nodes=node[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=40 OverSubscribe=NO
PartitionName=high Nodes=node[1-2] MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
""")
        for name in ("state", "node1", "node2"):
            (folder / name).mkdir()

        def start(*argv: str) -> None:
            with (folder / f"{Path(argv[-1]).name}.log").open("a") as log:
                daemons.append(subprocess.Popen(
                    argv, env=slurm.environment, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=lambda: die_with_parent(signal.SIGKILL),  # even if this test is killed
                ))  # fmt: skip

        try:
            munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "seed", "log")]
            start("munged", "--foreground", "--force", *munge, f"--socket={folder}/munge.socket")
            slurm.until((folder / "munge.socket").exists, "munged", seconds=20)
            start("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
            for node in nodes:
                start(*node.command("slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node.name))
            slurm.until(
                lambda: slurm.run("sinfo", "--noheader", "--Format=StateLong", "--states=idle").stdout.strip() == "idle"
                and slurm.run("sinfo", "--noheader", "--format=%D", "--states=idle", "-p", "low").stdout.strip() == "2",
                f"two idle nodes; see {folder}/*.log", seconds=60,
            )  # fmt: skip
            yield slurm
        finally:
            for node in nodes:
                node.kill()
            for daemon in daemons:
                daemon.kill()
                daemon.wait()


TRAIN, DDP = "cluster/slurm/train.sbatch", ["ddp", "recipes/tiny.yaml"]


def outcome(slurm, job) -> tuple[str, str, str]:
    ended = slurm.end(job)
    return ended["JobState"], ended["ExitCode"].partition(":")[0], ended["Restarts"]
