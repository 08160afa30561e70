"""Count the bytes that a rank holds and sends in real steps, and compare them with theory."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gearbox.sharding.unwrap import unwrap_optimizer
from support.faults import Step
from support.held import at_second_step, held
from support.methods import METHODS


def found(train, monkeypatch, folder: Path, look, gear: str, *overrides: str, ranks: int) -> list[dict]:
    """Return what look(step) returns on each rank for the second step; `look` must take that step itself."""

    def run():
        return train(gear, "train.steps=2", *overrides, ranks=ranks)

    return at_second_step(monkeypatch, folder, look, run)


# --------------------------------------------------------------------------- held


# Shares of what one device holds: weights, gradients, optimizer state, and ZeRO's additional masters of the trained
# weights.
SHARES = {
    ("ddp", 2): (1, 1, 1, 0),
    ("fsdp", 2): (1 / 2, 1 / 2, 1 / 2, 0),
    ("fsdp_offload", 2): (1 / 2, 1 / 2, 1 / 2, 0),
    ("hsdp", 4): (1 / 2, 1 / 2, 1 / 2, 0),
    ("zero1", 2): (1, None, 1 / 2, 1 / 2),  # gradients are in one buffer until they are reduced
    ("zero2", 2): (1, 1 / 2, 1 / 2, 1 / 2),
    ("zero3", 2): (1 / 2, 1 / 2, 1 / 2, 1 / 2),
    ("zero3_offload", 2): (1 / 2, 1 / 2, 1 / 2, 1 / 2),
    ("ring", 2): (1 / 2, 1 / 2, 1 / 2, 0),
    ("ulysses", 2): (1 / 2, 1 / 2, 1 / 2, 1 / 2),
    ("tp", 2): (1 / 2, 1 / 2, 1 / 2, 0),
    ("fsdp_tp", 4): (1 / 4, 1 / 4, 1 / 4, 0),
}


@pytest.fixture(scope="module")
def whole():
    return {}


# Adapters run under the engines that treat frozen weights differently. Not under tp, which shards only some of their
# weights and refuses NF4.
CASES = [(*case, "full") for case in SHARES] + [
    (*case, method) for case in (("ddp", 2), ("fsdp", 2), ("zero2", 2), ("zero3", 2)) for method in ("lora", "qlora")
]


@pytest.mark.parametrize(("gear", "ranks", "method"), CASES)
def test_bytes_held(train, monkeypatch, tmp_path, whole, gear, ranks, method):
    if method not in whole:
        (whole[method],) = found(train, monkeypatch, tmp_path, held, "single", *METHODS[method], ranks=1)
    one, shares = whole[method], SHARES[gear, ranks]
    for mine in found(train, monkeypatch, tmp_path, held, gear, *METHODS[method], ranks=ranks):
        expected = {
            "parameters": one["parameters"] * shares[0], "gradients": one["gradients"] * (shares[1] or 0),
            "optimizer": one["optimizer"] * shares[2], "masters": one["trained"] * shares[3],
        }  # fmt: skip
        for what, theory in expected.items():
            if what == "gradients" and shares[1] is None:
                continue
            assert mine[what] == pytest.approx(theory, rel=0.05), what


def where_gradients_are(step: Step) -> dict:
    """Return the addresses of the gradients before a step, and when its optimizer runs."""
    trained = [p for p in step.model.parameters() if p.requires_grad]
    places = [[p.grad is not None and p.grad.data_ptr() for p in trained]]
    unwrap_optimizer(step.optimizer).register_step_pre_hook(
        lambda *_: places.append([p.grad.data_ptr() for p in trained])
    )
    step.take()
    return {"before": places[0], "then": places[1]}


def test_ddp_accumulates_in_its_buckets(train, monkeypatch, tmp_path):
    rounds = ("batch.rows=4", "batch.micro_rows=1")
    for places in found(train, monkeypatch, tmp_path, where_gradients_are, "ddp", *rounds, ranks=2):
        assert places["before"] == places["then"]


# --------------------------------------------------------------------------- sent


class Sent(TorchDispatchMode):
    """A count of bytes by collective, always of the full tensor that is reduced, gathered or reduce-scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            operation = name.split("::")[1]
            if "allreduce" in operation or "all_reduce" in operation:
                self.bytes["all-reduce"] += sum(t.nbytes for t in flat(args[0]))
            elif "allgather" in operation:
                self.bytes["all-gather"] += sum(t.nbytes for t in flat(args[0]))
            elif "reduce_scatter" in operation:
                self.bytes["reduce-scatter"] += sum(t.nbytes for t in flat(args[1]))
            else:
                self.bytes[operation] += 0
        return func(*args, **(kwargs or {}))


def flat(value) -> list[torch.Tensor]:
    return [value] if torch.is_tensor(value) else [t for each in value for t in flat(each)]


def sent(step: Step) -> dict:
    with Sent() as counted:
        step.take()
    sizes = {
        "N": sum(4 * getattr(p, "ds_numel", p.numel()) for p in step.model.parameters()),
        "trained": sum(4 * getattr(p, "ds_numel", p.numel()) for p in step.model.parameters() if p.requires_grad),
    }
    return {**counted.bytes, **sizes, "micro_batches": len(step.batch.micro_batches)}


def per_micro_batch(counted: dict) -> float:
    """Return what is sent, in multiples of the weights' bytes. A ring all-reduce sends its tensor twice."""
    total = 2 * counted.get("all-reduce", 0) + counted.get("all-gather", 0) + counted.get("reduce-scatter", 0)
    return total / counted["N"] / counted["micro_batches"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Return settings of a model with nearly all weights in layers, gathered twice; outer weights are gathered once."""
    from transformers import AutoConfig, AutoTokenizer

    from gearbox import ROOT
    from gearbox.model import random_init

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    config = random_init.shrink_config(AutoConfig.from_pretrained(ROOT / "recipes/tiny"), tokenizer)
    config.num_hidden_layers = 12
    folder = tmp_path_factory.mktemp("deep") / "model"
    random_init.write_random(config, tokenizer, 0, folder)
    return ("run.rehearse=false", "model.init=pretrained", f"model.name={folder}")


def test_ddp_reduces_once_a_step(train, monkeypatch, tmp_path, deep):
    """A step sends 2N for any number of micro-batches: nothing is sent during accumulation."""
    for rows in (2, 6):
        for counted in found(train, monkeypatch, tmp_path, sent, "ddp", *deep, f"batch.rows={rows}", ranks=2):
            assert counted["micro_batches"] == rows / 2
            assert per_micro_batch(counted) * counted["micro_batches"] == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("gear", ["fsdp", "zero3"])
def test_sharded_gears_send_three_times_the_weights_a_micro_batch(train, monkeypatch, tmp_path, deep, gear):
    for counted in found(train, monkeypatch, tmp_path, sent, gear, *deep, ranks=2):
        assert counted["micro_batches"] == 3
        assert per_micro_batch(counted) == pytest.approx(3, rel=0.05)


def test_an_adapter_sends_its_own_bytes(train, monkeypatch, tmp_path, deep):
    for counted in found(train, monkeypatch, tmp_path, sent, "ddp", *deep, "adapter.method=lora", ranks=2):
        assert counted["trained"] < counted["N"] / 2
        assert counted["all-reduce"] == pytest.approx(counted["trained"], rel=0.05)
