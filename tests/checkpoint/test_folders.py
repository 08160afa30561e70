"""Test that a checkpoint is complete or absent after any failure, with and without atomic renames."""

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from gearbox import filesystem
from gearbox.checkpoint import folders, manifest
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.staging import Staging
from support import ledger
from support.checkpoints import check, flip, make, manifest_of, tensors


def make_in_place(parent: Path, step: int, run_id: str = "abc") -> Path:
    """Write a checkpoint as a run does without renames: two shards, then the manifest."""
    folder, given, staging, files = parent / f"step-{step}", tensors(), Staging(), {}
    folder.mkdir(parents=True, exist_ok=True)
    for rank, part in enumerate((given["w"][:1200], given["w"][1200:])):
        name = manifest.shard_name(rank, run_id)
        staging.stage([TensorShard("parameter", "w", rank * 1200, part)])
        files[name] = staging.write(folder / name)
    folders.commit(folder, folder, manifest_of(step, files))
    return folder


def test_a_kill_at_any_change_of_the_bucket(tmp_path, mounted):
    """Kill each process one change later than the previous one, until a process completes two saves."""
    newest, deaths = 0, 0
    with mounted(kills_in_turn=True) as runs:
        while True:
            child = os.fork()
            if child == 0:
                folders.delete_unfinished(runs)
                complete = ledger.whole_checkpoint(runs) or 0
                for step in (complete + 1, complete + 2):
                    make_in_place(runs, step, run_id=str(os.getpid()))
                    folders.prune(runs, keep=2, renames=False)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            found = folders.list_checkpoints(runs)
            for _, folder in found:
                check(folder)
            assert not newest or found[0][0] >= newest
            newest = found[0][0] if found else 0
            if os.waitstatus_to_exitcode(status) == 0:
                break
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            deaths += 1
        assert deaths > 20 and newest > 10, (deaths, newest)
        assert [step for step, _ in folders.list_checkpoints(runs)] == [newest, newest - 1]
        assert sorted(path.name for path in (tmp_path / "held").iterdir()) == [f"step-{newest - 1}", f"step-{newest}"]


def test_unfinished_checkpoints_are_not_listed_and_corrupt_ones_are(tmp_path):
    complete = make_in_place(tmp_path, 1)
    content = (complete / "manifest.json").read_bytes()
    for length in range(0, len(content), 7):
        (complete / "manifest.json").write_bytes(content[:length])
        assert folders.list_checkpoints(tmp_path) == []
    (complete / "manifest.json").write_bytes(content.replace(b"20.0", b"21.0"))
    assert [step for step, _ in folders.list_checkpoints(tmp_path)] == [1]
    (complete / "manifest.json").unlink()
    renamed = make(tmp_path, 2)
    (renamed / "manifest.json").unlink()
    assert [step for step, _ in folders.list_checkpoints(tmp_path)] == [2], "a renamed checkpoint was complete"
    assert folders.delete_unfinished(tmp_path) == [complete]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_another_run_replaces_a_corrupt_checkpoint_of_the_same_step(tmp_path):
    hurt = make_in_place(tmp_path, 1, "old")
    (hurt / manifest.shard_name(1, "old")).write_bytes(b"")
    check(make_in_place(tmp_path, 1, "new"))
    assert sorted(path.name for path in hurt.iterdir()) == [
        "manifest.json",
        *(manifest.shard_name(i, "new") for i in (0, 1)),
    ]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_pruning_on_an_overlay_that_cannot_rename_its_lower_layer(tmp_path):
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    make(lower, 1), make(lower, 2)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    if problem := subprocess.run(mount, capture_output=True, text=True, check=False).stderr:
        pytest.skip(problem)
    try:
        with pytest.raises(OSError, match="cross-device"):
            (merged / "step-1").rename(merged / "x")
        assert filesystem.rename_problem(merged) == "", "new folders can be renamed"
        make(merged, 3)
        folders.prune(merged, keep=2)
        assert sorted(path.name for path in merged.iterdir()) == ["step-2", "step-3"]
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, float("nan")), (6, None)):
        make(tmp_path, step, loss)
    flip(make(tmp_path, 7) / "shard-00000.safetensors", random.Random(0))
    (tmp_path / "step-0").mkdir()  # unfinished
    (tmp_path / "notes.txt").write_text("mine")
    folders.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-2", "step-6", "step-7"]


@pytest.mark.parametrize(("best_step", "kept"), [(1, 1), (99, 2), ([1], 2), (True, 2), (None, 2)])
def test_pruning_keeps_the_best_step_that_the_newest_checkpoint_names(tmp_path, best_step, kept):
    # Without such a checkpoint, the one with the lowest loss stays. Earlier checkpoints name another step.
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0)):
        make(tmp_path, step, loss, best_step=3)
    make(tmp_path, 5, 2.0, best_step)
    folders.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{kept}", "step-4", "step-5"]


def test_a_save_replaces_a_corrupt_checkpoint_of_the_same_step(tmp_path):
    flip(make(tmp_path) / "manifest.json", random.Random(0))
    check(make(tmp_path))


def test_cleanup_deletes_only_temporaries(tmp_path):
    make(tmp_path)
    (tmp_path / "step-40.tmp-dead").mkdir()
    (tmp_path / "step-20.tmp-removed").mkdir()
    (tmp_path / "written.tmp-123").touch()
    folders.delete_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-20"]


@pytest.mark.parametrize("call", range(1, 8))
def test_a_kill_at_any_call_leaves_a_complete_checkpoint(tmp_path, call):
    """Kill a process at each fsync and rename of a save and of the pruning after it."""
    make(tmp_path, 1), make(tmp_path, 2)
    child = os.fork()
    if child == 0:
        left = [call]
        for name in ("fsync", "rename"):
            usual = getattr(os, name)

            def or_die(*arguments, usual=usual):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), 9)
                return usual(*arguments)

            setattr(os, name, or_die)
        make(tmp_path, 3)
        folders.prune(tmp_path, keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -9, "the process makes fewer calls"
    names = sorted(path.name for path in tmp_path.iterdir() if ".tmp-" not in path.name)
    assert names in (["step-1", "step-2"], ["step-1", "step-2", "step-3"])
    for name in names:
        check(tmp_path / name)


def test_made_up_checkpoints_do_not_push_out_good_ones(tmp_path):
    good = [make(tmp_path, step) for step in (1, 2)]
    for step in (97, 98, 99):  # valid manifests without their shards
        folder = make(tmp_path, step, eval_loss=-1.0)
        (folder / "shard-00001.safetensors").unlink()
    for name in ("step-007", "step-7 ", "step-\u0667", "step-" + "9" * 240):
        shutil.copytree(good[0], tmp_path / name)
    before = {path.name for path in tmp_path.iterdir()}
    folders.prune(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert [step for step, _ in folders.list_checkpoints(tmp_path)] == [99, 98, 97, 2, 1]


def test_a_checkpoint_that_is_a_link_keeps_its_content(tmp_path):
    kept = make(tmp_path / "archive", 1)
    run = tmp_path / "run"
    make(run, 2), make(run, 3)
    (run / "step-1").symlink_to(kept)
    assert [step for step, _ in folders.list_checkpoints(run)] == [3, 2, 1]
    check(run / "step-1")
    folders.prune(run, keep=2)
    assert sorted(path.name for path in run.iterdir()) == ["step-2", "step-3"]
    check(kept)


@pytest.mark.parametrize("kind", ["file", "link to nothing", "folder as manifest"])
def test_something_else_with_the_name_of_a_checkpoint(tmp_path, kind):
    make(tmp_path, 1), make(tmp_path, 2)
    odd = tmp_path / "step-0"
    if kind == "file":
        odd.write_text("mine")
    elif kind == "link to nothing":
        odd.symlink_to("gone")
    else:
        (odd / "manifest.json").mkdir(parents=True)
    make(tmp_path, 3)
    folders.delete_unfinished(tmp_path)
    folders.prune(tmp_path, keep=2)
    assert [step for step, _ in folders.list_checkpoints(tmp_path)] == [3, 2]
    assert (kind == "folder as manifest") != os.path.lexists(odd)
    odd.rename(tmp_path / "step-4") if os.path.lexists(odd) else (tmp_path / "step-4/manifest.json").mkdir(parents=True)
    check(make(tmp_path, 4))
