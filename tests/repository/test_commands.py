"""`make commands`: run every command of README and docs, in order, in a fresh copy, as a user would."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.repository import GUIDES, copy_of_the_tree

pytestmark = [pytest.mark.long, pytest.mark.commands, pytest.mark.cold]
COMMANDS = [
    line
    for guide in GUIDES
    for block in re.findall(r"```bash\n(.*?)```", guide.read_text(), re.S)
    for line in block.splitlines()
    if not line.startswith("source ")
]
SMALL = "batch.rows=4 batch.row_tokens=64 train.steps=2 schedule.warmup=1 eval.every=0 eval.sample_tokens=2"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Copy the tree to a folder where the documents' commands may write."""
    return copy_of_the_tree(tmp_path_factory.mktemp("clone") / "gearbox")


def check_flags(line: str, folder: Path) -> None:
    """Check a line's flags with Docker's client, which parses them before it fails to find an engine."""
    line = line.replace("docker compose ", "docker-compose ", 1)  # Debian's name for it
    if not shutil.which(line.split()[0]):
        pytest.skip(f"{line.split()[0]} is not installed")
    environment = os.environ | {"DOCKER_HOST": "unix:///nowhere"}
    outcome = subprocess.run(line, shell=True, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    assert "connect" in outcome.stderr and "unknown" not in outcome.stderr, f"{line}\n{outcome.stderr}"


@pytest.mark.parametrize("line", COMMANDS)
def test_command(clone, line):
    """Run the commands in order, in one copy, with runs of two steps. Resolve make targets without running them."""
    if line.startswith("docker "):
        check_flags(line, clone)
        return
    if line.startswith("make "):
        line = line.replace("make ", "make --dry-run ")
    if "src/train.py" in line or "src/launch.py" in line:
        line = f"{line} {SMALL}"
    programs = os.path.dirname(sys.executable)  # noqa: PTH120  a symlinked interpreter must stay in its environment
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    outcome = subprocess.run(line, shell=True, cwd=clone, env=environment, text=True, capture_output=True, check=False)
    assert outcome.returncode == 0, f"{line}\n{outcome.stdout}\n{outcome.stderr}"
    assert "src/ask.py" not in line or not outcome.stderr, "ask.py prints warnings"


def test_the_commands_leave_these_runs(clone):
    runs = sorted(path.name for path in (clone / "runs").glob("tiny-*"))
    ddp, single = (
        [f"tiny-ddp{end}" for end in ("", "-2", "-3", "-4")],
        [f"tiny-single{end}" for end in ("", "-2", "-3")],
    )
    assert runs == [*ddp, "tiny-ep", "tiny-forms", *single, "tiny-zero3"]
    mine = yaml.safe_load((clone / "recipes/mine.yaml").read_text())
    assert mine["model"]["name"] == "HuggingFaceTB/SmolLM2-1.7B-Instruct"
    assert mine["data"] == {"path": "recipes/chats.jsonl"}
    for name in ("mine", "first", "chats"):
        assert (clone / "runs" / name / "model/model.safetensors").is_file()
    assert (clone / "runs/marks/model/adapter_config.json").is_file()
