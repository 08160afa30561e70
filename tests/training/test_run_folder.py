"""Test which folder a run takes, what it resumes from, and what it refuses."""

import json
import os
import random
import time
from pathlib import Path

import pytest

from gearbox.checkpoint import folders, manifest
from gearbox.checkpoint.folders import list_checkpoints
from gearbox.training import resume, run_folder
from support.checkpoints import flip
from support.faults import patch_step

STEPS = ("schedule.name=constant", "save.every=1", "train.steps=2")


def checked(outcome):
    assert set(outcome.codes) == {0}, outcome.output
    return outcome


def names(outcome) -> list[str]:
    return sorted(path.name for path in outcome.folder.parent.iterdir())


def unfinished(folder: Path) -> None:
    """Make the run look as if it had been killed before its end."""
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"outcome": "running"}))


def test_a_finished_run_gets_a_sibling(train):
    checked(train("single", *STEPS))
    assert names(checked(train("single", *STEPS))) == ["tiny-single", "tiny-single-2"]


def test_an_unfinished_run_is_resumed(train):
    first = checked(train("single", *STEPS, "run.name=x"))
    unfinished(first.folder)
    again = checked(train("single", *STEPS, "run.name=x", "train.steps=3"))
    assert names(again) == ["x"]
    assert [line["step"] for line in again.lines("loss")] == [1, 2, 3]
    assert again.lines("loss")[2]["seconds_without_a_step"] > 0
    assert again.lines("seconds_without_a_step") == again.lines("loss")[2:]


def test_latest_resumes_a_finished_run_and_never_starts_a_new_one(train):
    checked(train("single", *STEPS, "run.name=x"))
    more = checked(train("single", *STEPS, "run.name=x", "train.steps=4", "run.resume=latest"))
    assert names(more) == ["x"] and len(more.losses) == 4
    unfinished(more.folder)
    assert names(checked(train("single", *STEPS, "run.name=x", "run.resume=never"))) == ["x", "x-2"]
    refused = train("single", *STEPS, "run.name=other", "run.resume=latest")
    assert refused.codes == [2] and "contains no run 'other'" in refused.output


@pytest.mark.parametrize("when", ["before", "while this one waits for its lock"])
def test_latest_does_not_restart_a_finished_run(train, monkeypatch, when):
    done = checked(train("single", *STEPS, "save.every=0"))
    before = {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    if when != "before":
        unfinished(done.folder)
        usual = run_folder._lock

        def lock(folder):
            (folder / "status.json").write_bytes(before[folder / "status.json"])
            return usual(folder)

        monkeypatch.setattr(run_folder, "_lock", lock)
    refused = train("single", *STEPS, "save.every=0", "run.resume=latest")
    assert refused.codes == [2] and "is done and has no checkpoint to resume from" in refused.output
    assert {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()} == before


def test_a_run_from_a_checkpoint_is_another_run(train):
    first = checked(train("single", *STEPS, "run.name=x", "train.steps=3"))
    here = first.folder / "checkpoints" / "step-2"
    before = sorted(first.folder.rglob("*"))
    fork = checked(train("single", *STEPS, "run.name=y", "train.steps=4", f"run.resume={here}"))
    assert [line["step"] for line in fork.lines("loss")] == [3, 4]
    assert fork.losses[0] == first.losses[2]
    assert sorted(first.folder.rglob("*")) == before
    unfinished(fork.folder)
    again = checked(train("single", *STEPS, "run.name=y", "train.steps=5", f"run.resume={here}"))
    assert names(again) == ["x", "y"], "the same command resumes the run that it started"
    assert [line["step"] for line in again.lines("loss")] == [3, 4, 5]
    missing = train("single", *STEPS, "run.resume=runs/nowhere/step-1")
    assert missing.codes == [2]
    assert "is not a checkpoint folder; use one, or auto, latest, never" in missing.output


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("optim.lr=1e-3", "optim.lr changed from 0.002 to 0.001"),
        ("batch.rows=8", "batch.rows changed from 6 to 8"),
        ("train.seed=1", "train.seed changed from 0 to 1"),
        ("adapter.method=lora", "adapter.method changed from 'none' to 'lora'"),
        ("run.rehearse=false", "run.rehearse changed from True to False"),
    ],
)
def test_a_change_that_makes_another_run_is_refused_by_name(train, change, difference):
    first = checked(train("single", *STEPS, "run.name=x"))
    unfinished(first.folder)
    files = sorted(first.folder.rglob("*"))
    refused = train("single", *STEPS, "run.name=x", change)
    assert refused.codes == [2]
    assert difference in refused.output and "run.resume=never" in refused.output
    assert sorted(first.folder.rglob("*")) == files
    checked(train("single", *STEPS, "run.name=x"))


def test_permitted_changes_are_accepted(train):
    first = checked(train("single", *STEPS, "run.name=x"))
    unfinished(first.folder)
    changes = (
        "train.steps=4",
        "save.every=2",
        "save.keep=3",
        "eval.every=1",
        "run.hang_timeout=60",
        "batch.micro_rows=3",
    )
    assert len(checked(train("ddp", *STEPS, "run.name=x", *changes, "batch.micro_rows=3", ranks=2)).losses) == 4


def test_fewer_steps_than_done_are_refused(train):
    checked(train("single", *STEPS, "run.name=x", "train.steps=4"))
    refused = train("single", *STEPS, "run.name=x", "train.steps=3", "run.resume=latest")
    assert refused.codes == [2] and "train.steps: 3 is less than the 4 steps of" in refused.output


def test_other_sample_questions_than_before(train):
    checked(train("single", *STEPS, "run.name=x"))
    more = ("train.steps=4", "run.resume=latest", "eval.samples=1", "eval.sample_tokens=2")
    outcome = checked(train("single", *STEPS, "run.name=x", *more))
    assert "before: (not asked)" in outcome.output


def test_the_folders_of_a_series_of_runs(tmp_path):
    for name in ("r", "r-3", "r-10", "r-x", "rest", "r-2-3"):
        (tmp_path / name).mkdir()
    assert [path.name for path in resume.series(tmp_path, "r")] == ["r", "r-3", "r-10"]
    assert run_folder._create_folder(tmp_path, "r").name == "r-11"
    assert [run_folder._create_folder(tmp_path, "new").name for _ in range(3)] == ["new", "new-2", "new-3"]


@pytest.mark.parametrize("status", [None, "", '{"outcome": "saved"}'])
def test_a_run_with_checkpoints_is_resumed_without_a_valid_status_json(train, status):
    first = checked(train("single", *STEPS, "run.name=x"))
    (first.folder / "status.json").unlink()
    if status is not None:
        (first.folder / "status.json").write_text(status)
    again = checked(train("single", *STEPS, "run.name=x", "train.steps=3"))
    assert names(again) == ["x"] and len(again.losses) == 3


def test_other_data_under_the_same_path_is_detected(train, tmp_path, chats):
    path = tmp_path / "mine.jsonl"
    lines = chats.read_text().splitlines()
    path.write_text("\n".join(lines))
    given = (*STEPS, "run.name=x", f"data.path={path}")
    first = checked(train("single", *given))
    for changed, extra in ((lines[1:], ()), (lines, ("eval.fraction=0.3",))):
        unfinished(first.folder)
        path.write_text("\n".join(changed))
        refused = train("single", *given, *extra)
        assert refused.codes == [2] and "was trained on other rows" in refused.output
    checked(train("single", *given))


def test_other_base_weights_under_an_adapter_are_detected(train):
    given = (*STEPS, "run.name=x", "adapter.method=lora")
    first = checked(train("single", *given))
    unfinished(first.folder)
    weights = first.folder / "base" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    refused = train("single", *given)
    assert refused.codes == [2] and "was trained on other base weights: model.name or" in refused.output


def test_corrupt_checkpoints_are_named_and_skipped(train):
    first = checked(train("ddp", *STEPS, "run.name=x", "train.steps=4", "save.keep=3", ranks=2))
    unfinished(first.folder)
    folders = [path for _, path in list_checkpoints(first.folder / "checkpoints")]
    flip(folders[0] / "shard-00001.safetensors", random.Random(0))
    (folders[1] / "manifest.json").unlink()
    again = checked(train("ddp", *STEPS, "run.name=x", "train.steps=4", ranks=2))
    assert f"skipping {folders[0]}: shard-00001.safetensors: is corrupt: its digest does not match" in again.output
    assert f"skipping {folders[1]}: manifest.json: is missing" in again.output
    assert "step-2 at step 2 of 4" in again.output
    assert again.losses == first.losses
    assert [step for step, _ in list_checkpoints(first.folder / "checkpoints")] == [4, 3]
    for _, path in list_checkpoints(first.folder / "checkpoints"):
        manifest.verify_shards(path, manifest.read_manifest(path).files)


def test_made_up_manifests_are_passed_over(train):
    """Write manifests whose digest matches: the run names each in one line, and resumes from the good checkpoint."""
    first = checked(train("single", *STEPS, "run.name=x", "train.steps=10", "save.keep=10"))
    unfinished(first.folder)
    made_up = [
        lambda content: content | {"recipe": []},
        lambda content: content | {"recipe": content["recipe"] | {"model": 3}},
        lambda content: content | {"parameters": {"[/red]\x1b[2J": "[/]"}},
        lambda content: content | {"parameters": content["parameters"] | {"[/]": [2]}},
        lambda content: content | {"progress": content["progress"] | {"step": "3"}},
        lambda content: content | {"scalars": {name: {"exp_avg": 1.0} for name in content["scalars"]}},
        lambda content: content | {"gear": None},
        lambda content: {str(number): None for number in range(10**5)},
    ]
    newest = [path for _, path in list_checkpoints(first.folder / "checkpoints")]
    for path, change in zip(newest, made_up, strict=False):
        content = json.loads((path / "manifest.json").read_text())["manifest"]
        (path / "manifest.json").write_text(manifest.render_manifest(change(content)))
    (newest[8] / "manifest.json").unlink()
    os.mkfifo(newest[8] / "manifest.json")
    again = checked(train("single", *STEPS, "run.name=x", "train.steps=10"))
    said = [line for line in again.output.splitlines() if line.startswith("skipping ")]
    assert [line.split(": ")[0] for line in said] == [f"skipping {path}" for path in newest[:9]]
    assert r"manifest.json: is corrupt: parameters: [/red]\x1b[2J: should be a valid list" in said[2]
    assert "step-1 at step 1 of 10" in again.output and again.losses == first.losses


def test_names_with_markup_are_printed_as_they_are(train, tmp_path, chats):
    odd = tmp_path / "[red]a[/] :smile: \x1b[2J"
    odd.mkdir(parents=True)
    path = odd / "chats[b].jsonl"
    path.write_bytes(chats.read_bytes())
    given = (*STEPS, f"data.path={json.dumps(str(path))}", f"run.dir={json.dumps(str(odd / 'runs'))}", "run.name=x")
    first = checked(train("single", *given))
    unfinished(odd / "runs" / "x")
    shown = str(odd).replace("\x1b", r"\x1b")
    again = checked(train("single", *given, "train.steps=3"))
    assert f"resuming from {shown}/runs/x/checkpoints/step-2 at step 2 of 3" in again.output
    for outcome in (first, again):
        assert f"done: model saved to {shown}/runs/x/model" in outcome.output and "\x1b" not in outcome.output
        assert f"{shown}/chats[b].jsonl:1" in outcome.output
    unfinished(odd / "runs" / "x")
    refused = train("single", *given, "optim.lr=1")
    assert refused.codes == [2] and "was made by another recipe" in refused.output


def test_a_run_without_a_valid_checkpoint_does_not_start_from_scratch(train):
    first = checked(train("ddp", *STEPS, "run.name=x", ranks=2))
    unfinished(first.folder)
    for _, path in folders.list_checkpoints(first.folder / "checkpoints"):
        flip(path / "shard-00000.safetensors", random.Random(1))
    refused = train("ddp", *STEPS, "run.name=x", ranks=2)
    assert refused.codes == [2, 2]
    assert "no valid checkpoint (2 skipped, see above); run.resume=never starts a new run" in refused.output
    assert len(first.losses) == 2, "the first run is unchanged"
    assert names(checked(train("ddp", *STEPS, "run.name=x", "run.resume=never", ranks=2))) == ["x", "x-2"]


def test_two_runs_do_not_share_a_folder(train, tmp_path, monkeypatch):
    """The second run starts while the first is inside a step."""
    second = []
    go = tmp_path / "go"

    def meanwhile(children):
        while not (tmp_path / "runs" / "x" / "metrics.jsonl").exists():
            time.sleep(0.05)
        second.append(train("single", *STEPS, "run.name=x", "run.resume=latest"))
        go.touch()

    def wait(step):
        while not go.exists():
            time.sleep(0.05)

    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.2)
    patch_step(monkeypatch, wait)
    first = checked(train("single", *STEPS, "run.name=x", meanwhile=meanwhile))
    assert second[0].codes == [2]
    assert "is in use by process" in second[0].output and "choose another run.name" in second[0].output
    assert len(first.losses) == 2


def test_too_little_space_is_reported_before_training(train, monkeypatch):
    from gearbox.checkpoint import disk_space

    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 2 * 2**20)
    refused = train("ddp", *STEPS, ranks=2)
    assert refused.codes == [2, 2]
    assert "has 2.0 MiB free; 4 checkpoints of 1.1 MiB" in refused.output
    assert refused.folder is None, "no partial folder is left"
    checked(train("single", *STEPS, "save.every=0"))


def test_a_folder_that_cannot_be_written_is_reported_before_training(train, tmp_path):
    (tmp_path / "runs").write_text("a file")
    refused = train("single", *STEPS)
    assert refused.codes == [2] and "cannot be written" in refused.output


def test_leftovers_of_dead_runs_are_deleted(train):
    first = checked(train("single", *STEPS, "run.name=x"))
    unfinished(first.folder)
    dead = first.folder / "checkpoints" / "step-9.tmp-dead"
    dead.mkdir()
    (dead / "shard-00000.safetensors").write_bytes(b"half")
    with (first.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    again = checked(train("single", *STEPS, "run.name=x", "train.steps=3"))
    assert not dead.exists() and len(again.losses) == 3
