"""Test that every gear trains the same model: same rows, same loss at every step, same final weights."""

import pytest
import torch
from transformers import Qwen3Config

from gearbox.model import random_init
from support.breakages import averaged_per_micro_batch, clipped_at_auto, scheduled_by_rank
from support.gears import why_no_disk_operations
from support.methods import METHODS

STEPS = 10
# With its usual eps AdamW hides a constant factor in the gradients, such as another clip or a mean instead of a sum
# over ranks. An eps near the gradients' size (0.5 / sqrt(120,000 weights) = 1.4e-3) makes the factor visible.
FULL = (
    "optim.lr=5e-3",
    "optim.eps=1e-3",
    "optim.max_grad_norm=0.5",
    f"train.steps={STEPS}",
    "schedule.warmup=3",
)
ADAPTERS = ("optim.lr=1e-2",)  # adapters have few weights


@pytest.fixture(scope="module")
def single():
    """Return get(method, train), which runs each method on one device once."""
    made = {}

    def get(method: str, train):
        if method not in made:
            made[method] = checked(train("single", *FULL, *changes_of(method)))
        return made[method]

    return get


@pytest.fixture(scope="module")
def full():
    """Return get(train, gear, ranks), which trains all weights under each gear on that number of ranks once."""
    made = {}

    def get(train, gear: str, ranks: int):
        if (gear, ranks) not in made:
            made[gear, ranks] = checked(train(gear, *FULL, ranks=ranks))
        return made[gear, ranks]

    return get


def changes_of(method: str) -> tuple[str, ...]:
    if method == "muon":
        return ("optim.name=muon", "optim.weight_decay=0.1")
    return METHODS[method] + (() if method == "full" else ADAPTERS)


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
    [
        ("ddp", 2),
        ("ddp", 3),
        ("fsdp", 2),
        ("zero1", 2),
        ("zero2", 2),
        ("zero3", 2),
        ("fsdp_offload", 2),
        ("zero3_offload", 2),
        ("hsdp", 4),
        ("tp", 2),
        ("fsdp_tp", 4),
        ("ulysses", 2),
        ("ulysses", 4),
        ("ring", 2),
        ("ring", 4),
        ("pp", 2),
        ("pp", 4),
        ("fsdp", 4),
        ("zero3", 4),
        ("zero3_nvme", 2),
    ],
)
def test_full(train, single, full, gear, ranks):
    if gear == "zero3_nvme" and (reason := why_no_disk_operations()):
        pytest.skip(reason)
    reference = single("full", train)
    assert reference.kept_norms[0] > 0.5, "the clip must take effect, or its absence would not be noticed"
    assert_same(full(train, gear, ranks), reference, 1e-5, 1e-4)


@pytest.mark.parametrize(("gear", "few", "many"), [("ddp", 2, 3), ("fsdp", 2, 4)])
def test_one_gear_on_different_numbers_of_ranks(train, full, gear, few, many):
    """The last round of 6 rows on 4 ranks is padded with empty rows."""
    two, more = (full(train, gear, ranks) for ranks in (few, many))
    assert worst(more.kept_losses, two.kept_losses) < 1e-6


@pytest.mark.parametrize(("gear", "method"), [("fsdp", "qlora"), ("zero3", "lora"), ("ring", "lora")])
def test_adapters(train, single, gear, method):
    """`make matrix` runs the others."""
    outcome = checked(train(gear, *FULL, *changes_of(method), ranks=2))
    assert_same(outcome, single(method, train), 1e-4, 1e-4)
    moved = [name for name, tensor in outcome.kept_weights.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert len(moved) == 14, "each of 2 layers has 7 linear layers whose adapter was trained and saved"


def test_muon(train, single):
    """Muon multiplies complete matrices. `test_from_gear_to_gear` also runs it on columns and on blocks of them."""
    outcome = checked(train("fsdp", *FULL, *changes_of("muon"), ranks=3))
    assert_same(outcome, single("muon", train), 1e-6, 1e-5)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory, tokenizer):
    """Return get(train, gear, ranks), which trains one Qwen3 model under each gear once."""
    folder, made = tmp_path_factory.mktemp("qwen3") / "model", {}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, pad_token_id=0, eos_token_id=3, **shape
    )
    random_init.write_random(config, tokenizer, 0, folder)
    given = (*FULL, "run.rehearse=false", "model.init=pretrained", f"model.name={folder}", "train.steps=5")

    def get(train, gear: str, ranks: int):
        if gear not in made:
            made[gear] = checked(train(gear, *given, ranks=ranks))
        return made[gear]

    return get


@pytest.mark.parametrize("gear", ["tp", "ulysses", "ring", "pp"])
def test_per_head_norms(train, qwen3, gear):
    """The gradients of Qwen3's head norms are summed over the ranks that share the heads, once per micro-batch."""
    alone, outcome = qwen3(train, "single", 1), qwen3(train, gear, 2)
    assert worst(outcome.kept_losses, alone.kept_losses) < 1e-5
    for name, tensor in outcome.kept_weights.items():
        assert torch.allclose(tensor, alone.kept_weights[name], rtol=0, atol=1e-4), name


def test_64_rows_on_3_ranks(train):
    """The last round is padded with empty rows, which have no effect: 64 = 21 x 3 + 1."""
    changes = ("batch.rows=64", "batch.micro_rows=5")
    alone, three = train("single", *changes), train("ddp", *changes, ranks=3)
    assert set(alone.codes + three.codes) == {0}, alone.output + three.output
    assert three.losses == pytest.approx(alone.losses, rel=1e-6)


# Each breakage must exceed the tolerance by far, or the tests above would not notice it.
@pytest.mark.parametrize("breakage", [averaged_per_micro_batch, scheduled_by_rank, clipped_at_auto])
def test_breakage_is_noticed(train, single, monkeypatch, breakage):
    reference = single("full", train)
    breakage(monkeypatch)
    broken = checked(train("zero2", *FULL, ranks=2))
    assert worst(broken.kept_losses, reference.kept_losses) > 1e-3


@pytest.mark.parametrize("gear", ["single", "ddp", "fsdp", "zero3"])
def test_checkpointing_and_micro_batches_change_nothing(train, single, full, gear):
    plain = single("full", train) if gear == "single" else full(train, gear, 2)
    other = train(gear, *FULL, "batch.micro_rows=3", "perf.checkpointing=full", ranks=1 if gear == "single" else 2)
    assert_same(checked(other), plain, 1e-5, 1e-4)
    assert worst(other.kept_losses[:3], plain.kept_losses[:3]) < 1e-6
