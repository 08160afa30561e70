"""What was asked is what runs: each check of verification.verify passes, and refuses when its fact is broken."""

import pytest
import torch
import transformers

from gearbox import ROOT
from gearbox.config.gear import Gear, load_gear
from gearbox.distributed import engine, process_group, sequence_parallel, verification
from gearbox.errors import UserError


@pytest.fixture
def bf16(monkeypatch):
    """Run the gears in the precision of their files, as on a GPU; on a CPU bf16 is emulated."""
    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)


@pytest.mark.parametrize(
    ("gear", "facts"),
    [
        ("fsdp", ["gradients in", "masters in"]),
        ("zero1", ["gradients in", "gradients kept in", "masters in"]),
        ("zero2", ["gradients in", "gradients kept in", "masters in"]),
        ("zero3", ["gradients in", "gradients kept in", "masters in"]),
        ("ddp", ["masters in"]),
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
    for word in ("what runs is not what was asked for", *words):
        assert word in outcome.output, outcome.output
    assert outcome.folder is None


def test_fsdp_reducing_in_bf16_is_refused(train, bf16, monkeypatch):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    monkeypatch.setattr(engine, "_fsdp_policy", lambda gear: policy)
    refused(train("fsdp", ranks=2), "gradients in: asked for torch.float32, running torch.bfloat16")


@pytest.mark.parametrize("gear", ["zero2", "zero3"])
@pytest.mark.parametrize("key", ["communication_data_type", "data_types"])
def test_zero_in_bf16_is_refused(train, bf16, monkeypatch, gear, key):
    filled = Gear.filled_json

    def without(self, *arguments):
        return {name: value for name, value in filled(self, *arguments).items() if name != key}

    monkeypatch.setattr(Gear, "filled_json", without)
    refused(train(gear, ranks=2), "gradients")


def test_zero_with_another_clip_is_refused(train, monkeypatch):
    filled = Gear.filled_json
    monkeypatch.setattr(Gear, "filled_json", lambda *a: filled(*a) | {"gradient_clipping": 0.25})
    refused(train("zero2", ranks=2), "clip: asked for 1.0, running 0.25")


def test_unsharded_4bit_weights_are_refused(train, monkeypatch):
    """bitsandbytes' default storage is left out of FSDP's sharding with no more than a warning."""
    usual = transformers.BitsAndBytesConfig

    def with_default_storage(**settings):
        return usual(**{key: value for key, value in settings.items() if key != "bnb_4bit_quant_storage"})

    monkeypatch.setattr(transformers, "BitsAndBytesConfig", with_default_storage)
    outcome = train("fsdp", "model.quantize=nf4", "adapter.method=lora", ranks=2)
    refused(outcome, "sharding: a rank should hold 50% of the parameters' bytes")


def test_another_engine_is_refused(train, monkeypatch):
    monkeypatch.setattr(process_group.PartialState, "_shared_state", {})
    as_cpu = type("T", (), {"MULTI_GPU": process_group.DistributedType.MULTI_CPU})
    monkeypatch.setattr(process_group, "DistributedType", as_cpu)
    refused(train("fsdp", ranks=2), "engine: asked for FSDP2, running DDP")


@pytest.mark.parametrize("gear", ["single", "ddp", "fsdp", "zero3"])
def test_checkpointing_and_micro_batches_change_nothing(train, gear):
    ranks = 1 if gear == "single" else 2
    plain = train(gear, "batch.micro_rows=1", ranks=ranks)
    other = train(gear, "batch.micro_rows=3", "model.gradient_checkpointing=true", ranks=ranks)
    assert set(plain.codes + other.codes) == {0}, plain.output + other.output
    assert other.losses == pytest.approx(plain.losses, rel=1e-6)


def test_sharded_gears_hold_a_half(train):
    for gear, ranks in (("fsdp", 2), ("zero3", 2)):
        output = train(gear, ranks=ranks).output
        held, whole = [float(word) for word in output.split("parameters on this rank")[1].split()[:3:2]]
        assert held / whole == pytest.approx(0.5, abs=0.1), output


DDP = load_gear(ROOT / "accelerate_configs/ddp.yaml")  # asks for 4


def test_ranks_that_do_not_match_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="asks for 4 ranks, but 2 run; give --num_processes 2"):
        process_group.check_ranks(DDP)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (2, "4 ranks here, but 2 GPUs; give --num_processes 2"),
        (1, r"4 ranks here, but 1 GPUs; use accelerate_configs/single\.yaml"),
    ],
)
def test_more_ranks_than_gpus_are_refused(monkeypatch, gpus, said):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=said):
        process_group.check_ranks(DDP)


def test_a_gpu_that_torch_does_not_see_is_not_rehearsed_around(monkeypatch, tmp_path):
    monkeypatch.setattr(process_group, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"has an NVIDIA driver, but torch .* sees no GPU"):
        process_group.check_ranks(DDP)


@pytest.mark.parametrize("gear", ["zero1", "zero2"])
def test_an_optimizer_that_is_not_cut_is_refused(train, monkeypatch, gear):
    usual = verification.verify

    def with_a_whole_optimizer(accelerator, model, optimizer, *rest):
        for group in optimizer.param_groups:
            group["params"] = [p for p in model.parameters() if p.requires_grad]
        return usual(accelerator, model, optimizer, *rest)

    monkeypatch.setattr(verification, "verify", with_a_whole_optimizer)
    refused(train(gear, ranks=2), "sharding: the optimizer of a rank holds")


def test_fsdp_holds_no_whole_gradient_between_micro_batches(train, monkeypatch):
    """FSDP2's own way to accumulate keeps all of it, in fp32, on each rank."""
    import train as script

    usual = script.train_step

    def looking(gear, accelerator, model, *rest):
        whole = []
        backward = accelerator.backward

        def then_look(share):
            backward(share)
            parameters = [p for m in model.modules() if (state := getattr(m, "_get_fsdp_state", None))
                          for group in state()._fsdp_param_groups for p in group.fsdp_params]  # fmt: skip
            kept = [p.unsharded_accumulated_grad is not None or _gradient(p) is not None for p in parameters]
            whole.append(sum(kept))
            assert parameters

        monkeypatch.setattr(accelerator, "backward", then_look)
        outcome = usual(gear, accelerator, model, *rest)
        monkeypatch.setattr(accelerator, "backward", backward)
        assert whole == [0, 0, 0], whole
        return outcome

    monkeypatch.setattr(script, "train_step", looking)
    assert train("fsdp", ranks=2).codes == [0, 0]


def _gradient(parameter):
    return getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


def test_under_ulysses_packed_documents_are_isolated_by_the_positions(train, monkeypatch):
    """Without a mask of ours they see each other; the probe at the start finds it, in the mode of training."""
    isolated = train("ulysses", ranks=2)
    assert "a neighbour changes a token's loss by 0\n" in isolated.output, isolated.output
    monkeypatch.setattr(sequence_parallel, "isolate_documents", lambda model: None)
    assert "this model does not keep them apart, so each row holds one document" in train("ulysses", ranks=2).output


def test_a_gradient_that_is_scaled_by_the_number_of_ranks_is_noticed_under_ulysses(train, monkeypatch):
    """DeepSpeed takes the mean over all ranks in one stage and over some in others; AdamW and the clip hide it."""
    given = ("optim.max_grad_norm=0", "train.steps=1", "schedule.warmup=0")

    def norm(gear, ranks):
        return train(gear, *given, ranks=ranks).lines("grad_norm")[0]["grad_norm"]

    whole = norm("single", 1)
    assert norm("ulysses", 2) == pytest.approx(whole, rel=1e-4)
    monkeypatch.setattr(Gear, "averaged_over", property(lambda gear: gear.data_parallel))
    assert norm("ulysses", 2) == pytest.approx(whole / 2, rel=1e-3)


def part_of(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@pytest.mark.parametrize("gear", ["tp", "fsdp_tp"])
def test_the_norm_of_parts_is_that_of_the_whole(train, monkeypatch, gear):
    """Each rank alone would clip by the norm of its own parts."""
    ranks = 2 if gear == "tp" else 4
    whole = train("single").lines("grad_norm")[0]["grad_norm"]
    assert train(gear, ranks=ranks).lines("grad_norm")[0]["grad_norm"] == pytest.approx(whole, rel=1e-5)
    monkeypatch.setattr(
        engine, "norm_of_shards", lambda parts: float(sum(part_of(g).square().sum() for g in parts)) ** 0.5
    )
    broken = train(gear, ranks=ranks)
    assert broken.lines("grad_norm")[0]["grad_norm"] < 0.95 * whole
