"""`make clouds-test`: run SkyPilot's task on two hosts, on a bucket that SkyPilot's own commands mount, and lose nodes.

The bucket is rclone's S3 server. Each host has its own mount, as each node of a cluster would.
"""

import json
import shlex
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from gearbox import ROOT
from gearbox.launch import outcome
from support import clouds
from support.hosts import why_not

pytest.importorskip("sky", reason="skypilot is not installed: make clouds-test")
pytestmark = [pytest.mark.long, pytest.mark.clouds, pytest.mark.cold, pytest.mark.root]

TASK = clouds.load(clouds.SKYPILOT)
(MOUNT_PATH,) = TASK["file_mounts"]
PYTHON = ROOT / ".venv" / "bin" / "python"
SMALL = {
    "batch.rows": "6", "batch.row_tokens": "128", "batch.micro_rows": "1", "schedule.name": "constant",
    "schedule.warmup": "1", "optim.master_weights": "fp32", "eval.every": "0", "eval.samples": "0",
    "run.hang_timeout": "60",
}  # fmt: skip
STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def needed():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def given(tmp_path_factory, chats):
    """Return overrides that train a small model from a local folder, and the losses of an undisturbed run."""
    folder = tmp_path_factory.mktemp("base")

    def local(name: str, **overrides: str) -> Path:
        words = [f"{key}={value}" for key, value in ({"data.path": chats, "run.dir": folder} | overrides).items()]
        command = [PYTHON, "src/train.py", "recipes/tiny.yaml", f"run.name={name}", *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return folder / name

    made = local("made", **{**SMALL, "run.rehearse": "true", "train.steps": "1", "save.every": "0"})
    common = SMALL | {"model.name": str(made / "model"), "model.init": "pretrained", "train.steps": str(STEPS)}
    expected = losses(local("expected", **{**common, "save.every": "0"}) / "metrics.jsonl")
    return common | {"data.path": str(chats), "save.every": "4"}, expected


def losses(path: Path) -> dict[int, float]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


class Cluster:
    """The nodes of a job: hosts that run the task's `run`, each with its own mount of the bucket at MOUNT_PATH."""

    def __init__(self, folder: Path, hosts, mode: str, bucket: clouds.Bucket) -> None:
        self.folder, self.hosts, self.mode, self.bucket = folder, hosts, mode, bucket
        self.place = folder / "checkpoints"  # stands for MOUNT_PATH
        self.place.mkdir(exist_ok=True)
        self.mounts: list[Path] = []
        self.processes: list[subprocess.Popen] = []
        self.run = bucket.content / TASK["envs"]["NAME"]

    def launch(self, stack: ExitStack, overrides: dict[str, str], attempt: str) -> "Cluster":
        script = f"cd {ROOT}\n" + TASK["run"].replace(MOUNT_PATH, str(self.place))
        addresses = [host.address for host in self.hosts]
        self.mounts = [
            stack.enter_context(self.bucket.mounted(self.folder / f"{attempt}-{host.name}", self.mode))
            for host in self.hosts
        ]
        self.processes = []
        for rank, (host, mount) in enumerate(zip(self.hosts, self.mounts, strict=True)):
            words = " ".join(f"{key}={value}" for key, value in overrides.items())
            environment = clouds.sky_environment(
                rank, addresses, 0, RECIPE="recipes/tiny.yaml", RANKS="1", OVERRIDES=words
            )
            line = f'mount --bind {shlex.quote(str(mount))} {shlex.quote(str(self.place))} && exec bash -c "$RUN"'
            environment |= {"RUN": script, "OMP_NUM_THREADS": "1"}
            output = self.folder / f"{attempt}-{rank}.log"
            self.processes.append(host.start("bash", "-c", line, output=output, environment=environment))
        return self

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*-[01].log")))

    def codes(self) -> list[int]:
        return [process.wait(timeout=400) for process in self.processes]

    def wait_for(self, path: str) -> None:
        deadline = time.monotonic() + 200
        while not (self.run / path).is_file():
            assert time.monotonic() < deadline and None in [p.poll() for p in self.processes], self.log()[-5000:]
            time.sleep(0.1)

    def lose(self) -> None:
        """Lose all nodes at once, with what their mounts have not uploaded."""
        for host, mount in zip(self.hosts, self.mounts, strict=True):
            host.kill()
            self.bucket.lose(mount)
        for process in self.processes:
            process.wait(timeout=30)

    def check_done(self, expected: dict[int, float]) -> None:
        """Wait for the end of the upload, as SkyPilot does for MOUNT_CACHED, and compare each loss that is recorded.

        Storage that cannot append loses the lines since the last checkpoint in a kill, as docs/reliability.md says.
        """
        deadline = time.monotonic() + 60
        while outcome.read_outcome(self.run / "status.json").get("outcome") != "done" or STEPS not in self.losses():
            assert time.monotonic() < deadline, self.log()[-5000:]
            time.sleep(0.5)
        found = self.losses()
        assert len(found) >= STEPS - 8 and set(found) >= set(range(9, STEPS + 1))
        assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
        assert (self.run / "model" / "model.safetensors").is_file() and not (self.run / ".visible").exists()

    def losses(self) -> dict[int, float]:
        path = self.run / "metrics.jsonl"
        return losses(path) if path.is_file() else {}


@pytest.fixture
def bucket(tmp_path):
    made = clouds.Bucket(tmp_path / "bucket")
    with made.served():
        yield made


@pytest.mark.parametrize(("mode", "nodes"), [("MOUNT", 1), ("MOUNT_CACHED", 1), ("MOUNT_CACHED", 2)])
def test_a_job_that_loses_its_nodes_resumes(tmp_path, hosts, bucket, given, mode, nodes):
    overrides, expected = given
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, hosts[:nodes], mode, bucket).launch(stack, overrides, "first")
        cluster.wait_for("checkpoints/step-8/manifest.json")
        cluster.lose()
        cluster.launch(stack, overrides, "second")  # on new nodes, which have nothing but the bucket
        assert cluster.codes() == [0] * nodes, cluster.log()
        cluster.check_done(expected)
    assert "step 1/" in cluster.log().split("starting fsdp")[1], "the first start begins at step 1"
    assert "step 1/" not in cluster.log().rsplit("starting fsdp", 1)[1], "the second one resumes"


def test_a_node_that_is_told_to_stop_ends_the_job_with_a_code_that_recovers(tmp_path, hosts, bucket, given):
    overrides, expected = given
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, hosts, "MOUNT_CACHED", bucket).launch(stack, overrides, "first")
        cluster.wait_for("checkpoints/step-4/manifest.json")
        launchers = [psutil.Process(pid) for pid in hosts[1].pids()]
        (launcher,) = [found for found in launchers if found.cmdline()[1:2] == ["src/launch.py"]]
        launcher.send_signal(signal.SIGTERM)
        codes = cluster.codes()
        assert set(codes) <= set(TASK["resources"]["job_recovery"]["recover_on_exit_codes"]), (codes, cluster.log())
        cluster.launch(stack, overrides, "second")
        assert cluster.codes() == [0, 0], cluster.log()
        cluster.check_done(expected)
