"""Read and check a gear, which decides how to run: an Accelerate config file and its ZeRO JSON.

Only this module and distributed/ may name an engine. Nothing here imports torch, so a wrong key is reported in well
under a second. Accelerate and DeepSpeed silently ignore such keys.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from gearbox import ROOT
from gearbox.config.loader import RawMapping, read_yaml
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError, nearest

if TYPE_CHECKING:
    from gearbox.config.job import BatchPlan

EngineName = Literal["single", "ddp", "fsdp", "zero", "tp", "pp"]
# Keyed by Accelerate's distributed_type.
ENGINES: dict[str, EngineName] = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "zero"}

# Keys that Accelerate 1.15 reads. tests/config/test_gear.py compares them with its launcher's parser.
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
# Each degree of parallelism, with the values of distributed_type that allow it. A degree is the number of ranks that
# share one copy of something. The names are Accelerate's, except pp and pp_schedule, which Accelerate ignores.
DEGREES = {
    "dp_replicate": ("FSDP",),
    "dp_shard": ("FSDP",),
    "tp": ("MULTI_GPU", "FSDP"),
    "sp": ("DEEPSPEED",),
    "cp": ("FSDP",),
    "pp": ("MULTI_GPU",),
}
SCHEDULES = ("1f1b", "gpipe")
PARALLELISM_KEYS = [f"parallelism_config_{name}_size" for name in DEGREES] + ["parallelism_config_pp_schedule"]
# Top-level keys that DeepSpeed 0.19 reads. It checks the keys inside zero_optimization itself.
ZERO_JSON_KEYS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping steps_per_print
    zero_optimization bf16 fp16 communication_data_type data_types prescale_gradients gradient_predivide_factor
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown dump_state
    activation_checkpointing aio flops_profiler comms_logger checkpoint compile disable_allgather
""".split()
NESTED = {"fsdp_config": FSDP_KEYS, "deepspeed_config": DEEPSPEED_KEYS, "parallelism_config": PARALLELISM_KEYS}
OWNED_BY_RECIPE = {"optimizer": "optim", "scheduler": "schedule"}


@dataclass(frozen=True)
class Gear:
    """A gear: a file of accelerate_configs/ and its ZeRO JSON, with the launcher's flags applied."""

    path: Path
    settings: RawMapping
    """The content of the file, with the launcher's flags applied."""
    zero_json: RawMapping | None
    """DeepSpeed's settings; None if the engine is not ZeRO."""
    zero_path: Path | None
    """The file that contains these settings."""
    num_processes: int

    @property
    def name(self) -> str:
        """The file name without its extension."""
        return self.path.stem

    @property
    def engine(self) -> EngineName:
        """The engine that runs the ranks, from distributed_type and the degrees of parallelism."""
        engine = ENGINES[self.settings.get("distributed_type", "NO")]
        if engine == "ddp":  # pp and tp ranks share one copy of the model
            return "pp" if self.degree("pp") > 1 else "tp" if self.degree("tp") > 1 else "ddp"
        return engine

    def degree(self, name: str) -> int:
        """Return the number of ranks that share a layer (tp), a sequence (sp, cp) or the stack of layers (pp).

        For dp_replicate, it is the number of replicas of a sharded model (HSDP).
        """
        return int((self.settings.get("parallelism_config") or {}).get(f"parallelism_config_{name}_size", 1))

    @property
    def schedule(self) -> str:
        """The order in which a pipeline's stages run forward and backward: 1f1b or gpipe."""
        return str((self.settings.get("parallelism_config") or {}).get("parallelism_config_pp_schedule", SCHEDULES[0]))

    @property
    def data_parallel(self) -> int:
        """The number of parts that a step's rows are divided into. Ranks of the other degrees share a part."""
        return self.num_processes // math.prod(self.degree(name) for name in ("tp", "sp", "cp", "pp"))

    @property
    def averaged_over(self) -> int:
        """The number of ranks whose gradients the engine averages: those with different tokens."""
        return self.data_parallel * self.degree("cp") * self.degree("sp")

    @property
    def shard(self) -> int:
        """The number of ranks that share the weights of a sharded model, not counting tp."""
        together = self.num_processes if self.degree("sp") > 1 else self.data_parallel * self.degree("cp")
        return together // self.degree("dp_replicate")

    def data_rank(self, rank: int) -> int:
        """Return the index of the part of the rows that a rank takes.

        Ranks are ordered by pp, dp_replicate, dp_shard, cp or sp, tp.
        """
        return rank // math.prod(self.degree(name) for name in ("tp", "sp", "cp")) % self.data_parallel

    def eval_shard(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's part of the evaluation rows, and the number of parts.

        Ranks that share a sequence in training evaluate different sequences.
        """
        parts = self.num_processes // (self.degree("tp") * self.degree("pp"))
        return rank // self.degree("tp") % parts, parts

    @property
    def offload(self) -> str | None:
        """The place that weights or optimizer state are offloaded to: cpu or nvme; None if they stay on the GPU."""
        if (
            str((self.settings.get("fsdp_config") or {}).get("fsdp_offload_params")).lower() == "true"
        ):  # as Accelerate reads it
            return "cpu"
        zero = (self.zero_json or {}).get("zero_optimization", {})
        devices = {zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")}
        return "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else None

    @property
    def compiled(self) -> list[str]:
        """The DeepSpeed operations that are compiled when this gear first starts."""
        settings = self.zero_json or {}
        names = ["async_io"] if self.offload == "nvme" else []
        on_host = "offload_optimizer" in settings.get("zero_optimization", {})
        return names + (["cpu_adam"] if on_host and settings.get("zero_force_ds_cpu_optimizer") is not False else [])

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 if the engine is not ZeRO."""
        return int((self.zero_json or {}).get("zero_optimization", {}).get("stage", 0))

    @property
    def precision(self) -> str:
        """The forward precision in the gear's files, no (fp32) or bf16. On the CPU, a run uses fp32."""
        if self.zero_json is not None:
            return "bf16" if self.zero_json.get("bf16", {}).get("enabled") is True else "no"
        return str(self.settings.get("mixed_precision", "no"))

    def filled_json(self, recipe: Recipe, batch: BatchPlan, precision: str) -> RawMapping:
        """Return the ZeRO JSON with every "auto" replaced by the recipe's value."""
        assert self.zero_json is not None
        filled: RawMapping = json.loads(json.dumps(self.zero_json))
        filled["bf16"] = {**filled.get("bf16", {}), "enabled": precision == "bf16"}
        filled["gradient_clipping"] = recipe.optim.max_grad_norm
        filled["gradient_accumulation_steps"] = batch.accumulation_steps
        filled["train_micro_batch_size_per_gpu"] = batch.micro_rows
        filled["train_batch_size"] = batch.num_padded_rows
        if self.degree("sp") > 1:
            filled["sequence_parallel_size"] = self.degree("sp")
        filled["steps_per_print"] = 2**31  # silences DeepSpeed's log line, which repeats ours
        return filled


def gear_names() -> list[str]:
    """Return the names of the gears in accelerate_configs/."""
    return sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))


def gear_path(name: str) -> Path:
    """Return the file of a gear, given its name in accelerate_configs/ or a path that ends in .yaml."""
    known = gear_names()
    if not name.endswith(".yaml") and name not in known:
        raise UserError(f"{name}: unknown gear{nearest(name, known) or '; the gears are ' + ', '.join(known)}")
    return Path(name) if name.endswith(".yaml") else ROOT / "accelerate_configs" / f"{name}.yaml"


def load_gear(path: Path, flags: dict[str, str] | None = None) -> Gear:
    """Read and check a gear. The launcher's `flags` override the file. Raise UserError with every problem."""
    flags = flags or {}
    settings = _with_flags(read_yaml(path), flags)
    kind, groups = settings.get("distributed_type", "NO"), _nested_groups(settings)
    zero_path = None
    if kind == "DEEPSPEED":
        zero_path = _resolve(groups["deepspeed_config"].get("deepspeed_config_file"), path)
    problems = _unknown_keys(settings) + _unsupported_settings(settings, groups, zero_path)
    given = flags.get("num_processes", settings.get("num_processes", 1))
    num_processes = int(str(given)) if str(given).isdigit() else 0
    if num_processes < 1:
        problems.append(f"num_processes: must be an integer >= 1, found {given!r}")
    elif not problems:
        problems += _wrong_degrees(kind, groups["parallelism_config"], num_processes)
    problems = [f"{path}: {problem}" for problem in problems]
    zero_json = None
    if zero_path is not None:
        try:
            zero_json = _read_zero_json(zero_path)
            problems += _wrong_for_sequences(zero_path, zero_json, groups["parallelism_config"])
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return Gear(path, settings, zero_json, zero_path, num_processes)


def _with_flags(settings: RawMapping, flags: dict[str, str]) -> RawMapping:
    """Return a file's settings, overridden by the launcher's flags."""
    settings = settings | {key: flags[key] for key in ("mixed_precision",) if key in flags}
    for group, known in NESTED.items():
        if given := {key: yaml.safe_load(flags[key]) for key in known if key in flags}:
            settings[group] = (settings.get(group) or {}) | given
    return settings


def _nested_groups(settings: RawMapping) -> dict[str, RawMapping]:
    """Return each nested group of settings. A group that is missing or not a mapping is empty."""
    groups = {name: settings.get(name) or {} for name in NESTED}
    return {name: group if isinstance(group, dict) else {} for name, group in groups.items()}


def _unknown_keys(settings: RawMapping) -> list[str]:
    """Return a problem for each key that Accelerate does not read, with the nearest known key."""
    problems = [f"{key}: unknown key{nearest(str(key), TOP_KEYS)}" for key in settings if key not in TOP_KEYS]
    for group, known in NESTED.items():
        content = settings.get(group) or {}
        if not isinstance(content, dict):
            problems.append(f"{group}: must be a mapping, found {content!r}")
            continue
        problems += [f"{group}.{key}: unknown key{nearest(str(key), known)}" for key in content if key not in known]
    return problems


def _unsupported_settings(settings: RawMapping, groups: dict[str, RawMapping], zero_path: Path | None) -> list[str]:
    """Return the problems with the engine, its files and its precision."""
    problems = []
    kind = settings.get("distributed_type", "NO")
    if kind not in ENGINES:
        hint = " (quoted, because YAML reads NO as false)" if kind is False else ""
        problems.append(f'distributed_type: {kind!r} is not supported; use "NO"{hint}, MULTI_GPU, FSDP or DEEPSPEED')
    if kind == "FSDP" and groups["fsdp_config"].get("fsdp_version") != 2:
        problems.append("fsdp_config.fsdp_version: must be 2; version 1 is not supported")
    if settings.get("use_cpu") is True and kind != "NO":
        problems.append(
            f"use_cpu: true silently turns {kind} into plain data parallelism; remove it: a CPU run does not need it"
        )
    if settings.get("mixed_precision", "no") not in ("no", "bf16"):
        problems.append(f"mixed_precision: {settings['mixed_precision']!r} is not supported; use bf16, or no for fp32")
    if kind == "DEEPSPEED" and "mixed_precision" in settings:
        problems.append(
            "mixed_precision: belongs in the ZeRO JSON (bf16.enabled); Accelerate allows only one of the two"
        )
    if kind == "DEEPSPEED" and zero_path is None:
        problems.append("deepspeed_config.deepspeed_config_file: must name a JSON file such as ds_configs/zero3.json")
    return problems


def _wrong_degrees(kind: str, parallelism: RawMapping, num_processes: int) -> list[str]:
    """Return the problems with the degrees of parallelism, each with its key. `kind` is distributed_type."""
    sizes = {name: parallelism.get(f"parallelism_config_{name}_size", 1) for name in DEGREES}
    if wrong := {name: size for name, size in sizes.items() if type(size) is not int or size < 1}:
        return [f"{_size_key(name)}: must be an integer >= 1, found {size!r}" for name, size in wrong.items()]
    degrees = {name: size for name, size in sizes.items() if size > 1}
    problems = [
        f"{_size_key(name)}: {kind} does not support this; distributed_type must be {' or '.join(DEGREES[name])}"
        for name in degrees
        if kind not in DEGREES[name]
    ]
    if len(joined := degrees.keys() & {"tp", "cp", "pp"}) > 1:
        problems.append(
            f"parallelism_config: {' and '.join(sorted(joined))} cannot be combined; tp can be combined with FSDP"
        )
    schedule = parallelism.get("parallelism_config_pp_schedule", SCHEDULES[0])
    if schedule not in SCHEDULES:
        problems.append(
            f"parallelism_config.parallelism_config_pp_schedule: unknown {schedule!r}; use {' or '.join(SCHEDULES)}"
        )
    if problems or not degrees:
        return problems
    return _wrong_num_processes(kind, degrees, num_processes)


def _size_key(name: str) -> str:
    """Return the key of a degree of parallelism."""
    return f"parallelism_config.parallelism_config_{name}_size"


def _wrong_num_processes(kind: str, degrees: dict[str, int], num_processes: int) -> list[str]:
    """Return the reason why this number of ranks does not fit these degrees, which are all above 1."""
    fixed = {name: size for name, size in degrees.items() if name != "dp_shard"}
    product = math.prod(fixed.values())
    named = " x ".join(f"{name}={size}" for name, size in fixed.items())
    if num_processes % product:
        near = max(1, num_processes // product) * product
        return [f"num_processes: {num_processes} ranks are not divisible by {named}; use {near} or {near + product}"]
    rest = num_processes // product
    if degrees.get("dp_shard", rest) != rest:
        return [f"{_size_key('dp_shard')}: {num_processes} ranks / ({named or 1}) is {rest}, not {degrees['dp_shard']}"]
    if "dp_replicate" in degrees and rest * degrees.get("cp", 1) == 1:
        return [
            f"num_processes: {num_processes} ranks in {degrees['dp_replicate']} replicas leave one rank per replica, "
            f"with nothing to shard; use {2 * product} ranks, or accelerate_configs/ddp.yaml"
        ]
    if kind == "MULTI_GPU" and "tp" in degrees and rest > 1:
        return [f"num_processes: {num_processes} ranks exceed tp={degrees['tp']}; more ranks need FSDP (see fsdp_tp)"]
    return []


def _wrong_for_sequences(zero_path: Path, zero_json: RawMapping, parallelism: RawMapping) -> list[str]:
    """Return the reason why sequence parallelism cannot run with this ZeRO JSON.

    In stage 3 with reduce_scatter, DeepSpeed 0.19 averages gradients over all ranks. Otherwise it averages only over
    ranks with different rows.
    """
    zero = zero_json["zero_optimization"]
    if parallelism.get("parallelism_config_sp_size", 1) == 1 or (
        zero["stage"] == 3 and zero.get("reduce_scatter", True)
    ):
        return []
    return [
        f"{zero_path}: zero_optimization: sequence parallelism is tested only with stage 3 and reduce_scatter; "
        "otherwise DeepSpeed scales the gradients differently"
    ]


def _resolve(name: str | None, gear_path: Path) -> Path | None:
    """Return the path of a ZeRO JSON, or None if no name is given.

    A relative name is looked up in the working directory, as Accelerate does, then in the folder above
    accelerate_configs/.
    """
    if not name:
        return None
    path = Path(name)
    return path if path.exists() or path.is_absolute() else gear_path.resolve().parent.parent / path


def _read_zero_json(path: Path) -> RawMapping:
    """Read and check a ZeRO JSON. Raise UserError with every problem."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # raised for invalid UTF-8 too
        raise UserError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object, found {type(content).__name__}")
    problems = []
    groups: dict[str, RawMapping] = {}
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
        if key in OWNED_BY_RECIPE:
            problems.append(f"{key}: is set by the recipe ({OWNED_BY_RECIPE[key]}:); remove it")
        elif key not in ZERO_JSON_KEYS:
            problems.append(f"{key}: unknown key, which DeepSpeed would ignore{nearest(key, ZERO_JSON_KEYS)}")
    if groups["fp16"].get("enabled"):
        problems.append("fp16.enabled: is not supported; use bf16")
    if groups["bf16"].get("enabled"):
        if content.get("communication_data_type") != "fp32":
            problems.append("communication_data_type: must be fp32; otherwise DeepSpeed reduces the gradients in bf16")
        if groups["data_types"].get("grad_accum_dtype") != "fp32":
            problems.append(
                "data_types.grad_accum_dtype: must be fp32; otherwise DeepSpeed accumulates the gradients in bf16"
            )
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return content
