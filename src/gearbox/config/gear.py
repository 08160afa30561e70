"""The gear: how to run. Reads an Accelerate config and its ZeRO JSON.

With `backend`, the only module that may name an engine. Nothing here imports torch, so that a wrong key, which
Accelerate and DeepSpeed drop in silence, is reported in well under a second.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from gearbox import ROOT
from gearbox.config.loader import read_yaml
from gearbox.config.recipe import BatchPlan, Recipe
from gearbox.errors import UserError, nearest

Engine = Literal["single", "ddp", "fsdp", "zero", "tp", "pp"]
ENGINES: dict[str, Engine] = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "zero"}

# Names that accelerate 1.15 reads; tests/test_gear.py compares them with its launcher's parser.
TOP_KEYS = """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids
    main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity
    deepspeed_config fsdp_config parallelism_config downcast_bf16
""".split()
FSDP_KEYS = """
    fsdp_version fsdp_offload_params fsdp_reshard_after_forward fsdp_auto_wrap_policy
    fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_state_dict_type fsdp_cpu_ram_efficient_loading
""".split()
DEEPSPEED_KEYS = "deepspeed_config_file deepspeed_hostfile deepspeed_multinode_launcher zero3_init_flag".split()
# Degrees: how many ranks share one copy of something. Of accelerate's names those whose value is not derived here, and
# two of our own, which accelerate passes over.
DEGREES = ("dp_replicate", "dp_shard", "tp", "sp", "cp", "pp")
SCHEDULES = ("1f1b", "gpipe")
PARALLELISM_KEYS = [f"parallelism_config_{name}_size" for name in DEGREES] + ["parallelism_config_pp_schedule"]
# Top-level names that deepspeed 0.19 reads; inside zero_optimization it checks them itself.
ZERO_JSON_KEYS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping steps_per_print
    zero_optimization bf16 fp16 communication_data_type data_types prescale_gradients gradient_predivide_factor
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown dump_state
    activation_checkpointing aio flops_profiler comms_logger checkpoint compile disable_allgather
""".split()
NESTED = {"fsdp_config": FSDP_KEYS, "deepspeed_config": DEEPSPEED_KEYS, "parallelism_config": PARALLELISM_KEYS}
RECIPES_OWN = {"optimizer": "optim", "scheduler": "schedule"}


@dataclass(frozen=True)
class Gear:
    """A file of accelerate_configs/ with its JSON, and what the launcher's flags changed of it."""

    path: Path
    settings: dict[str, Any]
    zero_json: dict[str, Any] | None
    zero_path: Path | None
    num_processes: int

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def engine(self) -> Engine:
        engine = ENGINES[self.settings.get("distributed_type", "NO")]
        if engine == "ddp":  # ranks that share a copy instead of having one each
            return "pp" if self.degree("pp") > 1 else "tp" if self.degree("tp") > 1 else "ddp"
        return engine

    def degree(self, name: str) -> int:
        """How many ranks share a copy: of each layer (tp), of a sequence (sp, cp), of the stack of layers (pp).

        dp_replicate are the copies of a sharded model (HSDP).
        """
        return int((self.settings.get("parallelism_config") or {}).get(f"parallelism_config_{name}_size", 1))

    @property
    def schedule(self) -> str:
        """In which order a pipeline's stages run forward and backward: 1f1b or gpipe."""
        return (self.settings.get("parallelism_config") or {}).get("parallelism_config_pp_schedule", SCHEDULES[0])

    @property
    def data_parallel(self) -> int:
        """Into how many parts the rows of a step are dealt. The other degrees share the rows of a part."""
        return self.num_processes // math.prod(self.degree(name) for name in ("tp", "sp", "cp", "pp"))

    @property
    def averaged_over(self) -> int:
        """Over how many ranks the engine takes the mean of the gradients: all that have tokens of their own."""
        return self.data_parallel * self.degree("cp") * self.degree("sp")

    @property
    def shard(self) -> int:
        """How many ranks share the weights of a sharded model, beside tp."""
        together = self.num_processes if self.degree("sp") > 1 else self.data_parallel * self.degree("cp")
        return together // self.degree("dp_replicate")

    def data_rank(self, rank: int) -> int:
        """Which part of the rows a rank takes. The order of ranks is pp, dp_replicate, dp_shard, cp or sp, tp."""
        return rank // math.prod(self.degree(name) for name in ("tp", "sp", "cp")) % self.data_parallel

    def eval_shard(self, rank: int) -> tuple[int, int]:
        """The same, with the number of parts, where nothing is trained: each rank then has sequences of its own."""
        parts = self.num_processes // (self.degree("tp") * self.degree("pp"))
        return rank // self.degree("tp") % parts, parts

    @property
    def offload(self) -> str | None:
        """Where weights and optimizer state wait: cpu, nvme, or None where they stay on the GPU."""
        if str((self.settings.get("fsdp_config") or {}).get("fsdp_offload_params")).lower() == "true":  # as accelerate
            return "cpu"
        zero = (self.zero_json or {}).get("zero_optimization", {})
        devices = {zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")}
        return "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else None

    @property
    def compiled(self) -> list[str]:
        """DeepSpeed's operations that are compiled when this gear first starts."""
        settings = self.zero_json or {}
        names = ["async_io"] if self.offload == "nvme" else []
        on_host = "offload_optimizer" in settings.get("zero_optimization", {})
        return names + (["cpu_adam"] if on_host and settings.get("zero_force_ds_cpu_optimizer") is not False else [])

    @property
    def zero_stage(self) -> int:
        """0 where the engine is not ZeRO."""
        return int((self.zero_json or {}).get("zero_optimization", {}).get("stage", 0))

    @property
    def precision(self) -> str:
        """no (fp32) or bf16, before a rehearsal makes it fp32."""
        if self.zero_json is not None:
            return "bf16" if self.zero_json.get("bf16", {}).get("enabled") is True else "no"
        return str(self.settings.get("mixed_precision", "no"))

    def filled_json(self, recipe: Recipe, batch: BatchPlan, precision: str) -> dict[str, Any]:
        """The ZeRO JSON with each number that the recipe owns put in place of "auto"."""
        assert self.zero_json is not None
        filled = json.loads(json.dumps(self.zero_json))
        filled["bf16"] = {**filled.get("bf16", {}), "enabled": precision == "bf16"}
        filled["gradient_clipping"] = recipe.optim.max_grad_norm
        filled["gradient_accumulation_steps"] = batch.accumulation_steps
        filled["train_micro_batch_size_per_gpu"] = batch.micro_rows
        filled["train_batch_size"] = batch.num_padded_rows
        if self.degree("sp") > 1:
            filled["sequence_parallel_size"] = self.degree("sp")
        filled["steps_per_print"] = 2**31  # DeepSpeed's own log line is noise beside ours
        return filled


def gear_names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))


def gear_path(name: str) -> Path:
    """Of a gear of accelerate_configs/ by its name, or of any by its path, which ends in .yaml."""
    known = gear_names()
    if not name.endswith(".yaml") and name not in known:
        raise UserError(f"{name}: there is no such gear{nearest(name, known) or '; the gears: ' + ', '.join(known)}")
    return Path(name) if name.endswith(".yaml") else ROOT / "accelerate_configs" / f"{name}.yaml"


def load_gear(path: Path, flags: dict[str, str] | None = None) -> Gear:
    """Read and check a gear; `flags` are the launcher's, which beat the file. Raises UserError with every problem."""
    flags = flags or {}
    settings = read_yaml(path) | {key: flags[key] for key in ("mixed_precision",) if key in flags}
    for group, known in NESTED.items():
        if given := {key: yaml.safe_load(flags[key]) for key in known if key in flags}:
            settings[group] = (settings.get(group) or {}) | given
    problems = []

    problems += [f"{key}: there is no such key{nearest(str(key), TOP_KEYS)}" for key in settings if key not in TOP_KEYS]
    nested: dict[str, dict[str, Any]] = {}
    for group, known in NESTED.items():
        found = settings.get(group) or {}
        if not isinstance(found, dict):
            problems.append(f"{group}: must be a mapping, found {found!r}")
            found = {}
        problems += [
            f"{group}.{key}: there is no such key{nearest(str(key), known)}" for key in found if key not in known
        ]
        nested[group] = found
    kind = settings.get("distributed_type", "NO")
    if kind not in ENGINES:
        hint = " (in quotes: YAML reads NO as false)" if kind is False else ""
        problems.append(f'distributed_type: {kind!r} is no engine here; use "NO"{hint}, MULTI_GPU, FSDP or DEEPSPEED')
    if kind == "FSDP" and nested["fsdp_config"].get("fsdp_version") != 2:
        problems.append("fsdp_config.fsdp_version: must be 2; version 1 is not supported")
    if settings.get("use_cpu") is True and kind != "NO":
        problems.append(
            f"use_cpu: true silently turns {kind} into plain data parallelism; remove it, a rehearsal needs none"
        )
    if settings.get("mixed_precision", "no") not in ("no", "bf16"):
        problems.append(f"mixed_precision: {settings['mixed_precision']!r} is not supported; use bf16, or no for fp32")
    zero_json, zero_path = None, None
    if kind == "DEEPSPEED":
        if "mixed_precision" in settings:
            problems.append(
                "mixed_precision: belongs into the ZeRO JSON (bf16.enabled); accelerate allows one of the two"
            )
        zero_path = _resolve(nested["deepspeed_config"].get("deepspeed_config_file"), path)
        if zero_path is None:
            problems.append("deepspeed_config.deepspeed_config_file: must name a JSON such as ds_configs/zero3.json")
    asked = flags.get("num_processes", settings.get("num_processes", 1))
    num_processes = int(asked) if str(asked).isdigit() else 0
    if num_processes < 1:
        problems.append(f"num_processes: must be a whole number from 1, found {asked!r}")
    elif not problems:
        problems += _wrong_degrees(kind, nested["parallelism_config"], num_processes)
    told = [f"{path}: {problem}" for problem in problems]
    if zero_path is not None:
        try:
            zero_json = _read_json(zero_path)
            told += _wrong_for_sequences(zero_path, zero_json, nested["parallelism_config"])
        except UserError as error:
            told.append(str(error))
    if told:
        raise UserError("\n".join(told))
    return Gear(path, settings, zero_json, zero_path, num_processes)


def _wrong_degrees(kind: str, given: dict[str, Any], num_processes: int) -> list[str]:
    """What is wrong with the degrees of parallelism, each with its key."""
    key = "parallelism_config.parallelism_config_{}_size"
    sizes = {name: given.get(f"parallelism_config_{name}_size", 1) for name in DEGREES}
    if odd := {name: size for name, size in sizes.items() if type(size) is not int or size < 1}:
        return [f"{key.format(name)}: must be a whole number from 1, found {size!r}" for name, size in odd.items()]
    asked = {name: size for name, size in sizes.items() if size > 1}
    allowed = {
        "dp_replicate": ("FSDP",), "dp_shard": ("FSDP",), "tp": ("MULTI_GPU", "FSDP"), "sp": ("DEEPSPEED",),
        "cp": ("FSDP",), "pp": ("MULTI_GPU",),
    }  # fmt: skip
    problems = [
        f"{key.format(name)}: {kind} cannot do this; distributed_type must be {' or '.join(allowed[name])}"
        for name in asked
        if kind not in allowed[name]
    ]
    if len(shared := asked.keys() & {"tp", "cp", "pp"}) > 1:
        problems.append(
            f"parallelism_config: {' and '.join(sorted(shared))} cannot be joined; tp can with FSDP's shards"
        )
    schedule = given.get("parallelism_config_pp_schedule", SCHEDULES[0])
    if schedule not in SCHEDULES:
        problems.append(f"parallelism_config.parallelism_config_pp_schedule: {schedule!r} is none of {SCHEDULES}")
    if problems or not asked:
        return problems
    together = math.prod(size for name, size in asked.items() if name != "dp_shard")
    named = " x ".join(f"{name} {size}" for name, size in asked.items() if name != "dp_shard")
    if num_processes % together:
        near = max(1, num_processes // together) * together
        return [f"num_processes: {num_processes} ranks cannot be cut into {named}; {near} or {near + together} can"]
    rest = num_processes // together
    if "dp_shard" in asked and sizes["dp_shard"] != rest:
        return [f"{key.format('dp_shard')}: {num_processes} ranks / ({named or 1}) are {rest}, not {sizes['dp_shard']}"]
    if "dp_replicate" in asked and rest * sizes["cp"] == 1:
        return [
            f"num_processes: {num_processes} ranks in {sizes['dp_replicate']} copies leave each copy one rank, with "
            f"nothing to cut; give {2 * together} ranks, or take accelerate_configs/ddp.yaml"
        ]
    if kind == "MULTI_GPU" and "tp" in asked and rest > 1:
        return [f"num_processes: {num_processes} ranks are more than tp {sizes['tp']}; with FSDP (fsdp_tp) they can be"]
    return []


def _wrong_for_sequences(zero_path: Path, zero_json: dict[str, Any], degrees: dict[str, Any]) -> list[str]:
    """DeepSpeed 0.19 averages over all ranks in stage 3 with reduce_scatter, else over those with other rows."""
    zero = zero_json["zero_optimization"]
    if degrees.get("parallelism_config_sp_size", 1) == 1 or (zero["stage"] == 3 and zero.get("reduce_scatter", True)):
        return []
    return [
        f"{zero_path}: zero_optimization: sequence parallelism is trained and tested with stage 3 and reduce_scatter "
        "alone: else DeepSpeed scales the gradients otherwise"
    ]


def _resolve(name: Any, gear_path: Path) -> Path | None:
    """As accelerate does, from the working directory; else from the folder that holds accelerate_configs/."""
    if not name:
        return None
    path = Path(name)
    return path if path.exists() or path.is_absolute() else gear_path.resolve().parent.parent / path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # also of what is not UTF-8
        raise UserError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object, found {type(content).__name__}")
    problems = []
    groups: dict[str, dict[str, Any]] = {}
    for key in ("bf16", "fp16", "data_types", "zero_optimization"):
        groups[key] = content.get(key, {})
        if not isinstance(groups[key], dict):
            problems.append(f"{key}: must be an object, found {groups[key]!r}")
            groups[key] = {}
    if groups["zero_optimization"].get("stage") not in (1, 2, 3):
        problems.append(
            f"zero_optimization.stage: must be 1, 2 or 3, found {groups['zero_optimization'].get('stage')!r}"
        )
    if not isinstance(groups["bf16"].get("enabled", False), bool):
        problems.append(f"bf16.enabled: must be true or false, found {groups['bf16']['enabled']!r}")
    for key in content:
        if key in RECIPES_OWN:
            problems.append(f"{key}: the recipe owns this ({RECIPES_OWN[key]}:); remove it")
        elif key not in ZERO_JSON_KEYS:
            problems.append(f"{key}: there is no such key, DeepSpeed would ignore it{nearest(key, ZERO_JSON_KEYS)}")
    if groups["fp16"].get("enabled"):
        problems.append("fp16.enabled: is not supported; use bf16")
    if groups["bf16"].get("enabled"):
        if content.get("communication_data_type") != "fp32":
            problems.append("communication_data_type: must be fp32, else DeepSpeed reduces the gradients in bf16")
        if groups["data_types"].get("grad_accum_dtype") != "fp32":
            problems.append(
                "data_types.grad_accum_dtype: must be fp32, else DeepSpeed accumulates the gradients in bf16"
            )
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return content
