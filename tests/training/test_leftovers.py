"""Damaged files in a run's folder are mended or refused, each in one line, and a resume gives the same losses."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from gearbox.checkpoint import checkpointer
from gearbox.checkpoint.staging import Staging
from gearbox.errors import UserError
from gearbox.launch.outcome import read_outcome
from gearbox.metrics import metrics_file
from gearbox.pages import run_comparison, run_report
from gearbox.training import leftovers, run_folder
from support.faults import STEPS, at_step, patch_step

GIVEN = (*STEPS, "train.steps=2", "save.every=1")
BAD_LINES = [
    b"\0\0\0\0\n", b"\xff\xfe{}\n", b"[1, 2]\n", b'"text"\n', b'{"loss": 1.0}\n', b'{"step": "2", "loss": 1.0}\n',
    b'{"step": true}\n', b'{"step": -1}\n', b'{"step": 1e400}\n', b'{"step": 1, "loss": 1' + b"0" * 400 + b"}\n",
    b'{"step": 1' + b"0" * 5000 + b"}\n", b"[" * 100_000 + b"\n", b'{"step": 1, "lo\n', b"\n",
]  # fmt: skip


def resumed(train, folder: Path, *changes: str):
    outcome = train("single", *GIVEN, "train.steps=3", *changes)
    assert outcome.codes == [0], outcome.output
    assert "Traceback" not in outcome.output and [path.name for path in folder.parent.iterdir()] == ["x"]
    assert read_outcome(folder / "status.json")["outcome"] == "done"
    return outcome


def all_lines(output: str, path: Path) -> list[str]:
    """Return the lines that begin with a path, without the breaks of narrow screens."""
    return [line for line in output.splitlines() if line.startswith(f"{path}:")]


def test_every_damaged_file_of_a_run_is_mended_in_one_line_each(train):
    whole = train("single", *GIVEN, "train.steps=3", "run.name=whole")
    losses = whole.losses
    shutil.rmtree(whole.folder)
    folder = train("single", *GIVEN).folder
    good = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"".join(BAD_LINES) + good + b'{"step": 2, "cut')
    (folder / "status.json").write_text('{"outcome": ["done"], "pid": [1], "step": "2", "saved_step": {}, "run": 7}')
    (folder / "resolved.yaml").write_bytes(bytes(500))
    (folder / "base" / "model.safetensors").write_bytes(b"")
    (folder / "dropped.jsonl").mkdir()
    (folder / "report.html").unlink()
    (folder / "report.html").symlink_to(folder / "nowhere")
    for name in ("model", "tensorboard"):
        shutil.rmtree(folder / name)
        (folder / name).write_text("mine")
    (folder / "hang").symlink_to(folder / "nowhere")
    (folder / "checkpoints" / "step-9").symlink_to(folder / "nowhere")
    outcome = resumed(train, folder)
    assert outcome.losses == losses
    named = ("metrics.jsonl", "status.json", "resolved.yaml", "base", "dropped.jsonl", "report.html", "model", "hang")
    assert [(name, len(all_lines(outcome.output, folder / name))) for name in named] == [(name, 1) for name in named]
    assert f"damaged lines set aside in metrics.jsonl.bad: {len(BAD_LINES)}" in outcome.output
    assert (folder / "metrics.jsonl.bad").read_bytes() == b"".join(BAD_LINES)
    assert (folder / "model.moved-1").read_text() == (folder / "tensorboard.moved-1").read_text() == "mine"
    assert leftovers.read_recipe(folder / "resolved.yaml")["run"]["name"] == "x"


def test_pipes_and_lost_files(train):
    """Opening a pipe for reading would hang."""
    run = train("single", *GIVEN)
    folder = run.folder
    shutil.rmtree(folder / "base")
    shutil.rmtree(folder / "tensorboard")
    for name in ("metrics.jsonl", "status.json", "resolved.yaml"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    outcome = resumed(train, folder)
    assert "metrics.jsonl: the lines of steps 1 to 2 are lost" in outcome.output
    assert "metrics.jsonl: is not a file; renamed to metrics.jsonl.moved-1" in outcome.output
    assert [line["step"] for line in outcome.lines("loss")] == [3]


def test_an_empty_model_of_a_run_that_is_done_is_saved_again(train):
    folder = train("single", *GIVEN).folder
    weights = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "model" / "notes").touch()
    assert not leftovers.is_model_damaged(folder)
    (folder / "model" / "model.safetensors").write_bytes(b"")
    outcome = train("single", *GIVEN)
    assert outcome.codes == [0] and "model: is empty or has empty files" in outcome.output
    assert (folder / "model" / "model.safetensors").read_bytes() == weights


def test_a_stop_whose_save_failed_does_not_say_saved(train, monkeypatch):
    usual = Staging.write

    def write(self, path):
        if "step-2" not in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return usual(self, path)

    monkeypatch.setattr(checkpointer, "LAST_TRIES", 0)
    monkeypatch.setattr(Staging, "write", write)
    patch_step(monkeypatch, at_step(3, lambda step: os.kill(os.getpid(), signal.SIGTERM)))
    outcome = train("single", *STEPS)
    text = "stopped at step 3, which could not be saved; run the same command to resume from step 2"
    assert f"not saved: {text}" in outcome.output and "\nsaved:" not in outcome.output
    status = read_outcome(outcome.folder / "status.json")
    assert (status["outcome"], status["text"], status["saved_step"]) == ("saved", text, 2)


@pytest.mark.parametrize(("name", "kind"), [("checkpoints", "folder"), ("lock", "file")])
@pytest.mark.parametrize("found", ["other", "link"])
def test_what_cannot_be_mended_is_refused_before_training(tmp_path, name, kind, found):
    path = tmp_path / "runs" / "x" / name
    path.parent.mkdir(parents=True)
    if found == "link":
        path.symlink_to("/nowhere")
    else:
        path.mkdir() if kind == "file" else path.write_text("mine")
    where = " (it links to /nowhere)" if found == "link" else ""
    with pytest.raises(UserError) as refusal:
        run_folder._lock(path.parent)
    assert str(refusal.value) == f"{path}: is not a {kind}{where}; move it away, or choose another run.name"


def test_a_file_in_place_of_the_runs_folder_is_refused(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UserError, match=r"run.dir: .*/x is not a folder; move it away, or choose another run.name"):
        run_folder._create_folder(tmp_path, "x")


def test_the_folder_of_a_start_that_ended_at_once_is_used_again(tmp_path):
    assert leftovers.is_untouched(tmp_path)
    (tmp_path / "lock").touch()
    (tmp_path / "status.json.tmp-12345678").touch()
    assert leftovers.is_untouched(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not leftovers.is_untouched(tmp_path)


def test_every_reader_of_metrics_passes_over_damaged_lines(tmp_path):
    good = b'{"step": 1, "loss": 1.5, "grad_norm": null, "lr": 0.1, "rows_hash": "a"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(BAD_LINES) + b"x" * 3 * 2**20 + b"\n" + good)
    found = metrics_file.read(tmp_path / "metrics.jsonl")
    assert len(found.good) == 1 and b"".join(found.bad) == b"".join(BAD_LINES) + b"x" * 3 * 2**20 + b"\n"
    assert [line["step"] for line in run_comparison.read_steps(tmp_path)] == [1]
    run_report.write(tmp_path)
    assert "1.5" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("text", ["[]", "7", '"a"', "{", "[[1, 2]]", '[["outcome", ["done"]]]', "[" * 10**3])
def test_a_status_of_any_type_is_read(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    assert read_outcome(tmp_path / "status.json") == {}
    assert leftovers.read_recipe(tmp_path / "status.json") == {}


@pytest.mark.parametrize("text", ["run: !!bool x", "run: !!int ''", "run: !!timestamp x", "run: [", "\0"])
def test_a_recipe_that_is_no_yaml_is_passed_over(tmp_path, text):
    (tmp_path / "resolved.yaml").write_text(text)
    assert leftovers.read_recipe(tmp_path / "resolved.yaml") == {}
