"""Test saves that run during training, and saves that fail."""

import errno
import os
import resource
import shutil
import subprocess
import threading
import time

import pytest

from gearbox import processes
from gearbox.checkpoint import checkpointer, folders
from gearbox.checkpoint.staging import HostReader, Staging
from gearbox.checkpoint.train_state import TrainState
from support import ledger
from support.faults import STEPS, at_step, count_steps, patch_step


def test_a_full_disk_during_a_save(train, monkeypatch, limit_of_file_size):
    """When one rank's shard does not fit, all ranks abandon the save, keep training, and retry."""
    usual, counted = Staging.write, [0]

    def write(self, path):
        counted[0] += 1
        if counted[0] == 2 and "00001" in path.name:
            limit_of_file_size(200_000)
            try:
                return usual(self, path)
            finally:
                limit_of_file_size(resource.RLIM_INFINITY)
        return usual(self, path)

    monkeypatch.setattr(Staging, "write", write)
    outcome = train("ddp", *STEPS, "save.every=3", "train.steps=10", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert "checkpoint of step 6 not written" in outcome.output
    (line,) = outcome.lines("save_error")
    assert "File too large" in line["save_error"] and "needs " in line["save_error"] and " free" in line["save_error"]
    assert str(outcome.folder) in line["save_error"] and line["last_saved"] == 3
    assert [line["saved"] for line in outcome.lines("saved")] == [3, 9, 10]
    assert ledger.leftovers(outcome.folder) == []


def test_a_full_disk_at_the_last_step_is_retried(train, monkeypatch):
    usual, counted = Staging.write, [0]

    def write(self, path):
        counted[0] += 1
        if counted[0] in (1, 2):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return usual(self, path)

    monkeypatch.setattr(Staging, "write", write)
    monkeypatch.setattr(checkpointer, "LAST_TRY_SECONDS", 1)
    outcome = train("ddp", *STEPS, "save.every=100", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert [line["saved"] for line in outcome.lines("saved")] == [8]
    assert outcome.output.count("checkpoint of step 8 not written") == 2


def test_every_failure_of_a_save_is_retried(train, monkeypatch):
    """Let one rank fail at each moment of a save. All ranks agree on it, and no failure ends the run."""

    def failing(owner, name, rank, step, error):
        usual = getattr(owner, name)

        def call(*given):
            if TrainState.now - 1 == step and int(os.environ["RANK"]) == rank:
                raise error
            return usual(*given)

        monkeypatch.setattr(owner, name, call)

    class Thread(threading.Thread):
        def start(self):
            if self.name == "save" and TrainState.now - 1 == 14 and os.environ["RANK"] == "1":
                raise RuntimeError("can't start new thread")
            super().start()

    count_steps(monkeypatch)
    failing(HostReader, "prepare", 1, 4, RuntimeError("CUDA error: out of memory"))  # pinned memory
    failing(HostReader, "parts", 0, 6, RuntimeError("CUDA error: an illegal memory access"))
    failing(Staging, "write", 1, 8, MemoryError("of the digest"))
    failing(folders, "commit", 0, 10, MemoryError("of the manifest"))
    monkeypatch.setattr(threading, "Thread", Thread)
    outcome = train("ddp", *STEPS, "train.steps=17", "save.every=2", "save.keep=9", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    failed = {line["save_failed"]: line["save_error"] for line in outcome.lines("save_failed")}
    assert failed.keys() == {4, 6, 8, 10, 14}
    assert failed[4] == "rank 1: RuntimeError: CUDA error: out of memory"
    assert failed[6] == "rank 0: RuntimeError: CUDA error: an illegal memory access"
    assert failed[8].startswith("rank 1: host memory: has ")
    assert failed[14] == "rank 1: RuntimeError: can't start new thread"
    assert outcome.output.count("not written") == 5 and outcome.output.count("from now on training waits") == 2
    assert [line["saved"] for line in outcome.lines("saved")] == [2, 12, 16, 17]
    assert ledger.whole_checkpoint(outcome.folder / "checkpoints") == 17 and ledger.leftovers(outcome.folder) == []


def test_memory_that_is_short_during_the_run(train, monkeypatch):
    """The first save finds less memory than the plan did. Later ones are written without a copy."""
    usual = processes.free_memory

    def shrinking():
        return 2**10 if hasattr(TrainState, "now") and TrainState.now > 1 and os.environ["RANK"] == "1" else usual()

    count_steps(monkeypatch)
    monkeypatch.setattr(processes, "free_memory", shrinking)
    outcome = train("fsdp", *STEPS, ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert "in the foreground" not in outcome.output
    (failure,) = outcome.lines("save_failed")
    assert "rank 1: host memory: has 0.0 MiB free, but a copy of the checkpoint needs 0.6 MiB" in failure["save_error"]
    assert [line["saved"] for line in outcome.lines("saved")] == [4, 6, 8]
    assert ledger.whole_checkpoint(outcome.folder / "checkpoints") == 8


def test_a_save_slower_than_the_hang_timeout_is_not_a_hang(train, monkeypatch):
    usual = Staging.write

    def slow(self, path):
        time.sleep(6)
        return usual(self, path)

    monkeypatch.setattr(Staging, "write", slow)
    outcome = train("ddp", *STEPS, "save.every=100", "run.hang_timeout=3", ranks=2)
    assert outcome.codes == [0, 0], outcome.output


def test_training_continues_during_a_save_and_saves_never_overlap(train, tmp_path, monkeypatch):
    usual = Staging.write
    marks = tmp_path / "marks"

    def slow(self, path):
        with marks.open("a") as file:
            file.write(f"begin {TrainState.now - 1}\n")
            file.flush()
            begun = TrainState.now
            while TrainState.now < begun + 2 and begun < 7:  # until training has advanced by two steps
                time.sleep(0.01)
            facts = usual(self, path)
            file.write("end\n")
        return facts

    count_steps(monkeypatch)
    monkeypatch.setattr(Staging, "write", slow)
    outcome = train("single", *STEPS, "save.every=3")
    assert outcome.codes == [0], outcome.output
    assert [line["saved"] for line in outcome.lines("saved")] == [3, 6, 8]
    assert marks.read_text().split() == ["begin", "3", "end", "begin", "6", "end", "begin", "8", "end"]


def test_a_save_succeeds_when_pruning_fails(train, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOTEMPTY, "not empty")

    monkeypatch.setattr(folders, "prune", fail)
    outcome = train("single", *STEPS)
    assert outcome.codes == [0] and [line["saved"] for line in outcome.lines("saved")] == [2, 4, 6, 8]


def test_a_shard_on_another_machine_is_detected(train, monkeypatch):
    usual = Staging.write

    def elsewhere(self, path):
        facts = usual(self, path)
        if "00001" in path.name:
            path.unlink()
        return facts

    monkeypatch.setattr(Staging, "write", elsewhere)
    monkeypatch.setattr(checkpointer, "LAST_TRIES", 0)
    outcome = train("ddp", *STEPS, ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert outcome.lines("saved") == []
    assert "do all machines share run.dir?" in outcome.output


def test_a_run_folder_removed_during_the_run(train, tmp_path, monkeypatch):
    """The run recreates its folder and writes all later files there."""

    patch_step(monkeypatch, at_step(5, lambda _: shutil.rmtree(tmp_path / "runs" / "x")))
    outcome = train("single", *STEPS)
    assert outcome.codes == [0], outcome.output
    assert [line["step"] for line in outcome.lines("loss")] == [5, 6, 7, 8]
    assert ledger.whole_checkpoint(outcome.folder / "checkpoints") == 8
    assert (outcome.folder / "model").is_dir()


@pytest.mark.root
def test_a_staging_disk_that_is_full_or_missing(train, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "LAST_TRIES", 0)
    refused = train("ddp", *STEPS, "save.stage=/proc/nowhere", ranks=2)
    assert refused.codes == [2, 2] and "save.stage: /proc/nowhere cannot be written: No such file" in refused.output
    if os.geteuid():
        pytest.skip("needs root to mount a separate disk")
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
            f"checkpoint of step 2 not written: rank 0: {stage}: No space left on device: needs 1.1 MiB"
            in outcome.output
        )
        assert left.read_text() == "0", "the space of the failed save must be freed"
    finally:
        subprocess.run(["umount", "-l", str(stage)], check=True)
