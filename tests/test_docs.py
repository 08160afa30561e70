"""Every path, key and target in the documents exists, every table is the folder. (commands.py runs the commands.)"""

import re
import subprocess
import sys

import pytest

from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.config.recipe import recipe_keys

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
README = GUIDES[0].read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_keys_and_targets_exist(document):
    made_by_use = {"recipes/mine.yaml", "cluster/kubernetes/jobs/mine"}
    tops = "recipes|accelerate_configs|ds_configs|src|tests|docs|benchmarks|cluster"  # runs/ comes with use
    words = re.findall(rf"(?:{tops})/[\w./-]*|\b[A-Z]\w+\.md\b", document.read_text())
    missing = [word for word in words if not (ROOT / word.rstrip(".")).exists() and word.rstrip(".") not in made_by_use]
    assert missing == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([\w-]+)", document.read_text())) <= targets
    groups = {key.split(".")[0] for key in recipe_keys()}
    files = {".yaml", ".json", ".jsonl", ".py", ".sbatch"}
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
