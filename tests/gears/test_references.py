"""Test the reference of a run: computed once, kept as data, verified on resume, and continued after a stop."""

import os
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gearbox.training import comparing
from support.documents import make_pairs
from support.methods import METHODS

GIVEN = (
    "train.objective=dpo",
    "schedule.name=constant",
    "schedule.warmup=0",
    "optim.lr=5e-3",
    "save.every=2",
    "eval.fraction=0.1",
    "run.name=cut",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of this test in which references are kept."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gearbox"


@pytest.fixture
def pairs(tmp_path):
    return make_pairs(tmp_path / "pairs.jsonl", 40)


@pytest.fixture
def prefer(train, pairs):
    """Return a function that trains on pairs: prefer(gear, *changes, ranks) -> Outcome."""

    def call(gear: str, *changes: str, ranks: int | None = None, codes=(0,)):
        outcome = train(gear, f"data.path={pairs}", *GIVEN, *changes, ranks=ranks)
        assert {*outcome.codes} == {*codes}, outcome.output
        return outcome

    return call


def forget(cache) -> None:
    for kept in cache.glob("reference-*"):
        shutil.rmtree(kept)


def refuse_to_compute(monkeypatch) -> None:
    """Let no run train whose reference is not read from a file."""
    monkeypatch.setattr(comparing, "_complete", lambda _, parts, sums, *more: not np.isnan(sums["training"]).any())


@pytest.mark.parametrize(
    ("gear", "ranks", "changes"),
    [
        ("fsdp", 2, ("train.objective=kto",)),
        ("ddp", 3, METHODS["lora"]),
        ("ring", 2, ("preference.sft_weight=0.1",)),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(prefer, cache, monkeypatch, gear, ranks, changes):
    whole = prefer(gear, *changes, "train.steps=4", "run.name=whole", ranks=ranks)
    prefer(gear, *changes, "train.steps=2", ranks=ranks)
    forget(cache)
    with monkeypatch.context() as here:
        refuse_to_compute(here)
        last = prefer(gear, *changes, "train.steps=4", "run.resume=latest", ranks=ranks)
    assert last.losses == whole.losses
    figures = [
        [(line["margin"], line["kl"], line["grad_norm"]) for line in run.lines("margin")] for run in (last, whole)
    ]
    assert figures[0] == figures[1]
    assert [line["eval_loss"] for line in last.lines("eval_loss")][-1] == whole.lines("eval_loss")[-1]["eval_loss"]
    for name, tensor in last.weights.items():
        assert torch.equal(tensor, whole.weights[name]), name


def test_from_gear_to_gear_and_from_another_folder(prefer, cache, monkeypatch):
    """The reference is that of the first run, whatever the gear, the precision or the folder."""
    whole = prefer("single", "train.steps=5", "run.name=whole")
    cut = prefer("zero3", "train.steps=2", ranks=2)
    forget(cache)
    refuse_to_compute(monkeypatch)
    prefer("ring", "train.steps=4", "run.resume=latest", ranks=2)
    checkpoint = cut.folder / "checkpoints" / "step-4"
    last = prefer("pp", "train.steps=5", f"run.resume={checkpoint}", "run.name=elsewhere", ranks=2)
    assert last.losses == pytest.approx(whole.losses[4:], rel=1e-5)
    kept = [(run.folder / comparing.REFERENCE).read_bytes() for run in (cut, last)]
    assert kept[0] == kept[1]
    for name, tensor in last.weights.items():
        assert torch.allclose(tensor, whole.weights[name], rtol=0, atol=1e-5), name


def damage(path, pairs) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def of_other_rows(path, pairs) -> None:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        facts = file.metadata()
    save_file(load_file(path), path, facts | {"key": "another"})


@pytest.mark.parametrize("spoil", [lambda path, pairs: path.unlink(), damage, of_other_rows])
def test_a_lost_reference_is_refused(prefer, cache, pairs, spoil):
    cut = prefer("single", "train.steps=2")
    reference = cut.folder / comparing.REFERENCE
    usual = reference.read_bytes()
    spoil(reference, pairs)
    again = prefer("single", "train.steps=3", "run.resume=latest")  # the cache has it
    assert "step-2 at step 2" in again.output and reference.read_bytes() == usual
    spoil(reference, pairs)
    forget(cache)
    refused = prefer("ddp", "train.steps=4", "run.resume=latest", ranks=2, codes=(2,))
    assert f"{reference}: is missing, damaged or of other rows, and {cut.folder}" in refused.output
    assert "set run.resume=never" in refused.output
    anew = prefer("single", "train.steps=1", "run.resume=never")
    assert len(anew.losses) == 1


def stop_within_reference(monkeypatch, after: int) -> None:
    """Make each rank ask for a stop after so many calls of the reference's pass, and take few rows at once."""
    usual, calls = comparing.sums_of_answers, []

    def counted(engine, rows, row_ids, keep_going):
        calls.append(len(row_ids))
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return usual(engine, rows, row_ids, keep_going)

    monkeypatch.setattr(comparing, "sums_of_answers", counted)
    monkeypatch.setattr(comparing, "ROUNDS_AT_ONCE", 1)


@pytest.mark.parametrize(("gear", "ranks"), [("single", 1), ("zero2", 2)])
def test_a_stop_within_the_reference_keeps_what_is_done(prefer, cache, monkeypatch, gear, ranks):
    whole = prefer(gear, "train.steps=2", "run.name=whole", ranks=ranks)
    forget(cache)
    with monkeypatch.context() as here:
        stop_within_reference(here, 3)
        stopped = prefer(gear, "train.steps=2", ranks=ranks, codes=(85,))
    assert "run the same command" in stopped.output
    (kept,) = cache.glob("reference-*/*.safetensors")
    share = np.isfinite(load_file(kept)["training"]).mean()
    assert 0 < share < 1
    last = prefer(gear, "train.steps=2", ranks=ranks)
    assert last.losses == whole.losses
    assert (last.folder / comparing.REFERENCE).read_bytes() == (whole.folder / comparing.REFERENCE).read_bytes()
