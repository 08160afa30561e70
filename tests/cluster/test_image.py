"""Check what needs no build of the image: lock files, .dockerignore, compose.yaml and the release workflow."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from gearbox import ROOT
from gearbox.doctor import network
from gearbox.launch.supervisor import SHUTDOWN_SECONDS
from support.repository import plant

sys.path.insert(0, str(ROOT / "docker"))
from verify import MIN_MODULES, RDMA_LIBRARY, canonical, differences, locked_versions, own_modules

LOCKS = {path.stem: path.read_text() for path in sorted((ROOT / "requirements").glob("*.lock"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    text=True,
    capture_output=True,
    check=True,
).stdout.splitlines()
TRACKED = [name for name in TRACKED if (ROOT / name).is_file()]
# constraints.txt lacks what torch's CUDA build pins itself, and the packages that pip freeze hides.
CUDA = re.compile(r"nvidia-|cuda-|triton$")
HIDDEN = {"setuptools"}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_of_constraints(name):
    constraints = locked_versions((ROOT / "constraints.txt").read_text())
    locked = {
        package: version.split("+")[0]  # 2.13.0+cpu is a build of 2.13.0
        for package, version in locked_versions(LOCKS[name]).items()
        if package not in HIDDEN and not (name == "cuda" and CUDA.match(package))
    }
    assert locked == {package: constraints.get(package) for package in locked}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(locked[canonical(requirement.name)]), requirement


def test_the_locks_differ_only_in_torch():
    cpu, cuda = locked_versions(LOCKS["cpu"]), locked_versions(LOCKS["cuda"])
    assert cpu.pop("torch") == f"{cuda.pop('torch')}+cpu"
    assert cpu == {package: version for package, version in cuda.items() if not CUDA.match(package)}
    assert len(cuda) > len(cpu)


@pytest.mark.parametrize("name", LOCKS)
def test_every_file_of_a_lock_has_a_hash(name):
    entries = re.split(r"^(?=[\w.-]+==)", re.sub(r"^\s*#.*\n", "", LOCKS[name], flags=re.M), flags=re.M)
    assert entries.pop(0).split() in ([], ["--find-links", "https://download.pytorch.org/whl/cpu/torch/"])
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.+]+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", entry), entry


def test_verify_names_versions_that_differ_from_the_lock():
    locked = locked_versions("# via\nJinja2==3.1.6 \\\n    --hash=sha256:00\ntorch==2.13.0+cpu \\\nxxhash==4.1.0\n")
    assert differences(locked, {"jinja2": "3.1.6", "torch": "2.13.0+cpu", "xxhash": "4.1.0"}) == []
    assert differences(locked, {"jinja2": "3.1.5", "torch": "2.13.0+cpu", "left-pad": "1"}) == [
        "jinja2: installed 3.1.5, locked 3.1.6",
        "left-pad: installed 1, locked none",
        "xxhash: installed none, locked 4.1.0",
    ]


def test_verify_finds_modules_in_their_folders():
    names = own_modules()
    assert {"train", "gearbox", "gearbox.redact", "gearbox.launch", "gearbox.launch.supervisor"} <= {*names}
    assert len(names) >= MIN_MODULES and len(names) == len({*names})


def test_the_image_has_the_libraries_of_infiniband():
    """NCCL opens them at run time and is silent without, so the build opens one and the doctor names the packages."""
    installed = re.search(r"apt-get install (.*?)&&", (ROOT / "Dockerfile").read_text(), re.S)[1].split()
    assert {*network.RDMA_PACKAGES.split()} <= {*installed}
    assert RDMA_LIBRARY == network.RDMA_LIBRARY


def test_every_image_and_action_is_pinned():
    """Nothing is `latest`: tomorrow runs the same versions as today."""
    text = {name: (ROOT / name).read_text(errors="replace") for name in TRACKED if not name.startswith("tests/")}
    assert [name for name, content in text.items() if re.search(r"[:@-]latest\b", content)] == []
    workflows = [content for name, content in text.items() if name.startswith(".github/workflows/")]
    used = [use for content in workflows for use in re.findall(r"uses: *(\S+)", content)]
    assert used and [use for use in used if not re.search(r"@[0-9a-f]{40}$", use)] == []
    for base in re.findall(r"^ARG BASE=(.*)$", text["Dockerfile"], re.M):
        assert re.search(r":\d+\.\d+\.\d+-", base), base


@pytest.mark.cold
@pytest.mark.parametrize(
    "schema, name",
    [("compose-spec", "compose.yaml")]
    + [("github-workflows", name) for name in TRACKED if name.startswith(".github/workflows/")]
    + [("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml")]
    + [("github-issue-forms", f".github/ISSUE_TEMPLATE/{name}.yml") for name in ("bug", "feature")],
)
def test_files_match_their_schemas(schema, name):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(ROOT / name)]
    outcome = subprocess.run(command, text=True, capture_output=True, check=False)
    assert outcome.returncode == 0, outcome.stdout


def test_scripts_of_a_workflow_pass_shellcheck():
    for name in TRACKED:
        if name.startswith(".github/workflows/"):
            for job in yaml.safe_load((ROOT / name).read_text())["jobs"].values():
                for script in (step["run"] for step in job["steps"] if "run" in step):
                    checked = subprocess.run(
                        [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "-"],
                        input=script,
                        text=True,
                        capture_output=True,
                        check=False,
                    )
                    assert checked.returncode == 0 and "${{" not in script, checked.stdout


def test_compose_matches_the_image():
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["train"]
    assert service["image"] == f"gearbox:{PROJECT['version']}"
    assert int(service["stop_grace_period"].removesuffix("m")) * 60 > SHUTDOWN_SECONDS
    volumes = re.search(r"^VOLUME (.*)$", (ROOT / "Dockerfile").read_text(), re.M)[1]
    assert {volume.split(":")[1] for volume in service["volumes"]} >= set(yaml.safe_load(volumes))


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is not installed")
def test_docker_compose_accepts_the_file(tmp_path):
    outcome = subprocess.run(
        ["docker-compose", "--file", str(ROOT / "compose.yaml"), "config"],
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | {"UID": "10001", "GID": "10001"},
    )
    assert outcome.returncode == 0, outcome.stderr
    service = yaml.safe_load(outcome.stdout)["services"]["train"]
    assert service["user"] == "10001:10001" and service["read_only"]


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("buildah"), reason="buildah is not installed")
def test_no_key_reaches_a_build(tmp_path):
    """Check that `COPY . .` with the .dockerignore copies no key from a tree that has some."""
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copy(ROOT / ".dockerignore", tree)
    (tree / "Dockerfile").write_text("FROM scratch\nCOPY . .\n")
    secret = plant(tree)
    for name in ("src/train.py", "recipes/tiny/tokenizer.json", "requirements/cpu.lock", "docker/entrypoint.sh"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("shipped")
    storing = [
        "buildah",
        "--storage-driver",
        "vfs",
        "--root",
        str(tmp_path / "root"),
        "--runroot",
        str(tmp_path / "run"),
    ]
    subprocess.run([*storing, "bud", "--isolation", "chroot", str(tree)], check=True, capture_output=True)
    held = [path for path in (tmp_path / "root/vfs/dir").rglob("*") if path.is_file()]
    assert sorted(path.name for path in held) == ["cpu.lock", "entrypoint.sh", "tokenizer.json", "train.py"]
    assert not [path for path in held if secret in path.read_text()]
