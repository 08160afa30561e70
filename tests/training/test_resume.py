"""Test what is said about run.dir and a changed recipe before torch is imported, and what is left to the ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gearbox import ROOT
from gearbox.checkpoint.manifest import render_manifest
from gearbox.config.gear import load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe, recipe_for_manifest
from gearbox.errors import UserError
from gearbox.launch import outcome
from gearbox.training import resume
from support.checkpoints import make

TINY = ROOT / "recipes" / "tiny.yaml"


def job(runs: Path, *overrides: str) -> Job:
    gear = load_gear(ROOT / "accelerate_configs" / "single.yaml")
    return Job.of(TINY, load_recipe(TINY, [f"run.dir={runs}", *overrides]), gear)


@pytest.fixture
def runs(tmp_path) -> Path:
    """Return a run.dir with an unfinished run of tiny that has the checkpoints 1 and 2."""
    return made(tmp_path / "runs")


def made(runs: Path, name: str = "tiny-single", **status: object) -> Path:
    folder, recipe = runs / name, recipe_for_manifest(job(runs).recipe)
    folder.mkdir(parents=True)
    for step in (1, 2):
        path = make(folder / "checkpoints", step) / "manifest.json"
        path.write_text(render_manifest(json.loads(path.read_text())["manifest"] | {"recipe": recipe}))
    (folder / "resolved.yaml").write_text(yaml.safe_dump(recipe))
    ended = {"outcome": "saved", "pid": 2**22 + 1, "host": socket.gethostname()}
    (folder / "status.json").write_text(json.dumps(ended | status))
    return runs


def change(folder: Path, **changes: object) -> None:
    """Change the recipe in the manifest of a checkpoint."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())["manifest"]
    content["recipe"] |= changes
    path.write_text(render_manifest(content))


def refusal(*arguments) -> str:
    """Return what is refused early, or an empty string."""
    try:
        resume.check_early(job(*arguments))
    except UserError as error:
        return str(error)
    return ""


def test_a_changed_recipe_is_refused_with_what_starts_it_anew(runs):
    before = sorted(runs.rglob("*"))
    assert refusal(runs) == refusal(runs, "train.steps=900") == refusal(runs, "run.resume=never", "optim.lr=1") == ""
    newest = runs / "tiny-single" / "checkpoints" / "step-2"
    assert refusal(runs, "optim.lr=1", "run.name=other") == ""
    change, way_out = refusal(runs, "optim.lr=1").split("; ")
    assert change == f"{newest}: was made by another recipe: optim.lr changed from 0.002 to 1.0"
    assert way_out == "undo the change, or add run.resume=never to the command to start a new run"
    assert str(newest) in refusal(runs, "optim.lr=1", f"run.resume={newest}", "run.name=other")
    assert sorted(runs.rglob("*")) == before


def test_the_ranks_decide_again(train, monkeypatch):
    given = ("run.name=x", "save.every=1", "train.steps=2", "schedule.name=constant")
    first = train("single", *given)
    monkeypatch.setattr(resume, "check_early", lambda job: None)
    refused = train("single", *given, "run.resume=latest", "optim.lr=1e-3")
    assert refused.codes == [2] and "add run.resume=never to the command" in refused.output
    assert "Traceback" not in refused.output and first.codes == [0]


@pytest.mark.parametrize(
    "status",
    [{"outcome": "done"}, {"outcome": "running", "host": "elsewhere"}, {"outcome": "running", "pid": os.getpid()}],
)
def test_a_run_that_has_ended_or_may_end_soon_is_left_to_the_ranks(tmp_path, status):
    runs = made(tmp_path / "runs", **status)
    assert refusal(runs, "optim.lr=1") == ""


@pytest.mark.parametrize(
    "status", [{"outcome": "running"}, {"pid": None}, {"pid": -1}, {"pid": 10**30}, {"pid": "x", "host": []}]
)
def test_a_run_that_was_killed_is_compared(tmp_path, status):
    assert "was made by another recipe" in refusal(made(tmp_path / "runs", **status), "optim.lr=1")


def test_a_checkpoint_that_the_ranks_may_choose_is_enough(runs):
    newest, older = (runs / "tiny-single" / "checkpoints" / f"step-{step}" for step in (2, 1))
    change(newest, optim={"lr": 7})
    assert refusal(runs) == "", "the ranks may skip the newest one, if its shards are damaged"
    change(older, optim={"lr": 7})
    assert "step-2: was made by another recipe" in refusal(runs)
    for folder in (newest, older):
        (folder / "manifest.json").write_text("{}")
    assert refusal(runs, "optim.lr=1") == ""


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1", "WORLD_SIZE": "2"}, {"GROUP_WORLD_SIZE": "2"}, {"TORCHELASTIC_RESTART_COUNT": "1"}],
)
def test_other_launchers_decide(runs, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert refusal(runs, "optim.lr=1") == ""


def test_a_restart_continues_the_folder_that_it_was_given(runs, monkeypatch):
    monkeypatch.setenv(outcome.RUN_FOLDER, str(runs / "tiny-single-2"))
    assert refusal(runs, "optim.lr=1") == ""


def test_latest_needs_a_run(tmp_path):
    assert "contains no run 'tiny-single'" in refusal(tmp_path / "gone", "run.resume=latest")
    runs = made(tmp_path / "runs", outcome="done")
    assert refusal(runs, "run.resume=latest") == ""
    for folder in (runs / "tiny-single" / "checkpoints").iterdir():
        folder.rename(runs / folder.name)
    assert "is done and has no checkpoint to resume from" in refusal(runs, "run.resume=latest")


def test_run_dir_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for parent in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        assert refusal(parent) == (
            f"run.dir: {parent} cannot be written: {tmp_path / 'file'}: Not a directory; choose another run.dir"
        )
    assert refusal(tmp_path / "new" / "deep") == "" and not (tmp_path / "new").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_run_dir_that_is_mounted_read_only(tmp_path):
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path / "disk")]
    if problem := subprocess.run(mount, capture_output=True, text=True, check=False).stderr:
        pytest.skip(problem)
    try:
        assert "disk: Read-only file system; choose another run.dir" in refusal(tmp_path / "disk" / "runs")
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.mark.parametrize("saved", [[], {"model": 3}, {3: {4: 5}}, {"model": {"name": ["x"] * 10**6}}, {"run": None}])
def test_odd_recipes_are_compared(runs, saved):
    recipe = job(runs).recipe
    found = resume.differences(dict(saved), recipe)
    assert found and all(len(line) < 10_000 for line in found)
    folder = runs / "tiny-single"
    (folder / "resolved.yaml").write_text(json.dumps(saved))
    assert resume.is_to_continue(folder, recipe, is_restart=False)


def test_an_exponential_yaml_file_and_a_pipe(runs):
    lines = [f" a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (runs / "tiny-single" / "resolved.yaml").write_text("\n".join(["model:", " a0: &a0 [x, x]", *lines]))
    assert resume.differences(resume._resolved(runs / "tiny-single"), job(runs).recipe)
    (runs / "tiny-single" / "resolved.yaml").unlink()
    os.mkfifo(runs / "tiny-single" / "resolved.yaml")
    assert resume.differences(resume._resolved(runs / "tiny-single"), job(runs).recipe) == [], "from the manifest"


@pytest.mark.cold
def test_the_launcher_refuses_without_torch(runs):
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('src/launch.py', run_name='__main__')"
    command = [sys.executable, "-c", code, "single", str(TINY), f"run.dir={runs}", "optim.lr=1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "optim.lr changed from 0.002 to 1.0; undo the change, or add run.resume=never" in ended.stderr
