"""Test that every gear compares answers alike: same reference, loss and figures at every step, same final weights."""

import dataclasses
import shutil

import pytest
import torch

from gearbox.data import corpus
from gearbox.distributed import sequence_parallel
from gearbox.model import loss
from gearbox.rows import batches
from support.corpora import arranged
from support.documents import make_pairs
from support.methods import METHODS

STEPS = 5
PAIRS = (
    "optim.lr=5e-3",
    "optim.eps=1e-4",
    "optim.max_grad_norm=0.5",
    "schedule.name=constant",
    f"train.steps={STEPS}",
    "eval.fraction=0.1",
    "preference.beta=1",
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture
def compare(train, pairs, tmp_path, monkeypatch):
    """Return a function that trains on pairs and returns what it measured. Each run computes its own reference."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def call(gear: str, *changes: str, ranks: int | None = None, codes=(0,)):
        for kept in (corpus.cache() / "gearbox").glob("reference-*"):
            shutil.rmtree(kept)
        outcome = train(gear, f"data.path={pairs}", "train.objective=dpo", *PAIRS, *changes, ranks=ranks)
        assert {*outcome.codes} == {*codes}, outcome.output
        return outcome

    return call


def numbers(outcome) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "margin", "accuracy", "reward_chosen", "reward_rejected", "kl")
    shown = {*names, "rows_hash"} | {f"eval_{name}" for name in names}
    return [{key: value for key, value in line.items() if key in shown} for line in outcome.lines("step")]


def difference(ours, theirs) -> float:
    """Return the largest difference of any number, relative to 1 or to the number if it is larger."""
    worst = 0.0
    for mine, other in zip(numbers(ours), numbers(theirs), strict=True):
        assert mine.keys() == other.keys() and mine.get("rows_hash") == other.get("rows_hash")
        is_tied = any(abs(line.get(key, 1)) < 1e-4 for line in (mine, other) for key in ("margin", "eval_margin"))
        for key in mine.keys() - {"rows_hash"} - ({"accuracy", "eval_accuracy"} if is_tied else set()):
            worst = max(worst, abs(mine[key] - other[key]) / max(1, abs(other[key])))
    return worst


def assert_same(ours, theirs, tolerance: float, of_weights: float) -> None:
    assert len(ours.losses) == STEPS
    assert difference(ours, theirs) < tolerance
    mine, other = ours.weights, theirs.weights
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert torch.allclose(tensor, other[name], rtol=0, atol=of_weights), name


@pytest.fixture(scope="module")
def single():
    """Return get(method, compare), which runs each method on one device once."""
    made = {}

    def get(method: str, compare):
        if method not in made:
            outcome = made[method] = compare("single", *METHODS[method], "run.name=single")
            outcome.kept = outcome.weights
        return made[method]

    return get


SELDOM = (pytest.mark.long, pytest.mark.cells)


@pytest.mark.parametrize(
    ("gear", "ranks"),
    [
        ("ddp", 3),
        ("zero3", 2),
        ("ring", 2),
        ("pp", 2),
        *(pytest.param(*case, marks=SELDOM) for case in (("hsdp", 4), ("fsdp_tp", 4), ("ulysses", 4), ("ring", 4))),
    ],
)
def test_full(compare, single, gear, ranks):
    """`make matrix` runs the others."""
    reference = single("full", compare)
    assert {line["accuracy"] for line in reference.lines("accuracy")} != {1.0}, "too easy to show a difference"
    assert reference.lines("kl")[-1]["kl"] > 0.1
    assert_same(compare(gear, ranks=ranks), reference, 1e-5, 1e-5)


@pytest.mark.parametrize(("gear", "method"), [("fsdp", "qlora"), ("zero3", "lora")])
def test_adapters(compare, single, gear, method):
    assert_same(compare(gear, *METHODS[method], ranks=2), single(method, compare), 1e-4, 1e-4)


def divided_by_own_pairs(monkeypatch):
    """Divide by the pairs of a rank, as an average over ranks does."""
    usual = batches.make_step_batch

    def by_rank(*arguments):
        step = usual(*arguments)
        chunks = torch.cat([micro["chunk_ids"].unique() for micro in step.micro_batches])
        return dataclasses.replace(step, num_units=len(chunks[chunks >= 0]) // 2 * 2)  # on both ranks

    monkeypatch.setattr(batches, "make_step_batch", by_rank)


@pytest.mark.parametrize("breakage", ["own pairs", "shared rows are not summed", "each sharing rank counts in full"])
def test_breakage_is_noticed(compare, single, monkeypatch, breakage):
    reference, gear = single("full", compare), "ring"
    if breakage == "own pairs":
        divided_by_own_pairs(monkeypatch)
        gear = "zero2"
    elif breakage == "shared rows are not summed":
        monkeypatch.setattr(sequence_parallel, "sum_over_sharing", lambda *_: lambda part: part)
    else:
        usual = loss.Comparison.loss
        monkeypatch.setattr(loss.Comparison, "loss", lambda self, *given: self.num_sharing * usual(self, *given))
    assert difference(compare(gear, ranks=2), reference) > 1e-3


@pytest.mark.parametrize(
    "objective", ["dpo", "kto", *(pytest.param(name, marks=SELDOM) for name in ("ipo", "simpo", "orpo"))]
)
def test_packing_ranks_and_micro_batches_change_nothing(compare, tokenizer, tmp_path, objective):
    """Train all pairs in each step, because rows that are not packed are other rows."""
    few = make_pairs(tmp_path / "few.jsonl", 20)
    given = [f"data.path={few}", f"train.objective={objective}", "eval.fraction=0", "optim.max_grad_norm=0"]
    given += ["preference.sft_weight=0.3"] if objective in ("dpo", "kto") else []
    num_rows = len(arranged(tokenizer, few, f"train.objective={objective}", "batch.row_tokens=160")[1].training)
    packed = (*given, "batch.row_tokens=160", f"batch.rows={num_rows}", "train.steps=3")
    plain = compare("single", *packed, "batch.micro_rows=1", "run.name=plain")
    others = {
        "ranks": ("ddp", 3, packed, "batch.micro_rows=2", "perf.checkpointing=full"),
        "unpacked": ("ddp", 2, packed, f"batch.rows={20 * (1 + (objective == 'kto'))}", "data.packing=false"),
        "passes": ("single", 1, packed, f"batch.micro_rows={num_rows}", "perf.pass_tokens=60"),
    }
    for name, (gear, ranks, changes, *more) in others.items():
        other = compare(gear, *changes, *more, f"run.name={name}", ranks=ranks)
        assert other.losses == pytest.approx(plain.losses, rel=1e-5), name
        for key, tensor in other.weights.items():
            assert torch.allclose(tensor, plain.weights[key], rtol=0, atol=1e-5), (name, key)
