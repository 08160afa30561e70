"""Test which gear a plan chooses, and what a step computes and sends."""

from pathlib import Path

import pytest

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.planning import cost, strategy
from gearbox.planning.architecture import Architecture, read_config
from gearbox.planning.gpus import GIB, GPUS, gpu_named, kind_of
from gearbox.planning.layer_memory import Setup
from support.simulations import job_of

RECIPES = ROOT / "recipes"


def planned(recipe: str, gpu: str, num_gpus: int, *overrides: str, machines: int = 1):
    path = RECIPES / f"{recipe}.yaml"
    loaded = load_recipe(path, list(overrides))
    shape = Architecture.of(read_config(loaded.model))
    found, refused = strategy.options(shape, loaded, path, strategy.Machines(gpu_named(gpu), num_gpus, machines))
    return shape, found, refused


@pytest.mark.parametrize(
    ("recipe", "gpu", "num_gpus", "overrides", "gear"),
    [
        ("qlora_1gpu", "24GB", 1, (), "single"),
        ("ddp_4gpu", "24GB", 4, (), "ddp"),
        ("ddp_4gpu_full", "24GB", 4, (), "ddp"),
        ("fsdp_2gpu", "80GB", 2, (), "fsdp"),
        ("fsdp_2gpu", "24GB", 2, (), "fsdp_offload"),
        ("fsdp_2gpu", "H100", 8, ("model.name=meta-llama/Llama-3.3-70B-Instruct",), "fsdp_offload"),
        ("ddp_4gpu", "H100", 8, ("model.name=Qwen/Qwen3-30B-A3B",), "zero1"),
    ],
)
def test_the_chosen_gear(recipe, gpu, num_gpus, overrides, gear):
    _, found, _ = planned(recipe, gpu, num_gpus, *overrides)
    assert (found[0].gear.name, found[0].fits) == (gear, True)
    assert strategy.reason(found[0], found)


def test_a_gear_that_offloads_says_what_each_machine_needs():
    _, found, _ = planned("fsdp_2gpu", "H100", 8, "model.name=meta-llama/Llama-3.1-405B-Instruct", machines=2)
    assert found[0].gear.offload and found[0].host_bytes == found[0].prediction.host_bytes / 2
    assert f"each machine needs {found[0].host_bytes / GIB:,.0f} GiB of it" in strategy.reason(found[0], found)


def test_every_gear_is_planned_or_refused_with_a_reason():
    _, found, refused = planned("fsdp_2gpu", "H100", 8)
    names = [option.gear.name for option in found] + [*refused]
    assert sorted(names) == sorted(path.stem for path in Path(ROOT, "accelerate_configs").glob("*.yaml"))
    assert all(refused.values())
    assert "experts" in refused["ep"]


def test_the_largest_micro_batch_is_the_largest_that_fits():
    shape, found, _ = planned("fsdp_2gpu", "80GB", 2)
    best = found[0]
    rows = best.largest_micro_rows(shape)
    assert rows > best.job.batch.micro_rows
    for count, fits in ((rows, True), (rows + 1, False)):
        peak = strategy.predict(shape, strategy.with_micro_rows(best.job, count)).peak_bytes
        assert (peak <= best.memory) == fits


def test_changes_are_advised_if_nothing_fits():
    path = RECIPES / "fsdp_2gpu.yaml"
    recipe = load_recipe(path, ["model.name=meta-llama/Llama-3.3-70B-Instruct"])
    shape = Architecture.of(read_config(recipe.model))
    machines = strategy.Machines(gpu_named("80GB"), 1)
    lines = [*strategy.advice(shape, recipe, path, machines)]
    assert lines == ["adapter.method=lora model.quantize=nf4 fits under single"]


def test_a_token_takes_six_operations_for_each_weight():
    job = job_of("ddp_4gpu_full", "single", None, "perf.checkpointing=none")
    shape = Architecture.of(read_config(job.recipe.model))
    count = cost.flops_per_token(shape, Setup.of(job), job.recipe.batch.row_tokens)
    attention = 6 * shape.num_layers * shape.heads * shape.head_size * job.recipe.batch.row_tokens
    assert count == pytest.approx(6 * shape.active_weights + attention, rel=1e-9)


def test_kto_computes_each_token_once_more():
    """The pass that measures how far the model has moved is a third of training without its attention."""
    jobs = [job_of("ddp_4gpu_full", "single", None, f"train.objective={name}") for name in ("dpo", "kto")]
    shape = Architecture.of(read_config(jobs[0].recipe.model))
    dpo, kto = (cost.cost_of_step(shape, job, gpu_named("24GB")).flops_per_token for job in jobs)
    row_tokens = jobs[0].recipe.batch.row_tokens
    attention = shape.num_layers * shape.heads * shape.head_size * row_tokens
    assert kto - dpo == pytest.approx(2 * shape.active_weights + 2 * attention, rel=1e-9)


# As docs/parallelism.md has it, for W weights and m micro-batches. test_held_and_sent.py counts it in real steps.
SENT = {
    ("ddp", 4): lambda w, m: 8 * w * 3 / 4,
    ("zero1", 2): lambda w, m: (8 * w + 2 * w) / 2,
    ("zero2", 2): lambda w, m: (4 * w * m + 2 * w) / 2,
    ("fsdp", 2): lambda w, m: 8 * w * m / 2,
    ("zero3", 2): lambda w, m: 8 * w * m / 2,
}


@pytest.mark.parametrize(("gear", "ranks"), SENT)
def test_bytes_sent_are_those_of_the_docs(gear, ranks):
    job = job_of("fsdp_2gpu", gear, ranks)
    shape = Architecture.of(read_config(job.recipe.model))
    sent = cost.sent_per_step(shape, Setup.of(job), job)
    assert sent == pytest.approx(SENT[gear, ranks](shape.num_weights, job.batch.accumulation_steps), rel=1e-6)


def test_experts_that_ranks_divide_are_not_sent():
    name = "model.name=Qwen/Qwen3-30B-A3B"
    shape = Architecture.of(read_config(load_recipe(RECIPES / "fsdp_2gpu.yaml", [name]).model))
    jobs = [job_of("fsdp_2gpu", "fsdp", 8, name), job_of("fsdp_2gpu", "ep", 8, name)]
    gathered, divided = (cost.sent_per_step(shape, Setup.of(job), job) for job in jobs)
    assert divided < gathered


def test_gpus_are_named_loosely_and_wrong_names_are_explained():
    assert gpu_named("a100-80gb") is gpu_named("A100 80GB") is gpu_named("A100")
    assert gpu_named("4090") is gpu_named("RTX 4090")
    assert gpu_named("H100 80GB") is gpu_named("H100-SXM") is gpu_named("H100")
    devices = {"NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe"}
    assert {device: kind_of(device).name for device in devices} == devices
    assert kind_of("Unheard-of") is None
    assert gpu_named("24GB").memory == gpu_named("24 GiB").memory == 24 * GIB
    for wrong, hint in (
        ("H1000", "did you mean 'h100'"),
        ("0GB", "above 0"),
        ("", "give one of"),
        ("-1GB", "give one"),
    ):
        with pytest.raises(UserError, match=hint):
            gpu_named(wrong)
    assert all(gpu.source and gpu.tflops and gpu.link for gpu in GPUS)
