"""`make cluster`: train on two hosts in network namespaces, cut their connection, and kill machines and ranks."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gearbox import ROOT
from support import ledger, manifests
from support.hosts import Host, two_hosts, why_not

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.cold, pytest.mark.root]

BIN = Path(sys.prefix) / "bin"
JOIN_SECONDS = 30
SMALL = {
    "run.rehearse": "true", "batch.rows": "6", "batch.row_tokens": "128", "batch.micro_rows": "1",
    "schedule.name": "constant", "schedule.warmup": "1", "optim.master_weights": "fp32", "eval.every": "0",
    "eval.samples": "0", "save.every": "0", "train.steps": "5", "run.hang_timeout": "8",
}  # fmt: skip
# Run src/launch.py with ranks that write ledgers and a shorter wait for other machines.
LAUNCH = f"""
import functools, sys
from pathlib import Path
sys.path.insert(0, "src")
import launch
from gearbox.launch import cli, supervisor
supervisor.JOIN_SECONDS = {JOIN_SECONDS}
script = Path("tests/support/train_with_ledger.py").resolve()
supervisor.supervise = functools.partial(supervisor.supervise, script=script)
cli.run(launch.main)
"""


@pytest.fixture(scope="module", autouse=True)
def needed():
    if reason := why_not():
        pytest.skip(reason)


class Job:
    """A job: one command on both hosts, in a folder that both can see."""

    def __init__(self, folder: Path, chats: Path, hosts: tuple[Host, ...], **changes: str) -> None:
        self.hosts, self.folder, self.ledgers = hosts, folder, folder / "ledgers"
        shutil.rmtree(self.ledgers, ignore_errors=True)
        self.ledgers.mkdir()
        given = {"data.path": str(chats), "run.dir": str(folder / "runs"), "run.name": "job"} | SMALL
        given |= {key.replace("__", "."): value for key, value in changes.items()}
        self.num_steps = int(given["train.steps"])
        self.recipe = ["recipes/tiny.yaml", *(f"{key}={value}" for key, value in given.items())]
        self.processes: list[subprocess.Popen] = []
        self.run = folder / "runs" / "job"

    def start(self, command, environment=None, only: int | None = None) -> "Job":
        """Start command(rank) with environment(rank) on both machines, or on the machine `only`."""
        chosen = range(len(self.hosts)) if only is None else [only]
        for rank in chosen:
            variables = {
                "PATH": f"{BIN}:{os.environ['PATH']}", ledger.VARIABLE: str(self.ledgers), "OMP_NUM_THREADS": "1",
            } | (environment(rank) if environment else {})  # fmt: skip
            process = self.hosts[rank].start(*command(rank), output=self.log(rank), environment=variables)
            self.processes[rank:] = [process] if only is None else [process, *self.processes[rank + 1 :]]
        return self

    def launch(self, gear: str, ranks_each: int, only: int | None = None, wrap=lambda rank: []) -> "Job":
        """Start src/launch.py, which reads its machine rank from the environment. wrap(rank) precedes the command."""
        place = {"PET_NNODES": "2", "PET_MASTER_ADDR": self.hosts[0].address, "PET_MASTER_PORT": "29511"}
        return self.start(
            lambda rank: [*wrap(rank), sys.executable, "-c", LAUNCH, gear, *self.recipe],
            lambda rank: place | {"PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": str(ranks_each)},
            only,
        )

    def log(self, rank: int) -> Path:
        return self.folder / f"node{rank + 1}.log"

    def codes(self, seconds: float = 300) -> list[int]:
        try:
            return [process.wait(timeout=seconds) for process in self.processes]
        finally:
            for host in self.hosts:
                host.kill()

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not self.lines("rank-0") or self.lines("rank-0")[-1]["step"] < step:
            assert time.monotonic() < deadline, self.logs()
            assert all(process.poll() is None for process in self.processes), self.logs()
            time.sleep(0.05)

    def lines(self, rank: str) -> list[dict]:
        return [line for attempt in ledger.read(self.ledgers).attempts.get(rank, []) for line in attempt]

    @property
    def losses(self) -> list[float]:
        return [float.fromhex(line["loss"]) for line in ledger.kept(ledger.read(self.ledgers).attempts["rank-0"])]

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def check_ledgers(self, expected: ledger.Books, num_ranks: int, tolerance: float = 0.0) -> None:
        """Assert that rows occur once per epoch, losses match the run on one host, and attempts do not overlap."""
        books = ledger.read(self.ledgers)
        assert ledger.problems(books, expected, num_ranks, self.num_steps, ledger.num_rows(expected), tolerance) == []
        for attempts in books.attempts.values():
            ends = [(attempt[0]["time"], attempt[-1]["time"]) for attempt in attempts]
            assert all(before[1] < after[0] for before, after in itertools.pairwise(ends)), ends
        assert ledger.leftovers(self.run) == []


def by_accelerate(job: Job, gear: str, ranks_each: int) -> Job:
    """Start accelerate launch as docs/cluster.md shows, with each machine's own rank."""
    return job.start(
        lambda rank: [
            "accelerate", "launch", "--config_file", f"accelerate_configs/{gear}.yaml", "--num_machines", "2",
            "--machine_rank", str(rank), "--main_process_ip", job.hosts[0].address, "--main_process_port", "29512",
            "--num_processes", str(2 * ranks_each), "tests/support/train_with_ledger.py", *job.recipe,
        ]
    )  # fmt: skip


def by_torchrun(job: Job, gear: str, ranks_each: int, nodes: str = "2", only: int | None = None) -> Job:
    assert gear == "ddp"
    endpoint = f"{job.hosts[0].address}:29513"
    return job.start(
        lambda rank: [
            "torchrun", f"--nnodes={nodes}", f"--nproc_per_node={ranks_each}", "--max_restarts=3",
            "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "tests/support/train_with_ledger.py", *job.recipe,
        ],
        lambda rank: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if ":" in nodes else {},
        only=only,
    )  # fmt: skip


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory, chats):
    """Return a function that runs a gear on one machine and returns its ledger. It caches the ledger of each run."""

    @functools.cache
    def run(gear: str, ranks: int, **changes: str) -> ledger.Books:
        folder = tmp_path_factory.mktemp("reference")
        job = Job(folder, chats, (), **changes)
        outcome = subprocess.run(
            [sys.executable, "-c", LAUNCH, gear, f"--num_processes={ranks}", *job.recipe],
            env=os.environ | {ledger.VARIABLE: str(job.ledgers)}, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert outcome.returncode == 0, outcome.stderr[-3000:]
        return ledger.read(job.ledgers)

    return run


@pytest.mark.parametrize(
    ("way", "gear", "ranks_each"),
    [
        (by_torchrun, "ddp", 1),
        (by_accelerate, "ddp", 2),
        (by_accelerate, "fsdp", 1),
        (by_accelerate, "hsdp", 2),
        (by_accelerate, "zero3", 1),
        (Job.launch, "ddp", 1),
        (Job.launch, "fsdp", 2),
        (Job.launch, "hsdp", 2),
        (Job.launch, "zero3", 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_two_hosts_train_as_one(tmp_path, chats, hosts, on_one_host, way, gear, ranks_each):
    job = way(Job(tmp_path, chats, hosts), gear, ranks_each)
    assert job.codes() == [0, 0], job.logs()
    job.check_ledgers(on_one_host("single", 1), num_ranks=2 * ranks_each, tolerance=1e-5)
    assert len(job.losses) == job.num_steps
    log = job.log(0).read_text()
    last = 2 * ranks_each - 1
    here, there = ("rank 0", "rank 1") if ranks_each == 1 else ("rank 0-1", f"rank 2-{last}")
    assert f"{here}  node1  cpu\n{there}  node2  cpu\n" in log


def test_a_machine_with_another_disk_is_refused(tmp_path, chats, hosts):
    runs = tmp_path / "runs"
    runs.mkdir()
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {runs} && exec "$@"', "sh"]
    job = Job(tmp_path, chats, hosts).launch("ddp", 1, wrap=lambda rank: hidden if rank == 1 else [])
    assert job.codes() == [2, 2], job.logs()
    refusal = f"gearbox: run.dir: rank 1 cannot see {runs}/job; all machines need the same run.dir\n"
    assert refusal in job.log(0).read_text() and not any(runs.iterdir())


@manifests.needs_kubectl
def test_the_command_of_the_indexed_job(tmp_path, chats, on_one_host):
    """Run the manifest's command, doctor included, with the hostnames and environment of its pods."""
    rendered = manifests.render("jobs/without_gpus")
    pods = [manifests.indexed_pod(rendered, index) for index in (0, 1)]
    service = manifests.of_kind(rendered, "Service")["metadata"]["name"]
    with two_hosts(*(hostname for _, _, hostname in pods), domain=service) as hosts:
        job = Job(tmp_path, chats, hosts, run__name="without-gpus")
        job.start(lambda rank: [*pods[rank][0], *job.recipe[1:]], lambda rank: pods[rank][1])
        assert job.codes() == [0, 0], job.logs()
    log = job.log(0).read_text()
    assert "rank 0-1  without-gpus-0  cpu\nrank 2-3  without-gpus-1  cpu\n" in log
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "without-gpus" / "metrics.jsonl").open()]
    expected = ledger.kept(on_one_host("single", 1).attempts["rank-0"])
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert losses == pytest.approx([float.fromhex(line["loss"]) for line in expected], rel=1e-5)


LONG = {"train__steps": "200", "save__every": "20"}


def test_a_cable_is_pulled(tmp_path, chats, hosts, on_one_host):
    """Both sides exit in time with the code for "the same command resumes", and the same command then resumes."""
    job = Job(tmp_path, chats, hosts, **LONG).launch("ddp", 1)
    job.wait_for_step(50)
    hosts[1].link(is_up=False)
    started = time.monotonic()
    try:
        assert job.codes(seconds=8 + 5 + 8 + JOIN_SECONDS + 60) == [85, 85], job.logs()
    finally:
        hosts[1].link(is_up=True)
    print(f"both sides exited after {time.monotonic() - started:.0f} s")
    assert "did not meet" in job.log(0).read_text() and "did not meet" in job.log(1).read_text()
    assert ledger.whole_checkpoint(job.run / "checkpoints")
    assert job.launch("ddp", 1).codes() == [0, 0], job.logs()
    job.check_ledgers(on_one_host("ddp", 2, **LONG), num_ranks=2)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_dies_and_comes_back(tmp_path, chats, hosts, on_one_host, lost):
    """The other machine waits for it, and both resume from the newest checkpoint."""
    job = Job(tmp_path, chats, hosts, **LONG).launch("ddp", 1)
    job.wait_for_step(50)
    hosts[lost].kill()
    assert job.processes[lost].wait(timeout=30) != 0
    job.launch("ddp", 1, only=lost)
    assert job.codes() == [0, 0], job.logs()
    job.check_ledgers(on_one_host("ddp", 2, **LONG), num_ranks=2)


def test_a_rank_dies(tmp_path, chats, hosts, on_one_host):
    """Both launchers restart and reconnect."""
    job = Job(tmp_path, chats, hosts, **LONG).launch("ddp", 1)
    job.wait_for_step(50)
    os.kill(job.lines("rank-1")[-1]["attempt"], 9)  # its process id
    assert job.codes() == [0, 0], job.logs()
    assert "restart 1 resumes from step" in job.log(0).read_text()
    job.check_ledgers(on_one_host("ddp", 2, **LONG), num_ranks=2)


def test_elastic(tmp_path, chats, hosts, on_one_host):
    """torchrun's elasticity runs on two machines, then one, then two again, and loses no row."""
    job = by_torchrun(Job(tmp_path, chats, hosts, **LONG), "ddp", 1, nodes="1:2")
    job.wait_for_step(50)
    hosts[1].kill()
    job.processes.pop().wait(timeout=30)
    before = len(job.lines("rank-0"))
    while len(job.lines("rank-0")) == before:  # until it resumes on one machine
        assert job.processes[0].poll() is None, job.logs()
        time.sleep(0.2)
    by_torchrun(job, "ddp", 1, nodes="1:2", only=1)
    assert job.codes() == [0, 0], job.logs()
    steps = [line["step"] for line in ledger.kept(ledger.read(job.ledgers).attempts["rank-0"])]
    assert steps == list(range(1, job.num_steps + 1))
    # Losses agree within 1e-5 only in the first steps. After 150 steps on other numbers of ranks, rounding errors have
    # grown above that (1.1e-5 measured).
    job.check_ledgers(on_one_host("ddp", 2, **LONG), num_ranks=2, tolerance=1e-4)
