"""`make image-test`: build the image from its Dockerfile with buildah, on a Debian made by debootstrap, and run it.

No container engine is needed: a container is a mount, process and network namespace over the image's files.
"""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gearbox import ROOT
from support.repository import copy_of_the_tree, plant

DEBIAN = Path("/var/tmp/gearbox-debian-bookworm.tar")  # built once per machine, in 2 minutes
TOOLS = ["buildah", "debootstrap", "unshare", "ip"]
pytestmark = [pytest.mark.long, pytest.mark.image, pytest.mark.cold, pytest.mark.root, pytest.mark.timeout(1800)]
SMALL = "schedule.warmup=1 batch.rows=4 batch.row_tokens=64 eval.every=0 eval.samples=0".split()
# Do what `docker run --read-only --tmpfs /tmp --network none` does: the command is PID 1, in the image's environment.
CONTAINER = """
set -eu
mount --make-rprivate /
echo "127.0.0.1 localhost" >"$1/etc/hosts"
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount -t sysfs -o ro sysfs "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmpfs "$1/tmp"
mount --bind "$2/cache" "$1/cache"
mount --bind "$2/runs" "$1/gearbox/runs"
ip link set lo up
user=$3
root=$1
shift 3
exec chroot --userspec="$user" "$root" env -i "$@"
"""


@pytest.fixture(scope="module", autouse=True)
def needed():
    if os.geteuid() != 0:
        pytest.skip("chroot and mounts need root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"not installed: {missing}")
    if "overlay" not in Path("/proc/filesystems").read_text():
        pytest.skip("the kernel has no overlayfs")


def buildah(storage: Path, *arguments: str, **options) -> subprocess.CompletedProcess:
    storing = ["--storage-driver", "overlay", "--root", str(storage / "root"), "--runroot", str(storage / "run")]
    return subprocess.run(["buildah", *storing, *arguments], text=True, capture_output=True, check=False, **options)


def done(outcome: subprocess.CompletedProcess) -> str:
    assert outcome.returncode == 0, f"{shlex.join(outcome.args)}\n{outcome.stdout[-5000:]}\n{outcome.stderr[-5000:]}"
    return outcome.stdout.strip()


def debian() -> Path:
    """Return a tar of a Debian with Python, built from the mirror that this machine uses."""
    if not DEBIAN.exists():
        asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Release: bookworm"]
        targets = subprocess.run(asked, text=True, capture_output=True, check=True).stdout.split()
        partial = DEBIAN.with_name(f"{DEBIAN.name}.{os.getpid()}")
        folder = partial.with_suffix(".folder")
        python = "--include=python3,python3-venv,python3-dev"
        done(subprocess.run(
            ["debootstrap", "--variant=minbase", python, "bookworm", str(folder), *targets[:1]],
            text=True, capture_output=True, check=False,
        ))  # fmt: skip
        done(subprocess.run(["tar", "-C", str(folder), "-cf", str(partial), "."], text=True, capture_output=True))
        shutil.rmtree(folder)
        partial.rename(DEBIAN)
    return DEBIAN


def pip_configuration(secret: str) -> tuple[str, list[str]]:
    """Return a pip.conf with this machine's package index, and the folders that it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True, check=True
    ).stdout
    values = {
        re.split(r"\.", key, maxsplit=1)[1]: ast.literal_eval(value)
        for key, value in (line.split("=", 1) for line in listed.splitlines())
    }
    values["retries"] = "0"  # the page of torch's CPU build may be unreachable
    text = f"# {secret}\n[global]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
    paths = {Path(path) for path in re.findall(r"(?<![\w:/])(?:file://)?(/[\w./-]+)", text)}
    return text, sorted({str(Path(*path.parts[:3])) for path in paths if path.exists()})


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, str]:
    """Return a copy of the tree with planted keys and tokens, and the secret word that each of them contains."""
    tree = copy_of_the_tree(tmp_path_factory.mktemp("context") / "gearbox")
    return tree, plant(tree)


@pytest.fixture(scope="module")
def storage(planted):
    """Yield the folder of buildah's images, with the CPU image built in it."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/var/tmp/gearbox-image.XXXXXX"], text=True).strip())
    try:
        container = done(buildah(folder, "from", "scratch"))
        done(buildah(folder, "add", container, str(debian()), "/"))
        done(buildah(folder, "config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container))
        done(buildah(folder, "commit", "--rm", container, "localhost/debian:bookworm"))
        tree, secret = planted
        configuration, folders = pip_configuration(secret)
        (folder / "pip.conf").write_text(configuration)
        done(buildah(
            folder, "bud", "--isolation", "chroot", "--network", "host", "--format", "docker", "--layers",
            "--build-arg", "BASE=localhost/debian:bookworm", "--build-arg", "LOCK=cpu",
            "--secret", f"id=pip.conf,src={folder / 'pip.conf'}",
            *(f"--volume={path}:{path}:ro" for path in folders),
            "--tag", "localhost/gearbox:test", str(tree),
        ))  # fmt: skip
        yield folder
    finally:
        done(buildah(folder, "rm", "--all"))
        subprocess.run(["umount", "--recursive", folder / "root/overlay"], check=False)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def configuration(storage) -> dict:
    inspected = json.loads(done(buildah(storage, "inspect", "--type", "image", "localhost/gearbox:test")))
    return inspected["Docker"]["config"]


@pytest.fixture(scope="module")
def root(storage) -> Path:
    """Return the mounted root folder of the image."""
    container = done(buildah(storage, "from", "localhost/gearbox:test"))
    return Path(done(buildah(storage, "mount", container)))


@pytest.fixture
def start(root, configuration, tmp_path):
    """Start a container, with volumes in tmp_path, and return its Popen: start("src/train.py", user="4242:4242")."""
    started = []

    def call(*arguments: str, user: str = "10001:10001", entrypoint: bool = True, **options) -> subprocess.Popen:
        for volume in ("cache", "runs"):
            (tmp_path / volume).mkdir(exist_ok=True)
            os.chown(tmp_path / volume, *map(int, user.split(":")))
        namespaces = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
        own = ["-C", configuration["WorkingDir"], *configuration["Env"], *(configuration["Entrypoint"] * entrypoint)]
        command = [*namespaces, "sh", "-c", CONTAINER, "sh", str(root), str(tmp_path), user, *own, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
        started.append(subprocess.Popen(command, text=True, **pipes))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen, code: int = 0) -> str:
    output = process.communicate(timeout=240)[0]
    assert process.returncode == code, output
    return output


def test_the_configuration_of_the_image(configuration):
    assert configuration["User"] == "10001:10001"
    assert set(configuration["Volumes"]) == {"/cache", "/data", "/gearbox/runs"}
    assert configuration["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert configuration["Healthcheck"]["Test"] == ["CMD", "python", "/gearbox/src/doctor.py", "--machine"]


def test_no_secret_in_a_layer(storage, planted, root):
    """Search every file of every layer, including hidden ones, and the configuration with its history."""
    layers = sorted(storage.glob("root/overlay/*/diff"))
    assert len(layers) > 5
    names = {str(path.relative_to(layer)) for layer in layers for path in layer.rglob("*")}
    assert {"gearbox/src/train.py", "gearbox/recipes/tiny/tokenizer.json"} <= names
    assert not {name for name in names if name.startswith(("gearbox/tests", "gearbox/.git", "gearbox/docs"))}

    def holding(word: str) -> str:
        search = ["grep", "--recursive", "--files-with-matches", "--text", "--fixed-strings", word]
        places = [*layers, storage / "root/overlay-images"]
        return subprocess.run([*search, *places], text=True, capture_output=True, check=False).stdout

    assert holding("a small Llama learns to reverse").count("recipes/tiny.yaml")
    assert holding(planted[1]) == ""


def test_no_run_or_cache_of_the_build_is_left(root):
    left = [path for folder in ("cache", "data", "gearbox/runs", "tmp", "home/gearbox/.cache")
            for path in Path(root, folder).glob("*")]  # fmt: skip
    assert left == []
    assert not list(Path(root, "gearbox").rglob(".*"))


def test_the_size_matches_the_document(root):
    stated = float(re.search(r"CPU image\D*([\d.]+) GB", (ROOT / "docs/image.md").read_text())[1])
    size = int(subprocess.check_output(["du", "--summarize", "--bytes", root], text=True).split()[0]) / 1e9
    print(f"the CPU image: {size:.2f} GB unpacked")
    assert abs(size - stated) < 0.1 * stated


def test_python_runs_a_path_on_a_read_only_root(start, tmp_path):
    output = ended(start("src/train.py", "recipes/tiny.yaml", "train.steps=3", *SMALL))
    assert json.loads((tmp_path / "runs/tiny-single/status.json").read_text())["outcome"] == "done", output
    assert (tmp_path / "runs/tiny-single/model/model.safetensors").stat().st_uid == 10001
    refused = start("sh", "-c", "touch /gearbox/x || touch /opt/venv/x || touch /home/gearbox/x")
    assert ended(refused, 1).count("Read-only file system") == 3


def test_any_other_command_by_any_other_user(start, tmp_path):
    """Two ranks connect without a network, under a uid that has no name."""
    command = "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 src/train.py"
    ended(start(*command.split(), "train.steps=2", *SMALL, user="4242:4343"))
    model = (tmp_path / "runs/tiny-ddp/model/model.safetensors").stat()
    assert (model.st_uid, model.st_gid) == (4242, 4343)


def test_sigterm_reaches_the_command_which_saves(start, tmp_path):
    process = start("src/launch.py", "single", "train.steps=100000", "run.name=stopped", *SMALL)
    metrics = tmp_path / "runs/stopped/metrics.jsonl"
    while not (metrics.exists() and '"step"' in metrics.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.5)
    first = subprocess.check_output(["pgrep", "--parent", str(process.pid)], text=True)  # PID 1 of the namespace
    os.kill(int(first), signal.SIGTERM)
    assert "saved" in ended(process, 85)
    assert json.loads((tmp_path / "runs/stopped/status.json").read_text())["outcome"] == "saved"


def test_no_zombie_stays(start):
    """PID 1 reaps an orphan that exits: no process in /proc has state Z."""
    orphan = (
        "import os, time\nif os.fork() == 0:\n    os.fork() and os._exit(0)\n    time.sleep(0.5)\n    os._exit(0)\n"
    )
    count = "os.wait()\ntime.sleep(1.5)\nimport glob\n"
    states = "print([open(f).read().rsplit(') ')[1][0] for f in glob.glob('/proc/[0-9]*/stat')].count('Z'))"
    assert ended(start("python", "-c", orphan + count + states)) == "0\n"


def test_the_disk_gear_is_refused(start):
    output = ended(start("src/launch.py", "zero3_nvme", "--num_processes=1", "train.steps=2", *SMALL), 2)
    assert "libaio" in output and "zero3_offload" in output


def test_the_health_check(start, configuration):
    ended(start(*configuration["Healthcheck"]["Test"][1:], entrypoint=False))


@pytest.mark.parametrize(
    "breaks, message",
    [
        ("cd /opt/venv/lib/python3*/site-packages && rm -r peft", "import peft"),
        (
            "sed -i 's/^Version: .*/Version: 4.0.0/' /opt/venv/lib/python3*/site-packages/tqdm-*/METADATA",
            "tqdm: installed 4.0.0",
        ),
        ("rm /gearbox/recipes/tiny/config.json", "recipes/tiny"),
    ],
    ids=["import", "version", "training"],
)
def test_the_build_fails(storage, tmp_path, breaks, message):
    """Run the last RUN of the Dockerfile after breaking one part of the image."""
    check = re.findall(r"^RUN (?:.*\\\n)*.*\n", (ROOT / "Dockerfile").read_text(), re.M)[-1]
    lines = ["FROM localhost/gearbox:test", "ARG LOCK", "USER 0", f"RUN {breaks}", "USER 10001:10001", check]
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    outcome = buildah(storage, "bud", "--isolation", "chroot", "--build-arg", "LOCK=cpu", str(tmp_path))
    assert outcome.returncode != 0
    assert message in outcome.stdout + outcome.stderr
