"""Checkpoints where a folder cannot be renamed, on a mounted bucket: whole or not there, whatever dies or fails."""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import bucket
import ledger
import train as script
from gearbox import filesystem
from gearbox.checkpoint import checkpointer, folders, manifest
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.staging import Staging
from gearbox.launch.outcome import read_outcome, write_outcome
from test_checkpoint import FACTS, check, tensors
from test_checkpoint import make as make_by_rename
from test_faults import NUM_ROWS, STEPS, books  # noqa: F401  a fixture

CLONE_NEWNS, CLONE_NEWUTS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x4000000, 0x1000, 0x4000, 0x40000
needs_mount = pytest.mark.skipif(bool(bucket.missing()), reason=bucket.missing() or "it can be mounted")


@pytest.fixture
def mounted(tmp_path):
    """mounted(**behaviour) -> context of a bucket; what it holds lies in tmp_path / "held"."""
    return lambda **behaviour: bucket.mounted(
        tmp_path / "held", tmp_path / "runs", **{"refuses": bucket.LIKE_S3} | behaviour
    )


def make(parent: Path, step: int, run_id: str = "abc") -> Path:
    """As a run does it without a rename: two shards, then the manifest."""
    folder, given, staging, files = parent / f"step-{step}", tensors(), Staging(), {}
    folder.mkdir(parents=True, exist_ok=True)
    for rank, part in enumerate((given["w"][:1200], given["w"][1200:])):
        name = manifest.shard_name(rank, run_id)
        staging.stage([TensorShard("parameter", "w", rank * 1200, part)])
        files[name] = staging.write(folder / name)
    folders.commit(folder, folder, FACTS | {"step": step, "files": files})
    return folder


@needs_mount
def test_a_rename_is_taken_only_where_it_is_one(tmp_path, mounted):
    assert filesystem.rename_problem(tmp_path) == ""
    with mounted() as runs:
        assert filesystem.rename_problem(runs / "new") == "here a folder cannot be renamed: Function not implemented"
        assert filesystem.file_system(runs / "new" / "below") == "fuse.bucket"
    with mounted(refuses={}) as runs:
        (runs / "a b").mkdir()
        (runs / "a b").rename(runs / "c")  # it says that it does
        assert filesystem.rename_problem(runs) == "fuse.bucket may rename a folder file by file"
    with mounted(refuses={}, kind="") as runs:
        assert filesystem.rename_problem(runs) == "fuse may rename a folder file by file"
    assert sorted(path.name for path in (tmp_path / "held").iterdir()) == ["c", "new"], "no probe is left"
    assert list((tmp_path / "held" / "new").iterdir()) == []


@needs_mount
def test_killed_at_any_change_of_the_bucket(tmp_path, mounted):
    """Each process goes on where the one before was killed, one change later, until one comes through two saves."""
    newest, deaths = 0, 0
    with mounted(kills_in_turn=True) as runs:
        while True:
            child = os.fork()
            if child == 0:
                folders.delete_unfinished(runs)
                whole = ledger.whole_checkpoint(runs) or 0
                for step in (whole + 1, whole + 2):
                    make(runs, step, run_id=str(os.getpid()))
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


def test_what_was_never_finished_is_no_checkpoint_and_what_is_damaged_is_one(tmp_path):
    whole = make(tmp_path, 1)
    content = (whole / "manifest.json").read_bytes()
    for length in range(0, len(content), 7):
        (whole / "manifest.json").write_bytes(content[:length])
        assert folders.list_checkpoints(tmp_path) == []
    (whole / "manifest.json").write_bytes(content.replace(b"20.0", b"21.0"))
    assert [step for step, _ in folders.list_checkpoints(tmp_path)] == [1]
    (whole / "manifest.json").unlink()
    renamed = make_by_rename(tmp_path, 2)
    (renamed / "manifest.json").unlink()
    assert [step for step, _ in folders.list_checkpoints(tmp_path)] == [2], "what a rename has committed was whole"
    assert folders.delete_unfinished(tmp_path) == [whole]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_damaged_one_of_the_same_step_gives_way_to_one_of_another_run(tmp_path):
    hurt = make(tmp_path, 1, "old")
    (hurt / manifest.shard_name(1, "old")).write_bytes(b"")
    check(make(tmp_path, 1, "new"))
    assert sorted(path.name for path in hurt.iterdir()) == [
        "manifest.json",
        *(manifest.shard_name(i, "new") for i in (0, 1)),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_pruning_where_an_overlay_refuses_to_rename_what_lies_below(tmp_path):
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    make_by_rename(lower, 1), make_by_rename(lower, 2)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    if said := subprocess.run(mount, capture_output=True, text=True, check=False).stderr:
        pytest.skip(said)
    try:
        with pytest.raises(OSError, match="cross-device"):
            (merged / "step-1").rename(merged / "x")
        assert filesystem.rename_problem(merged) == "", "new ones can be"
        make_by_rename(merged, 3)
        folders.prune(merged, keep=2)
        assert sorted(path.name for path in merged.iterdir()) == ["step-2", "step-3"]
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)


@needs_mount
def test_a_shard_of_another_machine_is_waited_for(tmp_path, mounted):
    with mounted(lag=1.0) as runs:
        (tmp_path / "held" / "shard").write_bytes(b"x" * 10)  # as through another mount
        assert not (runs / "shard").exists()
        assert filesystem.wait_for_size(runs / "shard", 10, filesystem.SEEN_SECONDS)
        assert not filesystem.wait_for_size(runs / "shard", 11, 0), "half of it is none"


@needs_mount
def test_ranks_of_two_machines_with_a_mount_each(train, mounted, tmp_path, monkeypatch):
    """Rank 1 has a name and a mount of its own; what it writes is seen by rank 0 a second later."""
    usual = script.main

    def elsewhere(arguments, gear):
        if os.environ["RANK"] == "1":
            libc = ctypes.CDLL(None)
            assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0
            assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
            libc.sethostname(b"other", 5)
            assert libc.mount(bytes(tmp_path / "there"), bytes(tmp_path / "runs"), None, MS_BIND, None) == 0
        return usual(arguments, gear)

    monkeypatch.setattr(script, "main", elsewhere)
    with mounted(lag=1.0), bucket.mounted(tmp_path / "held", tmp_path / "there", refuses=bucket.LIKE_S3):
        outcome = train("ddp", *STEPS, "train.steps=2", ranks=2)
        assert outcome.codes == [0, 0], outcome.output
        (line,) = outcome.lines("saved")
        assert line["save_seconds"] > 0.9, "it had to wait"


@needs_mount
def test_what_is_out_of_reach_for_a_while_is_tried_again(tmp_path, mounted, monkeypatch):
    monkeypatch.setattr(filesystem, "RETRY_SECONDS", (0.01, 0.01))
    with mounted(
        fails=[["write", "a", errno.EIO, 2], ["create", "b", errno.ESTALE, 9], ["create", "c", 28, 1]]
    ) as runs:
        filesystem.retry_transient(lambda: (runs / "a").write_bytes(b"whole"))
        assert (runs / "a").read_bytes() == b"whole"
        with pytest.raises(OSError, match="Stale file handle"):
            filesystem.retry_transient(lambda: (runs / "b").write_bytes(b"whole"))
        with pytest.raises(OSError, match="No space left"):
            filesystem.retry_transient(lambda: (runs / "c").write_bytes(b"whole"))
        filesystem.retry_transient(lambda: (runs / "c").write_bytes(b"whole"))


@needs_mount
def test_status_is_written_in_place_where_it_cannot_be_replaced(mounted, capsys):
    with mounted() as runs:
        for outcome in ("running", "done"):
            write_outcome(outcome, "text", runs)
            assert read_outcome(runs / "status.json")["outcome"] == outcome
        assert [path.name for path in runs.iterdir()] == ["status.json"]
    assert capsys.readouterr().err == ""


@needs_mount
def test_a_lock_holds_between_processes_or_says_that_it_cannot(tmp_path, mounted):
    lock = filesystem.Lock(tmp_path / "lock", 0)
    assert not lock.is_taken and filesystem.Lock(tmp_path / "lock", 0.1).is_taken
    lock.release()
    assert not filesystem.Lock(tmp_path / "lock", 0).is_taken
    with mounted() as runs:
        assert filesystem.Lock(runs / "lock", 0).problem == "No locks available"
        assert filesystem.Lock(runs / "lock", 0).problem == "Operation not permitted", "to open it again"


# --------------------------------------------------------------------------- whole runs


@needs_mount
@pytest.mark.parametrize(
    ("gear", "deaths"),
    [
        # operation, path, and the newest whole checkpoint that must be there afterwards
        ("ddp", [("create", "step-2/shard-00001", None), ("write", "step-2/manifest", None)]),
        ("fsdp", [("write", "step-4/manifest", 2), ("unlink", "step-2/shard", 6)]),
    ],
)
def test_a_run_on_a_bucket_that_is_killed_while_it_saves(train, books, mounted, tmp_path, gear, deaths):  # noqa: F811
    """All of run.dir lies on it. Whatever step of a save a rank dies in, the run goes on as if it had not."""
    reference = books("reference")
    assert train(gear, *STEPS, f"run.dir={tmp_path / 'disk'}", ranks=2).codes == [0, 0]
    expected, kept = reference(), books("run")
    held = tmp_path / "held" / "x" / "checkpoints"
    for operation, path, newest in deaths:
        with mounted(kills=[[operation, path]]):
            outcome = train(gear, *STEPS, ranks=2)
        assert -9 in outcome.codes, outcome.output
        assert ledger.whole_checkpoint(held) == newest
        if newest is not None:
            check(held / f"step-{newest}")
    with mounted():
        last = train(gear, *STEPS, ranks=2)
        assert last.codes == [0, 0], last.output
        assert [folder.name for _, folder in folders.list_checkpoints(last.folder / "checkpoints")] == [
            "step-8",
            "step-6",
        ]
        assert "complete with their manifest: here a folder cannot be renamed" in last.output
        assert "cannot be locked (" in last.output and "see that no other run has this run.name" in last.output
        assert (last.folder / "model" / "model.safetensors").is_file() and (last.folder / "report.html").is_file()
        assert read_outcome(last.folder / "status.json")["outcome"] == "done"
        assert [line["step"] for line in last.lines("loss")][-2:] == [7, 8]
    assert ledger.problems(kept(), expected, 2, 8, NUM_ROWS) == []
    assert sorted(path.name for path in held.iterdir()) == ["step-6", "step-8"], "nothing half written is left"


@needs_mount
def test_shards_wait_on_a_local_disk_while_the_bucket_is_out_of_reach(train, mounted, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "RETRY_SECONDS", (0.1, 0.1))
    whole = train("ddp", *STEPS, "train.steps=4", f"run.dir={tmp_path / 'disk'}", ranks=2)
    stage = tmp_path / "stage"
    fails = [["write", "step-2/shard-00001", errno.EIO, 2], ["fsync", "step-2/manifest", errno.EIO, 1]]
    with mounted(fails=fails):
        outcome = train("ddp", *STEPS, "train.steps=4", f"save.stage={stage}", ranks=2)
        assert outcome.codes == [0, 0], outcome.output
        assert [line["saved"] for line in outcome.lines("saved")] == [2, 4]
        for step in (2, 4):
            ours, theirs = (run.folder / "checkpoints" / f"step-{step}" for run in (outcome, whole))
            digests = [[facts["xxh3_128"] for facts in check(folder)["files"].values()] for folder in (ours, theirs)]
            assert digests[0] == digests[1], "byte for byte what is written from memory"
    assert list(stage.iterdir()) == []


def test_a_local_disk_that_is_full_or_not_there(train, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "LAST_TRIES", 0)
    refused = train("ddp", *STEPS, "save.stage=/proc/nowhere", ranks=2)
    assert refused.codes == [2, 2] and "save.stage: /proc/nowhere cannot be written: No such file" in refused.output
    if os.geteuid():
        pytest.skip("needs root to mount a disk of its own")
    stage = tmp_path / "stage"
    stage.mkdir()
    left, usual = tmp_path / "left", checkpointer.Checkpointer._abort

    def give_up(self, problems):
        usual(self, problems)
        left.write_text(str(shutil.disk_usage(stage).used))

    monkeypatch.setattr(checkpointer.Checkpointer, "_abort", give_up)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(stage)], check=True)
    try:
        outcome = train("single", *STEPS, "train.steps=3", f"save.stage={stage}")
        assert outcome.codes == [0], outcome.output
        assert (
            f"checkpoint of step 2 not written: rank 0: {stage}: No space left on device: 1.1 MiB are" in outcome.output
        )
        assert left.read_text() == "0", "what could not be written is given back"
    finally:
        subprocess.run(["umount", "-l", str(stage)], check=True)


def test_a_local_disk_that_changes_what_it_was_given_is_noticed(tmp_path):
    staging = Staging(tmp_path)
    staging.stage([TensorShard("parameter", "w", 0, tensors()["w"])])
    staging.write(tmp_path / "shard")
    staging.disk.seek(-3, os.SEEK_END)
    staging.disk.write(b"?")
    with pytest.raises(manifest.CorruptCheckpoint, match=r"save\.stage: what was put on the local disk"):
        staging.write(tmp_path / "shard")
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]
