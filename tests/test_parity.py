"""Every gear trains the same model: same rows, same loss at every step, same weights at the end."""

import pytest
import torch

STEPS = 20
FULL = ("optim.lr=2e-3", f"train.steps={STEPS}", "schedule.warmup_steps=3", "optim.max_grad_norm=0.5")
METHODS = {
    "full": (),
    "lora": ("adapter.method=lora", "optim.lr=1e-2"),
    "qlora": ("adapter.method=lora", "model.quantize=nf4", "optim.lr=1e-2"),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory, chats):
    """The run of each method on one device, made once."""
    made = {}

    def get(method: str, train):
        if method not in made:
            made[method] = checked(train("single", *FULL, *METHODS[method]))
        return made[method]

    return get


def checked(outcome):
    assert set(outcome.codes) == {0}, outcome.output
    outcome.kept_losses, outcome.kept_weights = outcome.losses, outcome.weights
    outcome.kept_hashes = [line["rows_hash"] for line in outcome.lines("rows_hash")]
    outcome.kept_norms = [line["grad_norm"] for line in outcome.lines("grad_norm")]
    return outcome


def worst(ours, theirs) -> float:
    assert len(ours) == len(theirs)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def assert_same(outcome, reference, loss_tolerance: float, weight_tolerance: float) -> None:
    assert len(outcome.kept_losses) == STEPS
    assert outcome.kept_hashes == reference.kept_hashes
    assert worst(outcome.kept_losses, reference.kept_losses) < loss_tolerance
    assert worst(outcome.kept_norms, reference.kept_norms) < 100 * loss_tolerance
    assert outcome.kept_weights.keys() == reference.kept_weights.keys()
    for name, tensor in outcome.kept_weights.items():
        assert torch.allclose(tensor, reference.kept_weights[name], rtol=0, atol=weight_tolerance), name


@pytest.mark.parametrize(
    ("gear", "ranks"),
    [("ddp", 2), ("ddp", 3), ("ddp", 4), ("fsdp", 2), ("fsdp", 3), ("zero1", 2), ("zero2", 2), ("zero3", 2)],
)
def test_full(train, single, gear, ranks):
    reference = single("full", train)
    assert reference.kept_norms[0] > 0.5, "the clip must bite, or its absence would not be noticed"
    assert_same(checked(train(gear, *FULL, ranks=ranks)), reference, 1e-5, 1e-4)


@pytest.mark.parametrize("gear", ["ddp", "fsdp", "zero3"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters(train, single, gear, method):
    outcome = checked(train(gear, *FULL, *METHODS[method], ranks=2))
    assert_same(outcome, single(method, train), 1e-4, 1e-4)
    moved = [name for name, tensor in outcome.kept_weights.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert len(moved) == 14, "7 linear layers in each of 2 layers have an adapter that was trained and saved"
