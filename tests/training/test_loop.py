"""Test the loop: its length, skipped steps, divergence, and the files that a failure leaves."""

import json
import math
import re

import pytest

from gearbox.checkpoint.train_state import StepResult, TrainState
from gearbox.rows.batches import StepBatch
from support.corpora import jsonl
from support.faults import STEPS, at_step, patch_step


def spoiled(number: int, monkeypatch, rank: int = 1, forever: bool = False):
    """Make the loss of a rank NaN in one step, or in every step."""

    def spoil(step):
        if (step.number == number or forever) and step.rank == rank:
            forward = step.model.forward
            step.model.forward = lambda *arguments, **inputs: forward(*arguments, **inputs) * float("nan")
            try:
                step.take()
            finally:
                step.model.forward = forward

    patch_step(monkeypatch, spoil)


@pytest.mark.parametrize(
    ("gear", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)]
)
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(train, monkeypatch, gear, ranks):
    with monkeypatch.context() as here:
        spoiled(3, here, rank=ranks - 1)
        outcome = train(gear, *STEPS, "train.steps=5", ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.output
    lines = outcome.lines("num_skipped")
    assert [line["num_skipped"] for line in lines] == [0, 0, 1, 1, 1]
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False]
    assert outcome.output.count("step 3/5  loss or gradients not finite: step skipped on all ranks") == 1
    # Step 3 consumes its rows but does not change the weights, as in a run that leaves it out.
    patch_step(monkeypatch, at_step(3, lambda step: step.leave_out()))
    without = train(gear, *STEPS, "train.steps=5", "run.name=without", ranks=ranks)
    assert outcome.losses[3:] == without.losses[3:]


def test_too_many_bad_steps_in_a_row_end_the_run_and_name_the_rows(train, monkeypatch):
    spoiled(0, monkeypatch, forever=True)
    outcome = train("ddp", *STEPS, "run.max_bad_steps=2", ranks=2)
    assert outcome.codes == [2, 2], outcome.output
    assert "step 2: loss nan" in outcome.output and "check rows [" in outcome.output
    assert "chats.jsonl:" in outcome.output
    assert json.loads((outcome.folder / "status.json").read_text())["outcome"] == "failed"
    assert [line["num_skipped"] for line in outcome.lines("num_skipped")] == [1, 2]


def test_spikes_are_marked():
    progress, batch = TrainState(), StepBatch(micro_batches=[], num_targets=1, num_tokens=1, row_ids=[0])
    marks = []
    for step in range(60):
        loss = 9.0 if step in (5, 40) else 3.0 - 0.01 * step + 0.1 * (step % 3)
        marks += [step] if progress.advance(batch, StepResult(loss, grad_norm=1.0)) else []
    assert marks == [40], "a spike needs a minimum number of earlier losses"


# They divide rows, or the tokens of a row, in their own ways. fsdp and zero3 divide them as ddp does.
EPOCH_GEARS = [("single", 1), ("ddp", 3), ("ulysses", 2), ("pp", 2)]
EPOCHS = ("train.steps=null", "train.epochs=1", "batch.rows=41", "batch.micro_rows=8", "eval.fraction=0")


def planned(outcome, label: str) -> int:
    """Return the first number of a line of the plan."""
    return int(re.search(rf"^{label} +([0-9][0-9,]*)", outcome.output, re.MULTILINE)[1].replace(",", ""))


@pytest.fixture(scope="module")
def one_epoch():
    return {}


@pytest.mark.parametrize(
    ("gear", "ranks", "packing"),
    [
        *((gear, ranks, "true") for gear, ranks in [*EPOCH_GEARS, ("fsdp", 2), ("zero3", 3)]),
        *((gear, ranks, "false") for gear, ranks in EPOCH_GEARS),
    ],
)
def test_an_epoch_trains_each_row_once_in_a_short_last_step(train, one_epoch, gear, ranks, packing):
    outcome = train(gear, *EPOCHS, f"data.packing={packing}", ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.output
    num_rows = planned(outcome, "packed rows" if packing == "true" else "rows")
    assert num_rows % 41 and len(outcome.losses) == math.ceil(num_rows / 41) > 2
    assert f"last step               {num_rows % 41} rows instead of 41" in outcome.output
    assert outcome.lines("tokens")[-1]["tokens"] == planned(outcome, "tokens")
    reference = one_epoch.setdefault(packing, outcome.losses)
    assert outcome.losses == pytest.approx(reference, rel=1e-5)


def test_a_run_resumes_before_its_short_step_and_can_be_extended_after_it(train):
    whole = train("ddp", *EPOCHS, "save.every=1", "run.name=whole", ranks=2)
    steps = len(whole.losses)
    before = whole.folder / f"checkpoints/step-{steps - 1}"
    resumed = train("zero3", *EPOCHS, f"run.resume={before}", ranks=3)
    assert resumed.losses == pytest.approx(whole.losses[-1:], rel=1e-5), resumed.output
    extended = train("fsdp", *EPOCHS, "train.epochs=2", "run.resume=latest", "run.name=whole", ranks=2)
    assert set(extended.codes) == {0} and len(extended.losses) > steps, extended.output
    missing = steps * 41 - planned(whole, "packed rows")
    assert f"the {missing} rows that it lacked are left out" in " ".join(extended.output.split())


def test_a_run_that_fails_after_its_first_step_keeps_its_numbers(train):
    outcome = train("single", "optim.lr=1e30", "optim.max_grad_norm=0", "train.steps=9")
    assert outcome.codes == [2]
    assert "not finite for 3 steps in a row (run.max_bad_steps); lower optim.lr" in outcome.output
    assert [line["grad_norm"] for line in outcome.lines("grad_norm")][-3:] == [None] * 3
    assert not (outcome.folder / "model").exists()
    assert outcome.losses


def test_plain_text_and_weighted_sources_train_identically_on_any_ranks(train, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": f"plain text {i} " * (1 + i % 40)} for i in range(60)])
    path = f"[{{path: {tmp_path}/a.jsonl, weight: 2}}, {{path: builtin:tasks, weight: 1}}]"
    runs = [
        train("single" if ranks == 1 else "ddp", f"data.path={path}", f"batch.micro_rows={micro}", ranks=ranks)
        for ranks, micro in ((1, 6), (2, 1), (3, 2))
    ]
    assert all(set(run.codes) == {0} for run in runs), runs[0].output
    assert len({tuple(line["rows_hash"] for line in run.lines("rows_hash")) for run in runs}) == 1
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)
