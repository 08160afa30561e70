"""Test signals in every phase of a run, and ranks that hang: all ranks end together and report the reason."""

import itertools
import json
import os
import signal
import time

import pytest

from gearbox.checkpoint.staging import Staging
from gearbox.launch import watchdog
from gearbox.rows import arranged, batches
from gearbox.training import evaluation
from support import ledger
from support.faults import NUM_ROWS, STEPS, at_step, patch_step


def stopping(number: int, rank: int):
    def act(*_):
        if os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), number)

    return act


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("the first step", signal.SIGTERM),
        ("evaluating", signal.SIGUSR1),
        ("saving", signal.SIGTERM),
        ("rows", signal.SIGTERM),
        ("the last step", signal.SIGUSR1),
    ],
)
def test_a_signal_in_every_phase(train, books, monkeypatch, phase, number):
    """A signal to only one rank makes all ranks save and exit, and the same command resumes."""
    reference = books("reference")
    given = (*STEPS, "eval.every=2", "eval.fraction=0.2", "save.every=3")
    whole = train("ddp", *given, "run.name=whole", ranks=2)
    expected, kept = reference(), books("run")
    act = stopping(number, rank=1)

    def before(usual):
        def call(*arguments, **rest):
            act()
            return usual(*arguments, **rest)

        return call

    with monkeypatch.context() as here:
        if phase.endswith("step"):
            patch_step(here, at_step(1 if "first" in phase else 8, act))
        elif phase == "evaluating":
            here.setattr(evaluation, "make_step_batch", before(evaluation.make_step_batch))
        elif phase == "saving":
            here.setattr(Staging, "write", before(Staging.write))
        else:
            here.setattr(batches, "make_step_batch", before(batches.make_step_batch))
        outcome = train("ddp", *given, ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    status = json.loads((outcome.folder / "status.json").read_text())
    assert status["outcome"] == "saved" and "run the same command to resume from step" in status["text"]
    assert status["saved_step"] == status["step"]
    last = train("ddp", *given, ranks=2)
    assert last.codes == [0, 0], last.output
    assert last.losses == whole.losses
    assert ledger.problems(kept(), expected, 2, 8, NUM_ROWS) == []
    looks = [[(line["step"], line["eval_loss"]) for line in run.lines("eval_loss")] for run in (last, whole)]
    assert looks[0] == looks[1], "an interrupted evaluation was not completed"


def test_a_signal_before_the_first_step_ends_at_once(train, monkeypatch):
    def term(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    monkeypatch.setattr(arranged, "split_and_pack", term)
    started = time.monotonic()
    outcome = train("single", *STEPS)
    assert outcome.codes == [85] and time.monotonic() - started < 25
    assert "gearbox: SIGTERM: nothing to save" in outcome.output


def test_a_signal_after_the_last_step_keeps_the_saved_state(train, monkeypatch):
    def term(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    from gearbox.model import export

    with monkeypatch.context() as here:
        here.setattr(export, "save", term)
        outcome = train("single", *STEPS)
    assert outcome.codes == [85]
    last = train("single", *STEPS)
    assert last.codes == [0] and "resuming from" in last.output and len(last.losses) == 8
    assert (last.folder / "model").is_dir()


def test_sigint_twice_ends_at_once(train, monkeypatch):
    """The watchdog's thread ends the rank even while the main thread is blocked."""

    def twice(*_):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        time.sleep(30)

    patch_step(monkeypatch, at_step(3, twice))
    assert train("single", *STEPS).codes == [130]


HANG = "run.hang_timeout=3"


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def stacks(outcome) -> dict[int, str]:
    return {int(path.name.split(".")[0][5:]): path.read_text() for path in (outcome.folder / "hang").iterdir()}


def test_a_rank_that_is_stopped(train, monkeypatch):
    """A rank stopped by SIGSTOP is named, and its stack is saved too."""
    patch_step(monkeypatch, at_step(4, stop, rank=1))
    outcome = train("ddp", *STEPS, HANG, ranks=2)
    assert outcome.codes == [1, 1], outcome.output
    assert "gearbox: no step for 3 s: rank 1 is stopped; stacks saved to" in outcome.output
    found = stacks(outcome)
    assert set(found) == {0, 1}
    assert all("thread MainThread" in text and "in fit" in text for text in found.values())


def test_a_rank_that_is_late(train, monkeypatch):
    usual, calls = batches.make_step_batch, itertools.count(1)

    def sleeping(rows, row_ids, rank, *rest):
        if next(calls) == 3 and rank == 1:
            time.sleep(60)
        return usual(rows, row_ids, rank, *rest)

    monkeypatch.setattr(batches, "make_step_batch", sleeping)
    outcome = train("ddp", *STEPS, HANG, ranks=2)
    assert outcome.codes == [1, 1], outcome.output
    assert "rank 1 is late: in step 3, rows, while the others are in step 3, micro-batch" in outcome.output
    assert "in sleeping" in stacks(outcome)[1]


def test_a_collective_that_only_one_rank_calls(train, monkeypatch):
    from gearbox.distributed import process_group

    patch_step(monkeypatch, at_step(4, lambda _: process_group.ProcessGroup().sum([1] * 7), rank=1))
    outcome = train("ddp", *STEPS, HANG, ranks=2)
    assert set(outcome.codes) == {1}, outcome.output
    assert "Traceback" in outcome.output or "stacks saved to" in outcome.output


def test_without_the_watchdog_a_hang_would_last(train, monkeypatch):
    monkeypatch.setattr(watchdog.Watchdog, "_hang", lambda self: None)
    patch_step(monkeypatch, at_step(4, stop, rank=1))
    ended = []

    def meanwhile(children):
        time.sleep(12)
        ended.extend(child for child in children if os.waitpid(child, os.WNOHANG)[0])
        for child in children:
            os.kill(child, signal.SIGKILL)

    train("ddp", *STEPS, HANG, ranks=2, meanwhile=meanwhile)
    assert ended == []
