"""Test that a gear refuses a recipe or an architecture it cannot run, and names the nearest one it can."""

import re
import sys

import pytest

from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.config.job import BatchPlan, rehearsed
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from support.gears import check_against, written

RECIPE = ROOT / "recipes" / "tiny.yaml"
BATCH = BatchPlan.divide(16, data_parallel=2, micro_rows=2)  # in 4 accumulation steps


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("gradient_clipping", 0.5, 1.0), ("gradient_accumulation_steps", 5, 4),
        ("train_micro_batch_size_per_gpu", 8, 2), ("train_batch_size", 32, 16),
    ],
)  # fmt: skip
def test_a_json_that_contradicts_the_recipe_is_refused_with_both_numbers(tmp_path, key, wrong, right):
    recipe = load_recipe(RECIPE, ["optim.max_grad_norm=1"])
    # The gear has 2 ranks: 4 micro-batches of 2 rows on each make a batch of 16.
    for number in (right, "auto"):
        check_against(load_gear(written(tmp_path, "zero2", {key: number})), recipe, RECIPE, BATCH)
    with pytest.raises(UserError) as caught:
        check_against(load_gear(written(tmp_path, "zero2", {key: wrong})), recipe, RECIPE, BATCH)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'zero.json'}: {key}: is {wrong}, but ") and f" {right};" in line
    assert str(RECIPE) in line or "batch.rows" in line


def test_accumulation_in_the_environment_must_match_the_recipe(monkeypatch):
    recipe, gear = load_recipe(RECIPE), load_gear(ROOT / "accelerate_configs" / "ddp.yaml")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    check_against(gear, recipe, RECIPE, BatchPlan.divide(8, 2, 1))
    with pytest.raises(UserError, match=r"STEPS=4 is set in the environment, but \S+tiny.yaml gives 2; unset it"):
        check_against(gear, recipe, RECIPE, BatchPlan.divide(4, 2, 1))


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("overrides", "refusing", "taking", "expected"),
    [
        (["optim.master_weights=bf16"], ["zero1", "zero2", "zero3"], ["fsdp", "ddp"], "ZeRO always keeps fp32 masters"),
        (
            ["optim.name=adamw_8bit"],
            ["zero1", "zero3"],
            ["fsdp", "ddp", "single"],
            "use adamw or paged_adamw, or the fsdp",
        ),
        (["optim.name=paged_adamw_8bit"], ["zero2"], ["fsdp"], "use adamw or paged_adamw, or the fsdp gear"),
        (["optim.name=paged_adamw"], ["offload"], ["zero2", "zero3", "fsdp"], "use adamw, or the same gear without"),
        (
            ["optim.name=muon"],
            ["zero1", "zero2", "zero3"],
            ["single", "ddp", "tp", "pp"],
            "use adamw, or the fsdp gear",
        ),
        (["optim.name=muon"], ["fsdp_offload", "zero3_offload"], ["fsdp", "hsdp"], "use adamw, or the fsdp gear"),
        (
            ["adapter.method=dora", "model.quantize=nf4"],
            ["zero3"],
            ["zero2", "fsdp", "ddp"],
            "use lora (QLoRA), or",
        ),
        (["adapter.method=lora", "model.quantize=nf4"], [], ["zero3"], ""),
        (
            ["adapter.method=lora", "model.quantize=nf4", "adapter.targets=[v_proj]"],
            ["tp", "fsdp_tp", "ep"],
            ["fsdp"],
            "model.quantize: tensor and expert parallelism split weights",
        ),
        (
            ["adapter.method=lora", "adapter.targets=all-linear"],
            ["ep"],
            ["fsdp", "tp"],
            "adapter.targets: all-linear also adapts experts",
        ),
        (["adapter.method=dora", "adapter.targets=[v_proj]"], [], ["ep"], ""),
        (["adapter.method=dora"], [], ["zero3", "zero2", "fsdp"], ""),
        (["adapter.method=dora", "model.add_tokens=[x]"], ["single", "fsdp"], [], "use adapter.method=lora"),
        (["adapter.method=lora", "model.add_tokens=[x]"], [], ["single", "zero3"], ""),
        (
            ["perf.checkpointing=selective"],
            ["zero3", "ulysses", "ring"],
            ["single", "ddp", "fsdp", "fsdp_tp", "zero2", "pp", "tp"],
            "perf.checkpointing: ",
        ),
        (["perf.checkpointing=offload"], [], ["single", "ddp", "fsdp", "zero3", "pp", "tp", "ulysses"], ""),
        (
            ["perf.compile=true"],
            ["zero3", "tp", "fsdp_tp", "ep", "pp", "ulysses", "ring"],
            ["single", "ddp", "fsdp", "hsdp", "zero1", "zero2"],
            "use compile: false, or the fsdp gear",
        ),
    ],
)
def test_refused_combinations_name_the_nearest_that_works(tmp_path, overrides, refusing, taking, expected):
    recipe = load_recipe(RECIPE, overrides)
    for name in refusing:
        path = ROOT / "accelerate_configs" / f"{name}.yaml"
        gear = load_gear(path if path.exists() else written(tmp_path, "zero2", {"zero_optimization": OFFLOAD}))
        with pytest.raises(UserError, match=re.escape(expected)) as caught:
            check_against(gear, recipe, RECIPE, BATCH)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("command line: ")
    for name in taking:
        check_against(load_gear(ROOT / "accelerate_configs" / f"{name}.yaml"), recipe, RECIPE, BATCH)


def test_fsdp_offload_is_offload():
    gear = load_gear(ROOT / "accelerate_configs/fsdp.yaml")
    assert gear.offload is None
    gear.settings["fsdp_config"]["fsdp_offload_params"] = True
    with pytest.raises(UserError, match=r"optim\.name: this gear keeps the optimizer in host memory"):
        check_against(gear, load_recipe(RECIPE, ["optim.name=adamw_8bit"]), RECIPE, BATCH)


def test_what_needs_bitsandbytes_is_refused_without_it(monkeypatch):
    gear = load_gear(ROOT / "accelerate_configs" / "single.yaml")
    recipe = load_recipe(RECIPE, ["model.quantize=nf4", "adapter.method=lora", "optim.name=paged_adamw"])
    check_against(gear, recipe, RECIPE, BATCH)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    check_against(gear, load_recipe(RECIPE), RECIPE, BATCH)
    with pytest.raises(UserError, match=r"quantize: nf4 needs bitsandbytes.*\n.*optim\.name: paged_adamw needs bits"):
        check_against(gear, recipe, RECIPE, BATCH)


@pytest.mark.parametrize(
    ("override", "module", "expected"),
    [
        (
            "perf.kernels=liger",
            "liger_kernel",
            "perf.kernels: liger needs liger_kernel, which is not installed; run pip",
        ),
        ("perf.float8=true", "torchao", "perf.float8: needs torchao, which is not installed; run pip install torchao"),
    ],
)
def test_kernels_of_other_packages_are_refused_without_them(monkeypatch, tmp_path, override, module, expected):
    gear, recipe = load_gear(ROOT / "accelerate_configs" / "single.yaml"), load_recipe(RECIPE, [override])
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UserError, match=f"^command line: {expected}"):
        check_against(gear, recipe, RECIPE, BATCH)
    check_against(gear, rehearsed(recipe), RECIPE, BATCH)
    monkeypatch.delitem(sys.modules, module)
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    check_against(gear, recipe, RECIPE, BATCH)


@pytest.mark.parametrize(
    ("gear", "override", "also", "expected"),
    [
        (
            "pp",
            "perf.kernels=liger",
            "train.seed=1",
            "liger computes whole layers, which this gear divides among ranks",
        ),
        (
            "single",
            "perf.float8=true",
            "adapter.method=lora",
            "multiplies the weights that are trained, but an adapter",
        ),
        ("zero2", "perf.float8=true", "train.seed=1", "runs under the single, ddp and fsdp gears; use float8: false"),
        ("tp", "perf.float8=true", "train.seed=1", "runs under the single, ddp and fsdp gears; use float8: false"),
    ],
)
def test_kernels_of_other_packages_are_refused_where_they_do_not_fit(gear, override, also, expected):
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"(?m)^command line: {key}: {expected}"):
        check_against(
            load_gear(ROOT / "accelerate_configs" / f"{gear}.yaml"),
            load_recipe(RECIPE, [override, also]),
            RECIPE,
            BATCH,
        )


def test_compiling_is_refused_without_a_compiler(monkeypatch, tmp_path):
    gear, recipe = load_gear(ROOT / "accelerate_configs" / "ddp.yaml"), load_recipe(RECIPE, ["perf.compile=true"])
    check_against(gear, recipe, RECIPE, BATCH)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "clang++").touch(0o755)  # torch does not try it
    with pytest.raises(UserError, match=r"^command line: perf.compile: needs a C\+\+ compiler, and there is none"):
        check_against(gear, recipe, RECIPE, BATCH)


def test_flash_attention_is_refused_without_its_package(monkeypatch):
    gear = load_gear(ROOT / "accelerate_configs" / "single.yaml")
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    recipe = load_recipe(RECIPE, ["model.attention=flash_attention_2"])
    advice = (
        r"model\.attention: flash_attention_2 needs flash_attn, which is not installed; use auto \(torch's own flash"
    )
    with pytest.raises(UserError, match=advice):
        check_against(gear, recipe, RECIPE, BATCH)
    assert rehearsed(recipe).model.attention == "auto", "a rehearsal needs no GPU"


def test_a_degree_that_does_not_divide_the_model_is_refused_with_those_that_do(tmp_path):
    from transformers import PretrainedConfig

    from gearbox.checks.model import check_architecture

    def refusal(name, flags, **changes):
        shape = {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 3}
        plans = {"base_model_tp_plan": {"layers.*.q_proj": "colwise"}, "base_model_pp_plan": {"layers": ()}}
        sizes = {key: int(size) for key, size in flags.items() if key != "num_processes"}  # pp has no flag
        changes_to_gear = {"parallelism_config": sizes} if sizes else {}
        gear = load_gear(written(tmp_path, name, **changes_to_gear), {k: v for k, v in flags.items() if k not in sizes})
        with pytest.raises(UserError) as caught:
            check_architecture(gear, PretrainedConfig(**shape | plans | changes))
        return str(caught.value)

    three = {"num_processes": "3"}
    heads = "12 attention heads and 4 key-value heads; use 1 or 2 or 4"
    assert f"3 does not divide this model's {heads}" in refusal("tp", three | {"parallelism_config_tp_size": "3"})
    heads = "12 attention heads and 4 key-value heads; use 1 or 2 or 4 or 12"
    assert f"3 does not divide this model's {heads}" in refusal("ulysses", three | {"parallelism_config_sp_size": "3"})
    many = {"num_processes": "4", "parallelism_config_pp_size": "4"}
    assert "4 stages, but this model has 3 layers; use 3 or fewer" in refusal("pp", many)
    assert "transformers has no tensor-parallel plan for llama; use accelerate_configs/fsdp" in refusal(
        "tp", {}, base_model_tp_plan=None
    )
    assert "llama fuses matrices that tensor parallelism would split" in refusal(
        "tp", {}, base_model_tp_plan={"a": "packed_colwise"}
    )
    assert "there are no experts to divide in llama; use accelerate_configs/fsdp" in refusal("ep", {})
    assert "no expert-parallel plan for llama; use accelerate_configs/fsdp" in refusal("ep", {}, num_experts=8)
    plan = {"base_model_ep_plan": {"layers.*.mlp.experts": "ep_dispatch_experts"}}
    assert "there are no experts to divide in llama" in refusal("ep", {}, **plan), "as for Gemma 4's dense models"
    text = "ep_size: 2 does not divide this model's 9 experts; use 1 or 3 or 9"
    assert text in refusal("ep", {}, num_local_experts=9, **plan)
    text = "num_processes: 8 ranks cannot divide 12 experts evenly; use 4, or accelerate_configs/fsdp.yaml"
    assert text in refusal("ep", {"num_processes": "8"}, n_routed_experts=12, **plan)
    assert "or model.router_loss=0" in refusal("ulysses", {}, router_aux_loss_coef=0.1)
