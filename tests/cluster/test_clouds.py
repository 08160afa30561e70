"""Check the files of cluster/skypilot, cluster/dstack and cluster/hf-jobs without the packages of their tools.

Their commands run in bash with a stand-in for Python. What they would start is given to src/launch.py's own checks.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import launch
from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.launch import outcome, supervisor
from gearbox.launch.topology import Node
from gearbox.training import resume
from support import clouds

BIN = Path(sys.prefix) / "bin"
DOCUMENT = (ROOT / "docs" / "clouds.md").read_text()
TASK, DSTACK = clouds.load(clouds.SKYPILOT), clouds.load(clouds.DSTACK)
DSTACK_SCRIPT = " && ".join(DSTACK["commands"])  # as dstack joins them
ADDRESSES = ["10.0.0.1", "10.0.0.2"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_every_file_is_checked():
    found = {path for tool in ("skypilot", "dstack", "hf-jobs") for path in (ROOT / "cluster" / tool).iterdir()}
    assert found == {clouds.SKYPILOT, clouds.DSTACK, clouds.DSTACK_VOLUME, clouds.HF_JOBS}
    assert all(str(path.relative_to(ROOT)) in DOCUMENT for path in found)


@pytest.fixture
def started(monkeypatch):
    """Return a function that checks a recorded command as src/launch.py does, and returns what it would start.

    started(arguments, environment) -> (flags, arguments of the recipe, place among the machines)
    """

    def call(arguments: list[str], seen: dict[str, str]):
        assert arguments[0] == "src/launch.py" and "--doctor" in arguments
        for name, value in seen.items():
            if name.startswith("PET_"):
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(resume, "check_early", lambda job: None)  # run.dir is not mounted here
        calls = []
        monkeypatch.setattr(supervisor, "supervise", lambda *given, **named: calls.append((given, named["node"])) or 0)
        assert launch.main(arguments[1:]) == 0
        ((_, _, first), _), ((flags, recipe), node) = calls
        assert first == supervisor.DOCTOR
        return dict(flag.removeprefix("--").split("=", 1) for flag in flags), recipe, node

    return call


def ranks(flags: dict[str, str]) -> int:
    return load_gear(Path(flags["config_file"]), flags).num_processes


# ---------------------------------------------------------------------------- SkyPilot


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_starts_two_nodes(started, tmp_path, rank):
    environment = clouds.sky_environment(rank, ADDRESSES, 8, GEAR="hsdp", OVERRIDES="train.steps=7 save.every=3")
    flags, recipe, node = started(*clouds.recorded(TASK["run"], environment, tmp_path))
    assert node == Node(2, rank, "10.0.0.1", 29500) and ranks(flags) == 16
    assert recipe == [
        "recipes/fsdp_2gpu.yaml", "run.dir=/checkpoints", "run.name=qwen-7b", "train.steps=7", "save.every=3"
    ]  # fmt: skip


def test_skypilot_starts_one_node(started, tmp_path):
    flags, recipe, node = started(
        *clouds.recorded(TASK["run"], clouds.sky_environment(0, ADDRESSES[:1], 8, NAME="mine"), tmp_path)
    )
    assert node is None and ranks(flags) == 8 and recipe[1:] == ["run.dir=/checkpoints", "run.name=mine"]


def test_ranks_can_be_set_without_gpus(started, tmp_path):
    flags, _, _ = started(*clouds.recorded(TASK["run"], clouds.sky_environment(0, ADDRESSES, 0, RANKS="3"), tmp_path))
    assert ranks(flags) == 6


def test_skypilot_recovers_what_was_saved_and_nothing_else():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [outcome.EXIT_SAVED]}, "other keys would repeat errors"
    ((path, bucket),) = TASK["file_mounts"].items()
    assert f"run.dir={path} " in TASK["run"] and bucket["mode"] == "MOUNT"


def test_the_code_of_the_launcher_is_the_code_of_the_node(tmp_path):
    """SkyPilot reads the script's code, so nothing may follow the launcher."""
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(f"#!/bin/sh\nexit {outcome.EXIT_SAVED}\n")
    stub.chmod(0o755)
    environment = os.environ | clouds.sky_environment(0, ADDRESSES, 8)
    (tmp_path / "script.sh").write_text(TASK["run"])
    ended = subprocess.run(["bash", "script.sh"], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == outcome.EXIT_SAVED


@pytest.mark.parametrize("has", ["python3.12", "nothing"])
def test_setup_finds_or_fetches_a_python(tmp_path, has):
    """Run it with stand-ins for every program that it calls. Without a Python that fits, uv fetches one."""
    log, tools = tmp_path / "log", tmp_path / "tools"
    tools.mkdir()
    answers = {
        "uv": '[[ "$*" == "python find"* && -f fetched ]] && echo /managed/python3.12\n'
        '[[ "$*" == "python install"* ]] && touch fetched\n[[ "$*" != "python find"* || -f fetched ]]\n'
    }
    for name in {"make", "gcc", "pip", "uv", "sudo", has} - {"nothing"}:
        (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{log}\n{answers.get(name, "")}')
        (tools / name).chmod(0o755)
    for name in ("head", "touch"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    (tmp_path / "script.sh").write_text(TASK["setup"])
    subprocess.run(["/bin/bash", "script.sh"], cwd=tmp_path, env={"PATH": str(tools)}, check=True)
    calls = log.read_text().splitlines()
    found = tools / has if has != "nothing" else "/managed/python3.12"
    assert calls[-1] == f"make setup PYTHON={found}" and not any(call.startswith("sudo") for call in calls)
    assert ("uv python install 3.12" in calls) == (has == "nothing")
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^setup:", makefile, re.M) and re.search(r"^PYTHON \?=", makefile, re.M)


# ---------------------------------------------------------------------------- dstack and Hugging Face Jobs


@pytest.mark.parametrize("rank", [0, 1])
def test_dstack_starts_two_nodes(started, tmp_path, rank):
    environment = clouds.dstack_environment(rank, ADDRESSES, 8) | {"GEAR": "hsdp", "OVERRIDES": "train.steps=7"}
    flags, recipe, node = started(*clouds.recorded(DSTACK_SCRIPT, environment, tmp_path))
    assert node == Node(2, rank, "10.0.0.1", 29500) and ranks(flags) == 16
    assert recipe == ["recipes/fsdp_2gpu.yaml", "run.name=qwen-7b", "train.steps=7"]


def test_dstack_keeps_runs_and_repeats_no_error():
    mounts = {mount["path"]: mount.get("name") for mount in DSTACK["volumes"]}
    volume = clouds.load(clouds.DSTACK_VOLUME)
    assert mounts == {"/gearbox/runs": volume["name"], "/cache": None}
    assert f"WORKDIR {DSTACK['working_dir']}\n" in (ROOT / "Dockerfile").read_text()
    assert DSTACK["retry"]["on_events"] == ["no-capacity", "interruption"]
    assert DSTACK["commands"][-1].startswith("exec "), "the signal of dstack goes to the shell"


def test_images_have_the_version_of_the_project():
    text = DSTACK["image"] + clouds.HF_JOBS.read_text() + DOCUMENT
    tags = re.findall(r"registry\.example\.com/gearbox:([\d.]+\d)", text)
    assert len(tags) == 4 and set(tags) == {VERSION}


def test_hugging_face_jobs_get_the_command(started, tmp_path):
    words = ["fsdp", "--doctor", "--num_processes=2", "recipes/fsdp_2gpu.yaml", "run.name=mine"]
    arguments, _ = clouds.recorded(f"{clouds.HF_JOBS} {shlex.join(words)}", {"BUCKET": "me/runs"}, tmp_path)
    command = arguments.index("python")
    assert arguments[:2] == ["jobs", "run"] and arguments[command:] == ["python", "src/launch.py", *words]
    flags, recipe, node = started(arguments[command + 1 :], {})
    assert (ranks(flags), node) == (2, None) and recipe == ["recipes/fsdp_2gpu.yaml", "run.name=mine"]


@pytest.mark.parametrize(("words", "bucket", "reason"), [([], "me/runs", "usage"), (["fsdp"], "runs", "OWNER/NAME")])
def test_hugging_face_jobs_are_refused_in_one_line(words, bucket, reason):
    environment = os.environ | {"BUCKET": bucket}
    ended = subprocess.run([clouds.HF_JOBS, *words], env=environment, text=True, capture_output=True, check=False)
    assert ended.returncode == outcome.EXIT_USER_ERROR and ended.stderr.count("\n") == 1 and reason in ended.stderr


@pytest.mark.cold
def test_the_client_of_the_hub_accepts_the_job():
    """`hf jobs run --dry-run` parses all flags and contacts nothing."""
    environment = os.environ | {
        "BUCKET": "me/gearbox-runs", "DRY_RUN": "1", "HF_TOKEN": "hf_" + "x" * 20,
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }  # fmt: skip
    words = ["fsdp", "--doctor", "--num_processes=2", "recipes/fsdp_2gpu.yaml", "run.name=mine"]
    shown = subprocess.run([clouds.HF_JOBS, *words], env=environment, text=True, capture_output=True, check=True).stdout
    assert "(dry run) Job not submitted." in shown and "x" * 20 not in shown
    values = dict(re.findall(r"^  (\w+) +(.+)$", shown, re.M))
    assert values["command"] == f"python src/launch.py {' '.join(words)}"
    assert values["volumes"] == "hf://buckets/me/gearbox-runs:/gearbox/runs"


# ---------------------------------------------------------------------------- all


@pytest.mark.parametrize("script", [TASK["setup"], TASK["run"], DSTACK_SCRIPT.replace("$OVERRIDES", "")])
def test_shellcheck_accepts_the_commands(script):
    command = [BIN / "shellcheck", "--shell=bash", "-"]
    checked = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_document_has_the_variables_and_codes():
    assert set(TASK["envs"]) <= set(re.findall(r"`([A-Z]+)`", DOCUMENT))
    asked = set(re.findall(r"\$\{([A-Z_]+):[-+]", clouds.HF_JOBS.read_text()))
    assert {"IMAGE", "FLAVOR", "TIMEOUT", "ATTEMPTS", "DRY_RUN"} == asked
    for variable, default in re.findall(r"\$\{([A-Z_]+):-([^}]+)\}", clouds.HF_JOBS.read_text()):
        assert re.search(rf"^\| `{variable}` \|.*\b{re.escape(default)}`? \|$", DOCUMENT, re.M), variable
    assert f"exit code {outcome.EXIT_SAVED} (saved)" in DOCUMENT
    assert f"exit codes {outcome.EXIT_USER_ERROR} and {outcome.EXIT_FAILED}" in DOCUMENT


def test_files_are_read_alike_by_yaml_1_2():
    from ruamel.yaml import YAML

    for path in (clouds.SKYPILOT, clouds.DSTACK, clouds.DSTACK_VOLUME):
        assert YAML(typ="safe").load(path.read_text()) == yaml.safe_load(path.read_text())
