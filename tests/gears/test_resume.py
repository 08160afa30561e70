"""Test that an interrupted and resumed run equals an uninterrupted one, bit for bit on the same ranks."""

import os
import shutil
import signal

import pytest
import torch

from gearbox.checkpoint.train_state import TrainState
from support.faults import count_steps, patch_step
from support.methods import METHODS

# A constant rate does not depend on the number of steps, so a short run is the beginning of a long one.
STEPS = ("schedule.name=constant", "optim.lr=1e-2", "save.every=2", "run.name=cut")
DROPOUT = ("adapter.method=lora", "adapter.dropout=0.2")


def checked(outcome):
    assert set(outcome.codes) <= {0, 85}, outcome.output
    return outcome


def interrupted(monkeypatch, step: int, number: int = signal.SIGTERM, rank: int = 0):
    """Make a rank send itself a signal within a step."""

    def signal_itself(taken):
        if TrainState.now == step and taken.rank == rank:
            os.kill(os.getpid(), number)

    count_steps(monkeypatch)
    patch_step(monkeypatch, signal_itself)


def assert_equal(outcome, reference):
    assert outcome.losses == reference.losses
    hashes = [[line["rows_hash"] for line in run.lines("rows_hash")] for run in (outcome, reference)]
    assert hashes[0] == hashes[1]
    for name, tensor in outcome.weights.items():
        assert torch.equal(tensor, reference.weights[name]), name


@pytest.mark.parametrize(
    ("gear", "ranks", "changes"),
    [
        ("single", 1, ()),
        ("ddp", 3, DROPOUT),
        ("fsdp", 3, DROPOUT),
        ("zero1", 2, ()),
        ("zero2", 3, ()),
        ("zero3", 3, DROPOUT),
        ("ring", 2, DROPOUT),
        ("fsdp", 2, METHODS["qdora"]),
        ("fsdp", 2, ("optim.name=adamw_8bit",)),
        ("tp", 2, ("optim.name=adamw_8bit",)),
        ("fsdp", 2, ("optim.name=muon",)),
        ("zero2", 2, ("adapter.method=dora", "optim.name=paged_adamw")),
    ],
)
def test_two_interruptions_change_nothing(train, monkeypatch, gear, ranks, changes):
    """Both interruptions are in one epoch; the second is in a step at which no checkpoint is due."""
    given = (*STEPS, *changes, "train.steps=7", "eval.every=3", "eval.fraction=0.1")
    whole = checked(train(gear, *given, "run.name=whole", ranks=ranks))
    with monkeypatch.context() as first:
        interrupted(first, 3)
        assert "stopped at step 3" in checked(train(gear, *given, ranks=ranks)).output
    with monkeypatch.context() as second:
        interrupted(second, 5, signal.SIGUSR1, rank=ranks - 1)
        assert "resuming from" in checked(train(gear, *given, ranks=ranks)).output
    last = checked(train(gear, *given, ranks=ranks))
    assert "step-5 at step 5 of 7" in last.output
    assert_equal(last, whole)
    looks = [[(line["step"], line["eval_loss"]) for line in run.lines("eval_loss")] for run in (last, whole)]
    assert looks[0] == looks[1]
    assert last.lines("loss")[-1]["tokens"] == whole.lines("loss")[-1]["tokens"]


def test_missing_state_is_noticed(train, monkeypatch):
    """The comparison above must fail if any of these is not restored."""
    from gearbox.distributed import engine
    from gearbox.sharding import sharded_state

    given = (*STEPS, *DROPOUT, "train.steps=4")
    whole = checked(train("single", *given, "run.name=whole"))
    checked(train("single", *given, "train.steps=2"))
    shutil.copytree(whole.folder.parent / "cut", kept := whole.folder.parent / "kept")
    breakages = [
        (engine.Engine, "seed_step", lambda *_: None),
        (sharded_state, "_make_state", lambda *_: None),
        (TrainState, "from_json", classmethod(lambda cls, saved: cls(step=1))),
    ]
    for owner, name, broken in breakages:
        shutil.rmtree(whole.folder.parent / "cut")
        shutil.copytree(kept, whole.folder.parent / "cut")
        with monkeypatch.context() as here:
            here.setattr(owner, name, broken)
            outcome = train("single", *given, "run.resume=latest")
        assert outcome.losses[-2:] != whole.losses[-2:], name


CHAINS = {
    "adamw": [
        ("single", 1), ("ddp", 2), ("fsdp", 3), ("tp", 2), ("zero3", 2), ("fsdp_tp", 4), ("pp", 2), ("zero2", 2),
        ("hsdp", 4), ("ulysses", 2), ("fsdp_offload", 2), ("tp", 2), ("zero3_offload", 2), ("ring", 2), ("zero1", 2),
    ],
    "muon": [("fsdp", 3), ("fsdp_tp", 4), ("pp", 2), ("tp", 2), ("ddp", 2)],
}  # fmt: skip


@pytest.mark.parametrize(("optimizer", "chain"), CHAINS.items())
def test_from_gear_to_gear(train, optimizer, chain):
    """Resume one run under every engine in turn, on 1 to 4 ranks, one step each, with the optimizer's state."""
    given = (*STEPS, f"optim.name={optimizer}")
    whole = checked(train("single", *given, "run.name=whole", f"train.steps={len(chain) + 1}"))
    for number, (gear, ranks) in enumerate(chain, start=1):
        last = checked(train(gear, *given, f"train.steps={number + 1}", "run.resume=latest" if number > 1 else
                             "run.resume=auto", ranks=ranks))  # fmt: skip
    assert len(last.losses) == len(whole.losses)
    assert last.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, tensor in last.weights.items():
        assert torch.allclose(tensor, whole.weights[name], rtol=0, atol=1e-4), name


@pytest.mark.parametrize("gear", ["ddp", "fsdp"])
def test_on_other_ranks_within_one_epoch(train, gear):
    """Resume on 2 -> 3 -> 1 -> 2 ranks."""
    whole = checked(train(gear, *STEPS, "run.name=whole", "train.steps=8", ranks=2))
    for number, ranks in enumerate((2, 3, 1, 2), start=1):
        here = gear if ranks > 1 else "single"
        resume = "latest" if number > 1 else "auto"
        last = checked(train(here, *STEPS, f"train.steps={2 * number}", f"run.resume={resume}", ranks=ranks))
    assert last.losses == pytest.approx(whole.losses, rel=1e-6)
    assert [line["rows_hash"] for line in last.lines("rows_hash")] == [
        line["rows_hash"] for line in whole.lines("rows_hash")
    ]


def test_bf16_masters_and_zero_in_bf16(train, monkeypatch):
    from gearbox.distributed import engine

    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)
    for gear, changes in (("fsdp", ("optim.master_weights=bf16",)), ("zero1", ()), ("zero3", ())):
        given = (*STEPS, *changes)
        whole = checked(train(gear, *given, f"run.name=whole-{gear}", "train.steps=4", ranks=2))
        checked(train(gear, *given, f"run.name={gear}", "train.steps=2", ranks=2))
        last = checked(train(gear, *given, f"run.name={gear}", "train.steps=4", "run.resume=latest", ranks=2))
        assert_equal(last, whole)


def test_under_zero_in_bf16_the_masters_are_saved(train, monkeypatch):
    """The saved weights are the fp32 masters, not the bf16 weights that the engine computes with."""
    from gearbox.distributed import engine

    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)
    weights = checked(train("zero3", "optim.lr=1e-5", ranks=2)).weights
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())


def test_the_best_checkpoint_is_kept_with_the_newest(train):
    given = (*STEPS, "optim.lr=3e-2", "train.steps=8", "save.every=1", "eval.every=1", "eval.fraction=0.1")
    outcome = checked(train("single", *given))
    looked_at = {line["step"]: line["eval_loss"] for line in outcome.lines("eval_loss") if line["step"]}
    best = min(looked_at, key=looked_at.get)
    there = {int(path.name.removeprefix("step-")) for path in (outcome.folder / "checkpoints").iterdir()}
    assert there == {7, 8, best}
    worse = checked(train("single", *given, "optim.lr=3", "run.name=worse"))
    looked_at = {line["step"]: line["eval_loss"] for line in worse.lines("eval_loss") if line["step"]}
    best = min(looked_at, key=looked_at.get)
    assert best < 7, "the best checkpoint must be an old one in this case"
    assert {int(path.name.removeprefix("step-")) for path in (worse.folder / "checkpoints").iterdir()} == {7, 8, best}
