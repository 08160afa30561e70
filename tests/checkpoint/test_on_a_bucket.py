"""Test runs on a mounted bucket that cannot rename folders: kills, lost access, late visibility."""

import ctypes
import errno
import os

import pytest

import train as script
from gearbox import filesystem
from gearbox.checkpoint import folders
from gearbox.launch.outcome import read_outcome
from support import bucket, ledger
from support.checkpoints import check
from support.faults import NUM_ROWS, STEPS

CLONE_NEWNS, CLONE_NEWUTS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x4000000, 0x1000, 0x4000, 0x40000


def test_ranks_of_two_machines_with_separate_mounts(train, mounted, tmp_path, monkeypatch):
    """Rank 1 has its own host name and mount; rank 0 sees its files a second late."""
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
        assert line["save_seconds"] > 0.9, "rank 0 waits for the shard"


@pytest.mark.parametrize(
    ("gear", "deaths"),
    [
        # operation, path, and the newest complete checkpoint expected afterwards
        ("ddp", [("create", "step-2/shard-00001", None), ("write", "step-2/manifest", None)]),
        ("fsdp", [("write", "step-4/manifest", 2), ("unlink", "step-2/shard", 6)]),
    ],
)
def test_a_run_on_a_bucket_killed_during_a_save(train, books, mounted, tmp_path, gear, deaths):
    """All of run.dir is on the bucket. A kill at any step of a save does not change the results."""
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
        assert "committed by their manifest: folders cannot be renamed here" in last.output
        assert "cannot be locked (" in last.output and "make sure that no other run uses this run.name" in last.output
        assert (last.folder / "model" / "model.safetensors").is_file() and (last.folder / "report.html").is_file()
        assert read_outcome(last.folder / "status.json")["outcome"] == "done"
        assert [line["step"] for line in last.lines("loss")][-2:] == [7, 8]
    assert ledger.problems(kept(), expected, 2, 8, NUM_ROWS) == []
    assert sorted(path.name for path in held.iterdir()) == ["step-6", "step-8"], "no unfinished checkpoint is left"


def test_shards_are_staged_on_a_local_disk_while_the_bucket_is_unreachable(train, mounted, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "RETRY_SECONDS", (0.1, 0.1))
    expected = train("ddp", *STEPS, "train.steps=4", f"run.dir={tmp_path / 'disk'}", ranks=2)
    stage = tmp_path / "stage"
    fails = [["write", "step-2/shard-00001", errno.EIO, 2], ["fsync", "step-2/manifest", errno.EIO, 1]]
    with mounted(fails=fails):
        outcome = train("ddp", *STEPS, "train.steps=4", f"save.stage={stage}", ranks=2)
        assert outcome.codes == [0, 0], outcome.output
        assert [line["saved"] for line in outcome.lines("saved")] == [2, 4]
        for step in (2, 4):
            ours, theirs = (run.folder / "checkpoints" / f"step-{step}" for run in (outcome, expected))
            digests = [[facts["xxh3_128"] for facts in check(folder).files.values()] for folder in (ours, theirs)]
            assert digests[0] == digests[1], "both staging methods write the same bytes"
    assert list(stage.iterdir()) == []
