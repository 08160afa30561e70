"""Test that a gear contains only keys that the engines read, and numbers that agree with the recipe."""

import re

import pytest
import yaml

from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.config.job import BatchPlan
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from support.gears import written

SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
RECIPE = ROOT / "recipes" / "tiny.yaml"
EP = {"parallelism_config_ep_size": 2}
EP_IN_REPLICAS = EP | {"parallelism_config_dp_replicate_size": 2}
CP_IN_REPLICAS = {"parallelism_config_cp_size": 2, "parallelism_config_dp_replicate_size": 2}


# Engine, ZeRO stage, data-parallel parts, and ranks that share the weights.
GEARS = {
    "single": ("single", 0, 1, 1), "ddp": ("ddp", 0, 4, 4), "fsdp": ("fsdp", 0, 2, 2),
    "fsdp_offload": ("fsdp", 0, 2, 2), "hsdp": ("fsdp", 0, 4, 2), "fsdp_tp": ("fsdp", 0, 2, 2),
    "ep": ("fsdp", 0, 2, 2),
    "ring": ("fsdp", 0, 1, 2), "tp": ("tp", 0, 1, 1), "pp": ("pp", 0, 1, 1),
    "zero1": ("zero", 1, 2, 2), "zero2": ("zero", 2, 2, 2), "zero3": ("zero", 3, 2, 2),
    "zero3_offload": ("zero", 3, 2, 2), "zero3_nvme": ("zero", 3, 2, 2),
    "ulysses": ("zero", 3, 1, 2),
}  # fmt: skip


def test_every_shipped_gear_is_listed():
    assert {path.stem for path in SHIPPED} == {*GEARS}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_gear_loads_with_the_expected_engine(path):
    gear = load_gear(path)
    assert path.read_text().startswith("# ")
    assert gear.precision == "bf16"
    assert (gear.engine, gear.zero_stage, gear.data_parallel, gear.shard) == GEARS[path.stem]
    its_json = [ROOT / "ds_configs" / f"{path.stem}.json"] if gear.engine == "zero" else []
    assert [found.resolve() for found in [gear.zero_path] if found] == its_json


def test_a_gear_on_more_ranks():
    """The launch sets only the total number of ranks; the degrees that the file leaves open follow from it."""
    hsdp = load_gear(ROOT / "accelerate_configs/hsdp.yaml", {"num_processes": "8"})
    assert (hsdp.data_parallel, hsdp.shard) == (8, 4)
    both = load_gear(ROOT / "accelerate_configs/fsdp_tp.yaml", {"num_processes": "8"})
    assert [both.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [both.eval_shard(rank) for rank in (0, 1, 7)] == [(0, 4), (0, 4), (3, 4)]
    flags = {"num_processes": "8", "parallelism_config_tp_size": "4"}
    assert load_gear(ROOT / "accelerate_configs/fsdp_tp.yaml", flags).data_parallel == 2
    sequences = load_gear(ROOT / "accelerate_configs/ulysses.yaml", {"num_processes": "4"})
    assert [sequences.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert (sequences.shard, sequences.averaged_over, sequences.eval_shard(3)) == (4, 4, (3, 4))


def test_every_shipped_json_belongs_to_a_gear():
    named = {gear.zero_path.name for gear in map(load_gear, SHIPPED) if gear.zero_path}
    assert named == {path.name for path in (ROOT / "ds_configs").glob("*.json")}


FSDP = {"fsdp_version": 2}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("single", {"num_procesess": 2}, "num_procesess: unknown key; did you mean 'num_processes'?"),
        ("fsdp", {"fsdp_config": FSDP | {"fsdp_offload_param": True}}, "did you mean 'fsdp_offload_params'?"),
        ("fsdp", {"fsdp_config": FSDP | {"fsdp_sharding_strategy": 1}},
         "fsdp_config.fsdp_sharding_strategy: belongs to FSDP version 1; remove it, and use"),
        ("zero2", {"deepspeed_config": {"zero3_int_flag": True}}, "unknown key; did you mean 'zero3_init_"),
        ("fsdp", {"parallelism_config": {"parallelism_config_tp_sizes": 2}}, "did you mean 'parallelism_config_tp"),
        ("tp", {"parallelism_config": {"parallelism_config_tp_size": 0}}, "tp_size: must be an integer >= 1"),
        ("tp", {"num_processes": 3}, "num_processes: 3 ranks are not divisible by tp=2; use 2 or 4"),
        ("tp", {"num_processes": 4}, "num_processes: 4 ranks exceed tp=2; more ranks need FSDP (see fsdp_tp)"),
        ("hsdp", {"num_processes": 2}, "num_processes: 2 ranks in 2 replicas leave one rank per replica"),
        (
            "ring",
            {"num_processes": 4, "parallelism_config": CP_IN_REPLICAS},
            "4 ranks in 2 replicas leave 2 ranks per replica, all for tp or cp, with nothing to shard; use 8 ranks, or",
        ),
        ("ep", {"num_processes": 3}, "num_processes: 3 ranks are not divisible by ep=2; use 2 or 4"),
        ("ep", {"parallelism_config": EP_IN_REPLICAS, "num_processes": 4}, "dp_replicate and ep cannot be combined; "),
        ("ep", {"parallelism_config": EP | {"parallelism_config_dp_shard_size": 4}}, "2 ranks / (ep=2) is 2, not 4"),
        ("ddp", {"parallelism_config": EP}, "MULTI_GPU does not support this; distributed_type must be FSDP"),
        ("hsdp", {"num_processes": 5}, "num_processes: 5 ranks are not divisible by dp_replicate=2; use 4 or 6"),
        ("fsdp", {"parallelism_config": {"parallelism_config_dp_shard_size": 4}}, "2 ranks / (1) is 2, not 4"),
        ("ddp", {"parallelism_config": {"parallelism_config_sp_size": 2}}, "MULTI_GPU does not support this; "),
        ("zero3", {"parallelism_config": {"parallelism_config_cp_size": 2}}, "distributed_type must be FSDP"),
        ("ddp", {"parallelism_config": {"parallelism_config_pp_size": 2, "parallelism_config_tp_size": 2}},
         "parallelism_config: pp and tp cannot be combined; tp can be combined with FSDP, and so can ep"),
        ("ddp", {"parallelism_config": {"parallelism_config_pp_schedule": "2f2b"}},
         "pp_schedule: must be 1f1b or gpipe, found '2f2b'"),
        ("ulysses", {"zero_json": {"zero_optimization": {"stage": 2}}}, "is tested only with stage 3 and"),
        ("single", {"fsdp_config": [1]}, "must be a mapping, found [1]"),
        ("fsdp", {"fsdp_config": {"fsdp_version": 1}}, "fsdp_config.fsdp_version: must be 2; version 1"),
        ("fsdp", {"fsdp_config": {}}, "fsdp_config.fsdp_version: must be 2"),
        ("fsdp", {"use_cpu": True}, "use_cpu: true turns FSDP into plain data parallelism"),
        ("zero3", {"use_cpu": True}, "use_cpu: true turns DEEPSPEED into plain data parallelism"),
        ("ddp", {"mixed_precision": "fp16"}, "mixed_precision: must be bf16, or "),
        ("zero1", {"mixed_precision": "bf16"}, "mixed_precision: belongs in the ZeRO JSON (bf16.enabled)"),
        ("single", {"distributed_type": "MEGATRON_LM"}, "MULTI_GPU, FSDP or DEEPSPEED, found 'MEGATRON_LM'"),
        ("zero1", {"deepspeed_config": {}}, "deepspeed_config.deepspeed_config_file: must name a JSON"),
        ("ddp", {"num_processes": 0}, "num_processes: must be an integer >= 1, found 0"),
        ("ddp", {"num_processes": "two"}, "num_processes: must be an integer >= 1, found 'two'"),
        ("zero1", {"deepspeed_config": {"deepspeed_config_file": "/no.json"}}, "/no.json: no such file"),
        ("zero2", {"zero_json": {"optimizer": {"type": "Adam"}}}, "optimizer: is set by the recipe (optim:)"),
        ("zero2", {"zero_json": {"scheduler": {"type": "WarmupLR"}}}, "scheduler: is set by the recipe (schedule:)"),
        ("zero2", {"zero_json": {"gradient_cliping": 1}}, "unknown key; did you mean 'gradient_clipping'?"),
        ("zero2", {"zero_json": {"fp16": {"enabled": True}}}, "fp16.enabled: is not supported; use bf16"),
        ("zero2", {"zero_json": {"communication_data_type": "bf16"}}, "communication_data_type: must be fp32"),
        ("zero2", {"zero_json": {"data_types": {}}}, "data_types.grad_accum_dtype: must be fp32"),
        ("zero2", {"zero_json": "{'bf16': 1}"}, "zero.json: invalid JSON: "),
    ],
)  # fmt: skip
def test_each_mistake_is_named(tmp_path, name, changes, expected):
    with pytest.raises(UserError) as caught:
        load_gear(written(tmp_path, name, **changes))
    (line,) = [line for line in str(caught.value).splitlines() if expected in line]
    assert line.startswith((f"{tmp_path}/gear.yaml: ", f"{tmp_path}/zero.json: ", "/no.json: "))


def test_all_mistakes_in_a_gear_are_reported_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        load_gear(written(tmp_path, "fsdp", num_processes=0, use_cpu=True, mixed_precision="fp8", fsdp_config={"a": 1}))
    assert len(str(caught.value).splitlines()) == 5


def test_launcher_flags_override_the_file():
    gear = load_gear(ROOT / "accelerate_configs" / "ddp.yaml", {"num_processes": "7", "mixed_precision": "no"})
    assert (gear.num_processes, gear.precision) == (7, "no")
    with pytest.raises(UserError, match=r"^--mixed_precision=fp16: must be bf16, or "):
        load_gear(ROOT / "accelerate_configs" / "ddp.yaml", {"mixed_precision": "fp16"})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_filled_json_has_the_numbers_of_the_recipe(stage):
    gear = load_gear(ROOT / "accelerate_configs" / f"zero{stage}.yaml")
    recipe = load_recipe(RECIPE, ["optim.max_grad_norm=0.25"])
    batch = BatchPlan.divide(16, data_parallel=2, micro_rows=2)
    filled = gear.filled_json(recipe, batch, "no")
    by_width = {"stage3_param_persistence_threshold"} if stage == 3 else set()  # filled once the model is known
    assert {key for key, value in filled["zero_optimization"].items() if value == "auto"} == by_width
    assert "auto" not in filled.values() and "auto" in gear.zero_json.values()
    assert (filled["gradient_clipping"], filled["gradient_accumulation_steps"]) == (0.25, 4)
    assert (filled["train_micro_batch_size_per_gpu"], filled["train_batch_size"]) == (2, 4 * 2 * gear.num_processes)
    assert (filled["bf16"]["enabled"], gear.filled_json(recipe, batch, "bf16")["bf16"]["enabled"]) == (False, True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1]", "must be a JSON object, found list"),
        ('{"bf16": true, "zero_optimization": {"stage": 2}}', "bf16: must be a mapping, found True"),
        ('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}', "bf16.enabled: must be true or false"),
        ('{"zero_optimization": 3}', "zero_optimization: must be a mapping, found 3"),
        ('{"zero_optimization": {"stage": "auto"}}', "zero_optimization.stage: must be 1, 2 or 3, found 'auto'"),
        ("\xff", "cannot be read: "),
    ],
)
def test_json_of_the_wrong_shape_is_named(tmp_path, content, expected):
    (tmp_path / "z.json").write_bytes(content.encode("latin-1"))
    settings = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "z.json")},
    }
    (tmp_path / "g.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=re.escape(expected)):
        load_gear(tmp_path / "g.yaml")
