"""Every command of the documents is executed, every path and key in them is resolved."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gearbox.config import ROOT, recipe_keys
from gearbox.gear import load_gear

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
README = GUIDES[0].read_text()
COMMANDS = [
    line
    for guide in GUIDES
    for block in re.findall(r"```bash\n(.*?)```", guide.read_text(), re.S)
    for line in block.splitlines()
]
SMALL = "batch.rows=4 batch.row_tokens=64 train.steps=2 schedule.warmup_steps=1 eval.every=0 eval.sample_tokens=2"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The files that a clone would have, where the documents' commands may write."""
    folder = tmp_path_factory.mktemp("clone") / "gearbox"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, text=True, capture_output=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in tracked:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_the_commands_of_the_guides(clone, chats):
    """In order, in one copy, with the runs cut to two steps; make's targets are resolved, not run from a test."""
    shutil.copy(chats, clone / "chats.jsonl")
    programs = os.path.dirname(sys.executable)  # noqa: PTH120  a symlinked interpreter must stay in its environment
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    executed = 0
    asked = []
    for line in COMMANDS:
        if line.startswith("source "):
            continue
        if line.startswith("make "):
            line = line.replace("make ", "make --dry-run ")
        if "src/train.py" in line or "src/launch.py" in line:
            line = f"{line} {SMALL}"
        outcome = subprocess.run(
            line, shell=True, cwd=clone, env=environment, text=True, capture_output=True, check=False
        )
        assert outcome.returncode == 0, f"{line}\n{outcome.stdout}\n{outcome.stderr}"
        executed += 1
        if "src/ask.py" in line:
            asked.append(outcome.stderr)
    assert executed == len(COMMANDS) - 1 >= 12
    assert asked and not any(asked), "an answer comes without warnings"
    runs = {path.name for path in (clone / "runs").iterdir()}
    assert {"tiny-zero3", "tiny-ddp", "tiny-ddp-2", "tiny-single", "tiny-single-2"} <= runs, "nothing is overwritten"
    mine = yaml.safe_load((clone / "recipes/mine.yaml").read_text())
    assert mine["model"]["name"] == "HuggingFaceTB/SmolLM2-1.7B-Instruct"
    assert mine["data"] == {"path": "chats.jsonl"}
    assert (clone / "runs/mine/model/adapter_config.json").is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_keys_and_targets_exist(document):
    made_by_use = {"recipes/mine.yaml"}
    tops = "recipes|accelerate_configs|ds_configs|src|tests|docs|benchmarks"  # runs/ comes with use
    words = re.findall(rf"(?:{tops})/[\w./-]*|\b[A-Z]\w+\.md\b", document.read_text())
    missing = [word for word in words if not (ROOT / word.rstrip(".")).exists() and word.rstrip(".") not in made_by_use]
    assert missing == []
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make (\w+)", document.read_text())) <= targets
    groups = {key.split(".")[0] for key in recipe_keys()}
    files = {".yaml", ".json", ".jsonl", ".py"}
    for key in re.findall(rf"`((?:{'|'.join(groups)})\.\w+)", document.read_text()):
        assert key in recipe_keys() or f".{key.split('.')[1]}" in files, key


def test_the_gear_table_is_the_folder():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\d+) \|", README, re.M)
    gears = {path.stem: load_gear(path) for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert {name: int(count) for name, _, count in rows} == {name: gear.num_processes for name, gear in gears.items()}
    for name, engine, _ in rows:
        stage = re.search(r"ZeRO-(\d)", engine)
        assert gears[name].zero_stage == (int(stage[1]) if stage else 0)


def test_the_recipe_table_is_the_folder():
    named = set(re.findall(r"^\| `(recipes/\w+\.yaml)`", README, re.M))
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*.yaml")}


def test_the_error_shown_is_the_error_given():
    command, said = re.search(r"^\$ (python .*)\n(gearbox: .*)$", README, re.M).groups()
    outcome = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert (outcome.returncode, outcome.stderr.strip()) == (2, said)
