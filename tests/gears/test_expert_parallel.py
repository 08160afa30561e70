"""Test that a mixture whose experts are divided among ranks trains as on one device, and moves to other gears."""

import pytest
import torch
import transformers

from gearbox.sharding import experts
from support.experts import EXPERTS, TOKENIZER, config_of

# An eps near the gradients' size and a low clip make a wrong factor of the gradients visible, as in test_parity.
GIVEN = ("run.rehearse=false", "model.init=random", "optim.eps=1e-3", "optim.lr=5e-3", "optim.max_grad_norm=0.5")
RESUMED = ("schedule.name=constant", "save.every=2", "run.name=cut")


@pytest.fixture
def moe(train, tmp_path):
    """Return moe("Mixtral", "ep", ...), which trains a model of that family with random weights."""

    def call(family: str, gear: str, *overrides: str, ranks: int = 1):
        if not (tmp_path / family).exists():
            config_of(family).save_pretrained(tmp_path / family)
            TOKENIZER.save_pretrained(tmp_path / family)
        return train(gear, f"model.name={tmp_path / family}", *GIVEN, *overrides, ranks=ranks)

    return call


@pytest.fixture(scope="module")
def on_one_device():
    """Return get(moe, family), which trains each family on one device once."""
    made = {}

    def get(moe, family: str):
        if family not in made:
            made[family] = checked(moe(family, "single"))
        return made[family]

    return get


def checked(outcome):
    assert set(outcome.codes) == {0}, outcome.output
    return outcome


def numbers(outcome, key: str) -> list[float]:
    return [line[key] for line in outcome.lines(key)]


def assert_same(ours, theirs) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert numbers(ours, "grad_norm") == pytest.approx(numbers(theirs, "grad_norm"), rel=1e-4)
    assert numbers(ours, "expert_load") == pytest.approx(numbers(theirs, "expert_load"), rel=1e-6)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in ours.weights.items():
        assert torch.allclose(tensor, theirs.weights[name], rtol=0, atol=1e-4), name


@pytest.mark.parametrize(("family", "ranks"), [("Mixtral", 4), ("Qwen3Moe", 2), ("GptOss", 2), ("Olmoe", 2)])
def test_divided_experts_train_the_same(moe, on_one_device, family, ranks):
    """Compare with one device. On 4 ranks each half of the experts is on two ranks, and FSDP2 divides it."""
    alone, shared = on_one_device(moe, family), checked(moe(family, "ep", ranks=ranks))
    assert numbers(alone, "grad_norm")[0] > 0.5, "the clip must take effect"
    assert_same(shared, alone)
    assert numbers(alone, "rank_load") == []
    for over_ranks, over_experts in zip(numbers(shared, "rank_load"), numbers(shared, "expert_load"), strict=True):
        assert 1 <= over_ranks <= over_experts <= EXPERTS
    held, whole = [float(word) for word in shared.output.split("parameters on rank 0")[1].split()[:3:2]]
    assert "FSDP2, ep 2" in shared.output and held <= whole / ranks + 0.1


def test_a_rank_may_get_no_token(moe, tmp_path):
    """Give the experts of a rank a gradient of zero. The rank still takes part in each exchange.

    DeepSeek-V3 also has shared experts and a dense layer.
    """
    model = transformers.AutoModelForCausalLM.from_config(config_of("DeepseekV3"))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer[EXPERTS // 2 :] = -100.0  # the routers never choose the second half
    model.save_pretrained(tmp_path / "DeepseekV3")
    TOKENIZER.save_pretrained(tmp_path / "DeepseekV3")
    alone, shared = (
        checked(moe("DeepseekV3", gear, "model.init=pretrained", ranks=ranks))
        for gear, ranks in (("single", 1), ("ep", 2))
    )
    assert_same(shared, alone)
    assert numbers(shared, "rank_load") == pytest.approx([2.0] * len(shared.losses))


def test_gradients_averaged_over_copies_are_noticed(moe, on_one_device, monkeypatch):
    """Remove the divisor. FSDP2 then divides the gradients of experts by the number of their copies."""
    alone = on_one_device(moe, "Mixtral")
    usual = experts.fully_shard

    def without_factor(*arguments, **options):
        module = usual(*arguments, **options)
        module.set_gradient_divide_factor = lambda factor: None
        return module

    monkeypatch.setattr(experts, "fully_shard", without_factor)
    broken = checked(moe("Mixtral", "ep", "run.name=broken", ranks=2))
    assert broken.losses != pytest.approx(alone.losses, rel=1e-4)


def test_from_gear_to_gear(moe):
    """Resume one run under five gears in turn, one step each, with the optimizer's state."""
    chain = [("single", 1), ("ep", 2), ("zero3", 2), ("ep", 4), ("fsdp", 2)]
    given = ("save.every=1", "schedule.name=constant", "schedule.warmup=0")
    whole = checked(moe("Mixtral", "single", *given, f"train.steps={len(chain)}", "run.name=whole"))
    for number, (gear, ranks) in enumerate(chain, start=1):
        resume = "run.resume=latest" if number > 1 else "run.resume=auto"
        last = checked(moe("Mixtral", gear, *given, "run.name=cut", f"train.steps={number}", resume, ranks=ranks))
    assert len(last.losses) == len(chain)
    assert_same(last, whole)


def test_a_resumed_run_equals_an_uninterrupted_one(moe):
    whole = checked(moe("Mixtral", "ep", *RESUMED, "run.name=whole", "train.steps=4", ranks=2))
    checked(moe("Mixtral", "ep", *RESUMED, "train.steps=2", ranks=2))
    last = checked(moe("Mixtral", "ep", *RESUMED, "train.steps=4", "run.resume=latest", ranks=2))
    assert last.losses == whole.losses and numbers(last, "grad_norm") == numbers(whole, "grad_norm")
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in last.weights.items())


def test_undivided_experts_are_refused(moe, monkeypatch):
    """Skip the division. FSDP2 then shards the experts as it shards all weights, and would train the same."""
    from gearbox.sharding import fsdp_loading

    monkeypatch.setattr(fsdp_loading, "divide_experts", lambda *_: None)
    monkeypatch.setattr(fsdp_loading, "expert_part", lambda rank, *_: rank)
    outcome = moe("Mixtral", "ep", ranks=2)
    assert outcome.codes == [2, 2] and "engine: requested FSDP2, ep 2, running FSDP2" in outcome.output


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("adapter.method=lora",), "adapter.targets: all-linear also adapts experts, which this gear divides; "),
        (
            ("adapter.method=lora", "model.quantize=nf4"),
            "model.quantize: tensor and expert parallelism ",
        ),
        (("adapter.method=lora", "adapter.targets=[q_proj, down_proj]"), "adapter.targets: names the experts, which "),
    ],
)
def test_what_would_change_divided_experts_is_refused(moe, overrides, expected):
    outcome = moe("Qwen3Moe", "ep", *overrides, ranks=2)
    assert outcome.codes == [2, 2] and expected in outcome.output, outcome.output
    assert "Traceback" not in outcome.output
