"""Test that mixtures of experts train the same under every gear."""

import pytest
import torch

from support.experts import CHOSEN, EXPERTS, FAMILIES, LAYERS, TOKENIZER, WEIGHT, config_of

STEPS = 6


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def moe(train, family, tmp_path):
    """Return moe("ddp", ...), which runs train.py on a model of that family with random weights."""
    config_of(family).save_pretrained(tmp_path / family)
    TOKENIZER.save_pretrained(tmp_path / family)
    given = (f"model.name={tmp_path / family}", "run.rehearse=false", "model.init=random", f"train.steps={STEPS}")

    def call(gear: str, *overrides: str, **options):
        outcome = train(gear, *given, *overrides, **options)
        assert set(outcome.codes) == {0}, outcome.output
        return outcome

    return call


@pytest.mark.parametrize(("family", "method"), [("Mixtral", "none"), ("Qwen3Moe", "lora")], indirect=["family"])
def test_gears_train_the_same(moe, method):
    """No gear needs special handling: transformers keeps a layer's experts in two tensors, used in every step."""
    change = f"adapter.method={method}"
    alone = moe("single", change, load_back=True)
    assert "router loss             0.1 x load imbalance of the experts" in alone.output
    expected = [line["router_loss"] for line in alone.lines("router_loss")]
    assert len(expected) == STEPS and all(CHOSEN * 0.9 < unbalance < EXPERTS for unbalance in expected)
    for gear, ranks in (("ddp", 3), ("fsdp", 2), ("zero3", 2)):
        shared = moe(gear, change, "perf.checkpointing=full", ranks=ranks)
        assert shared.losses == pytest.approx(alone.losses, rel=1e-5), gear
        assert [line["router_loss"] for line in shared.lines("router_loss")] == pytest.approx(expected, rel=1e-5), gear
        assert shared.weights.keys() == alone.weights.keys()
        for name, tensor in shared.weights.items():
            assert torch.allclose(tensor, alone.weights[name], rtol=0, atol=1e-4), (gear, name)
    moved = {name for name, tensor in alone.weights.items() if "lora_B" in name and tensor.abs().max() > 0}
    assert method == "none" or sum("experts" in name for name in moved) == 2 * LAYERS, moved


def test_the_router_loss_changes_training(moe):
    weighted, without = moe("single"), moe("single", "model.router_loss=0")
    assert without.lines("router_loss") == [] and "router loss" not in without.output
    first = weighted.lines("router_loss")[0]
    assert first["loss"] == pytest.approx(without.losses[0] + WEIGHT * first["router_loss"], rel=1e-6)
    assert weighted.losses[-1] - WEIGHT * weighted.lines("router_loss")[-1]["router_loss"] != without.losses[-1]
