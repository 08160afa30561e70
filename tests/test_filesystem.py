"""Test that renames, waits, retries and locks detect what a disk or a mounted bucket can do."""

import errno
import os

import pytest

from gearbox import filesystem


def test_a_rename_is_used_only_where_it_is_atomic(tmp_path, mounted):
    assert filesystem.rename_problem(tmp_path) == ""
    with mounted() as runs:
        assert filesystem.rename_problem(runs / "new") == "folders cannot be renamed here: Function not implemented"
        assert filesystem.file_system(runs / "new" / "below") == "fuse.bucket"
    with mounted(refuses={}) as runs:
        (runs / "a b").mkdir()
        (runs / "a b").rename(runs / "c")  # the mount reports success
        assert filesystem.rename_problem(runs) == "fuse.bucket may rename a folder file by file"
    with mounted(refuses={}, kind="") as runs:
        assert filesystem.rename_problem(runs) == "fuse may rename a folder file by file"
    assert sorted(path.name for path in (tmp_path / "held").iterdir()) == ["c", "new"], "a probe is left"
    assert list((tmp_path / "held" / "new").iterdir()) == []


def test_waiting_for_a_shard_of_another_machine(tmp_path, mounted):
    with mounted(lag=1.0) as runs:
        (tmp_path / "held" / "shard").write_bytes(b"x" * 10)  # as if written through another mount
        assert not (runs / "shard").exists()
        assert filesystem.wait_for_size(runs / "shard", 10, filesystem.SEEN_SECONDS)
        assert not filesystem.wait_for_size(runs / "shard", 11, 0), "a partial file was accepted"


def test_transient_errors_are_retried(tmp_path, mounted, monkeypatch):
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


def test_a_lock_excludes_other_holders_or_reports_that_it_cannot(tmp_path, mounted):
    lock = filesystem.Lock(tmp_path / "lock", 0)
    assert not lock.is_taken and filesystem.Lock(tmp_path / "lock", 0.1).is_taken
    lock.release()
    assert not filesystem.Lock(tmp_path / "lock", 0).is_taken
    with mounted() as runs:
        assert filesystem.Lock(runs / "lock", 0).problem == "No locks available"
        assert filesystem.Lock(runs / "lock", 0).problem == "Operation not permitted", (
            "opening the lock file a second time"
        )


def test_a_pipe_in_a_folder_does_not_hang_its_sync(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    filesystem.sync_tree(tmp_path)
