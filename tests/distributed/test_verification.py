"""Test each check of verification.verify: it passes on a correct run and refuses a broken one."""

import re

import pytest
import torch
from safetensors.torch import load_file

from gearbox.config.gear import Gear
from gearbox.distributed import engine, process_group, verification
from gearbox.model import loading


@pytest.fixture
def bf16(monkeypatch):
    """Run the gears in the precision of their files, as on a GPU; a CPU emulates bf16."""
    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)


@pytest.mark.parametrize(
    ("gear", "facts"),
    [
        ("fsdp", ["gradient reduction", "master weights"]),
        ("zero1", ["gradient reduction", "gradient buffers", "master weights"]),
        ("zero2", ["gradient reduction", "gradient buffers", "master weights"]),
        ("zero3", ["gradient reduction", "gradient buffers", "master weights"]),
        ("ddp", ["master weights"]),
    ],
)
def test_bf16_gears_reduce_and_keep_fp32(train, bf16, gear, facts):
    outcome = train(gear, ranks=2)
    assert set(outcome.codes) == {0}, outcome.output
    shown = {line[:24].strip(): line[24:].strip() for line in outcome.output.splitlines()}
    assert shown["precision"] == "bf16", outcome.output
    for fact in facts:
        assert shown[fact] == "fp32", outcome.output


def refused(outcome, *words: str) -> None:
    assert 2 in outcome.codes, outcome.output
    for word in ("the running configuration does not match the requested one", *words):
        assert word in outcome.output, outcome.output
    assert outcome.folder is None


def test_fsdp_reducing_in_bf16_is_refused(train, bf16, monkeypatch):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    monkeypatch.setattr(engine, "_fsdp_policy", lambda gear: policy)
    refused(train("fsdp", ranks=2), "gradient reduction: requested torch.float32, running torch.bfloat16")


@pytest.mark.parametrize("gear", ["zero2", "zero3"])
@pytest.mark.parametrize("key", ["communication_data_type", "data_types"])
def test_zero_in_bf16_is_refused(train, bf16, monkeypatch, gear, key):
    filled = Gear.filled_json

    def without(self, *arguments):
        return {name: value for name, value in filled(self, *arguments).items() if name != key}

    monkeypatch.setattr(Gear, "filled_json", without)
    refused(train(gear, ranks=2), "gradient reduction: " if key == "communication_data_type" else "gradient buffers: ")


def test_zero_with_another_clip_is_refused(train, monkeypatch):
    filled = Gear.filled_json
    monkeypatch.setattr(Gear, "filled_json", lambda *a: filled(*a) | {"gradient_clipping": 0.25})
    refused(train("zero2", ranks=2), "gradient clip: requested 1.0, running 0.25")


def test_unsharded_4bit_weights_are_refused(train, monkeypatch):
    """FSDP does not shard the default storage of bitsandbytes, and only warns about it."""
    usual = loading.BitsAndBytesConfig

    def with_default_storage(**settings):
        return usual(**{key: value for key, value in settings.items() if key != "bnb_4bit_quant_storage"})

    monkeypatch.setattr(loading, "BitsAndBytesConfig", with_default_storage)
    outcome = train("fsdp", "model.quantize=nf4", "adapter.method=lora", ranks=2)
    refused(outcome, "sharding: a rank should hold 1/2 of model.layers.1.mlp.", "13 more parameters")


@pytest.mark.parametrize("gear", ["tp", "fsdp_tp"])
def test_what_tensor_parallelism_replicates_is_expected(train, bf16, gear):
    """Adapters stay in fp32, so in bf16 they are large; every rank holds half of their matrices in full."""
    outcome = train(gear, "adapter.method=lora")
    assert set(outcome.codes) == {0}, outcome.output


@pytest.mark.parametrize(
    ("name", "of_adapter"), [("layers.0.self_attn.o_proj.weight", False), ("layers.1.mlp.up_proj.lora_B", True)]
)
def test_a_matrix_that_tensor_parallelism_did_not_split_is_refused(train, monkeypatch, name, of_adapter):
    usual = verification.verify

    def with_a_full_matrix(accelerator, model, *rest):
        ((owner, kind),) = [whole.rpartition(".")[::2] for whole, _ in model.named_parameters() if name in whole]
        module = model.get_submodule(owner)
        module.register_parameter(kind, torch.nn.Parameter(getattr(module, kind).full_tensor().detach()))
        return usual(accelerator, model, *rest)

    monkeypatch.setattr(verification, "verify", with_a_full_matrix)
    outcome = train("tp", f"adapter.method={'lora' if of_adapter else 'none'}")
    refused(outcome, f"sharding: a rank should hold 1/2 of model.{name}", " weights\n")


def with_threshold(monkeypatch, threshold: int | str) -> None:
    filled = Gear.filled_json

    def changed(*arguments):
        settings = filled(*arguments)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
        return settings

    monkeypatch.setattr(Gear, "filled_json", changed)


def test_zero3_that_keeps_all_parameters_gathered_is_refused(train, monkeypatch):
    """The shipped JSON keeps only parameters up to ten times the model's width, such as norms."""
    with_threshold(monkeypatch, 10**6)
    outcome = train("zero3", ranks=2)
    refused(outcome, "sharding: 100% of the parameters' bytes stay gathered on every rank, and at most 25% may; lower ")


def test_another_engine_is_refused(train, monkeypatch):
    monkeypatch.setattr(process_group.PartialState, "_shared_state", {})
    as_cpu = type("T", (), {"MULTI_GPU": process_group.DistributedType.MULTI_CPU})
    monkeypatch.setattr(process_group, "DistributedType", as_cpu)
    refused(train("fsdp", ranks=2), "engine: requested FSDP2, running DDP")


def test_sharded_gears_hold_a_half(train):
    for gear, ranks in (("fsdp", 2), ("zero3", 2)):
        output = train(gear, ranks=ranks).output
        held, whole = [float(word) for word in output.split("parameters on rank 0")[1].split()[:3:2]]
        assert held / whole == pytest.approx(0.5, abs=0.1), output


def test_the_plan_counts_trained_and_all_weights(train):
    """Sharded, packed in 4 bits, or divided into stages: the counts are those of the files on the disk."""
    gears = [("single", 1, "null"), ("fsdp", 2, "nf4"), ("zero3", 2, "null"), ("pp", 2, "null")]
    for gear, ranks, quantize in gears:
        outcome = train(gear, "adapter.method=lora", f"model.quantize={quantize}", ranks=ranks)
        base, adapter = (
            sum(t.numel() for file in (outcome.folder / name).rglob("*.safetensors") for t in load_file(file).values())
            for name in ("base", "model")
        )
        expected = f"{adapter:,} of {base + adapter:,} weights ({adapter / (base + adapter):.2%})"
        assert re.search(r"^trained +(.*)", outcome.output, re.M)[1] == expected, gear


@pytest.mark.parametrize("gear", ["zero1", "zero2"])
def test_an_unsharded_optimizer_is_refused(train, monkeypatch, gear):
    usual = verification.verify

    def with_all_parameters(accelerator, model, optimizer, *rest):
        for group in optimizer.param_groups:
            group["params"] = [p for p in model.parameters() if p.requires_grad]
        return usual(accelerator, model, optimizer, *rest)

    monkeypatch.setattr(verification, "verify", with_all_parameters)
    refused(train(gear, ranks=2), "sharding: the optimizer of a rank holds")
