"""Test what metrics.jsonl records, also when the disk is full."""

import errno
import os
import resource

import pytest

from gearbox import filesystem
from support.faults import STEPS


def test_a_full_disk_stops_no_metrics(train, tmp_path, monkeypatch, limit_of_file_size):
    """Lines that cannot be written wait until they can. No line is written in part."""
    usual, counted = filesystem.append, [0]

    def append(path, content):
        counted[0] += 1
        if 3 <= counted[0] <= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(path, content)

    monkeypatch.setattr(filesystem, "append", append)
    outcome = train("single", *STEPS, "save.every=0")
    assert outcome.codes == [0], outcome.output
    problem = "metrics.jsonl cannot be written: No space left on device; keeping its lines in memory"
    assert outcome.output.count(problem) == 1
    assert [line["step"] for line in outcome.lines("loss")] == list(range(1, 9))
    usual(tmp_path / "lines", b"one\n")
    limit_of_file_size(8)
    with pytest.raises(OSError, match="File too large"):
        usual(tmp_path / "lines", b"another line\n")
    limit_of_file_size(resource.RLIM_INFINITY)
    assert (tmp_path / "lines").read_text() == "one\n"


TRAINING_KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_supervised", "tokens_per_second", "rows_hash", "seconds",
    "memory_peak_bytes", "memory_predicted_bytes", "num_skipped",
}  # fmt: skip


def test_metrics_have_the_documented_keys(train):
    outcome = train("ddp", "train.steps=4", "eval.every=2", "eval.fraction=0.2", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    lines = outcome.lines("loss")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(set(line) == TRAINING_KEYS for line in lines)
    assert [line["step"] for line in outcome.lines("eval_loss")] == [0, 2, 4]
    assert lines[-1]["tokens"] > lines[-1]["tokens_supervised"] > 0
    assert len({line["rows_hash"] for line in lines}) == 4
    assert outcome.output.count("step 4/4") == 2, "one rank prints the last step and the last evaluation"
