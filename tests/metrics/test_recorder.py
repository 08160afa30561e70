"""Test what metrics.jsonl records, also when the disk is full."""

import errno
import io
import itertools
import json
import math
import os
import resource
from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gearbox import filesystem
from gearbox.checkpoint.train_state import StepResult, TrainState
from gearbox.console import Screen
from gearbox.metrics.clock import StepClock
from gearbox.metrics.progress import Progress
from gearbox.metrics.recorder import Devices, Metrics
from gearbox.metrics.tracker_start import Description
from gearbox.metrics.trackers import Trackers
from gearbox.rows.batches import StepBatch
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
    "memory_peak_bytes", "memory_predicted_bytes", "num_skipped", "memory_bytes", "tokens_per_second_per_device",
    "seconds_data", "seconds_forward", "seconds_backward", "seconds_communication", "seconds_optimizer", "seconds_save",
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
    seconds = [name for name in TRAINING_KEYS if name.startswith("seconds_")]
    for before, line in itertools.pairwise(lines):
        parts = sum(line[name] for name in seconds)
        assert 0 < parts <= line["seconds"] - before["seconds"] + 2e-3, "no time counts twice"
        assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 2, abs=0.1)
        assert line["memory_peak_bytes"] >= line["memory_bytes"] > 0


@pytest.mark.parametrize(
    ("gear", "ranks", "absent"),
    [("single", 1, {"seconds_communication"}), ("zero3", 2, {"seconds_optimizer"}), ("pp", 2, set())],
)
def test_parts_that_a_gear_mixes_are_left_out(train, gear, ranks, absent):
    outcome = train(gear, "train.steps=3", "save.every=1", ranks=ranks)
    assert outcome.codes == [0] * ranks, outcome.output
    lines = outcome.lines("loss")
    assert all({name for name in TRAINING_KEYS if name.startswith("seconds_")} - set(line) == absent for line in lines)
    assert all(line["seconds_forward"] > 0 and line["seconds_backward"] > 0 for line in lines)
    assert any(line["seconds_save"] > 0 for line in lines[1:]), "training waits for the copy of the checkpoint"
    assert outcome.output.count("saved step ") == 3


def test_utilization_counts_all_devices_and_is_absent_without_a_known_peak():
    known = Devices(count=4, flops_per_token=1e9, peak_flops=1e12)
    assert known.mfu(2000.0) == 0.5
    assert replace(known, peak_flops=None).mfu(2000.0) is None
    assert replace(known, flops_per_token=None).mfu(2000.0) is None


FIGURES = {"margin": 0.934, "accuracy": 0.8125, "reward_chosen": 0.25, "reward_rejected": -0.684, "kl": 0.01}


def test_figures_of_compared_answers_reach_the_lines_the_screen_and_tensorboard(tmp_path):
    """A loss over pairs has no perplexity. A figure that is not finite is null, and not printed."""
    PartialState(cpu=True)
    screen = Screen(file=io.StringIO(), width=200)
    progress = Progress(screen, TrainState(), 3, 1)
    batch, result = StepBatch([], 8, 16, [0]), StepResult(0.5, 1.0, figures=FIGURES)
    with Metrics(tmp_path, progress, StepClock(torch.device("cpu"))) as metrics:
        metrics.trackers = Trackers(["tensorboard"], Description(tmp_path), print)
        metrics.trackers.open(0)
        metrics.state.step = 1
        metrics.step(batch, result, 1e-3, is_spike=False)
        metrics.evaluation(0.5123, figures=FIGURES)
        metrics.state.step = 2
        metrics.step(batch, replace(result, figures=FIGURES | {"margin": math.nan}), 1e-3, is_spike=False)
        metrics.evaluation(0.25, exact_match=0.5)
    PartialState._reset_state()
    first, held_out, second, usual = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert first.items() >= FIGURES.items() and second["margin"] is None
    of_pairs = {f"eval_{name}": number for name, number in FIGURES.items()}
    assert held_out == {"step": 1, "eval_loss": 0.5123, **of_pairs}
    assert usual.keys() == {"step", "eval_loss", "eval_perplexity", "eval_exact_match"}
    lines = screen.file.getvalue().splitlines()
    assert "  accuracy 81%  margin 0.934  " in lines[0] and "accuracy 81%" in lines[2] and "margin" not in lines[2]
    assert lines[1].endswith("step 1/3  held-out loss 0.5123  accuracy 81.2%  margin 0.934")
    assert lines[3].endswith("held-out loss 0.2500  perplexity 1.284  exact match 50.0%")
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0}).Reload()
    for name, number in (FIGURES | of_pairs).items():
        assert (events.Scalars(name)[0].step, events.Scalars(name)[0].value) == (1, pytest.approx(number)), name
