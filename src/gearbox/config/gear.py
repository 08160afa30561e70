"""Read and check a gear, which decides how to run: an Accelerate config file and its ZeRO JSON.

Only this module and distributed/ may name an engine. Nothing here imports torch, so a wrong key is reported in well
under a second. Accelerate and DeepSpeed silently ignore such keys.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gearbox import ROOT
from gearbox.config.compatibility import wrong_degrees, wrong_for_sequences
from gearbox.config.gear_keys import (
    BARE_FLAGS,
    ENGINE_FLAGS,
    FAMILIES,
    FLAGS,
    GEAR,
    GROUPS,
    SCHEDULES,
    ZERO_JSON,
    Key,
    Table,
    key_meant,
)
from gearbox.config.loader import RawMapping, read_text, read_yaml
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError, nearest, shown

if TYPE_CHECKING:
    from gearbox.config.job import BatchPlan

EngineName = Literal["single", "ddp", "fsdp", "zero", "tp", "pp"]
# Keyed by Accelerate's distributed_type.
ENGINES: dict[str, EngineName] = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "zero"}


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
        """Return the number of ranks that share a layer (tp), its experts (ep), a sequence (sp, cp) or all layers (pp).

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
    def shares_rows(self) -> bool:
        """True if several ranks share the tokens of each row, so that none sees a complete row in training."""
        return self.degree("sp") * self.degree("cp") > 1

    @property
    def has_several_meshes(self) -> bool:
        """True if some weights are divided among other ranks than the rest."""
        return self.degree("tp") * self.degree("ep") > 1

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
    def frees_weights(self) -> bool:
        """True unless FSDP keeps the gathered weights of each layer from its forward to its backward pass."""
        wrapping = self.settings.get("fsdp_config") or {}
        return str(wrapping.get("fsdp_reshard_after_forward", True)).lower() == "true"  # as Accelerate reads it

    @property
    def offload(self) -> str | None:
        """The place that weights or optimizer state are offloaded to: cpu or nvme; None if they stay on the GPU."""
        wrapping = self.settings.get("fsdp_config") or {}
        if str(wrapping.get("fsdp_offload_params")).lower() == "true":  # as Accelerate reads it
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


def load_gear(path: Path, flags: Mapping[str, str] | None = None) -> Gear:
    """Read and check a gear. The launcher's `flags` override the file. Raise UserError with every problem."""
    gear, problems = read_gear(path, flags or {})
    if gear is None or problems:
        raise UserError("\n".join(problems))
    return gear


def read_gear(path: Path, flags: Mapping[str, str]) -> tuple[Gear | None, list[str]]:
    """Return a gear without its wrong keys, or None if too little of it is right, and every problem."""
    try:
        settings, problems = _check(read_yaml(path), GEAR)
    except UserError as error:
        return None, [str(error)]
    problems = [(name, text) for name, text in problems if _leaf(name) not in flags]
    given, wrong_flags = _read_flags(flags)
    problems += wrong_flags
    settings = _with_flags(settings, given)
    groups = {name: settings.get(name) or {} for name in GROUPS}
    kind = settings.get("distributed_type", "NO")
    problems += _missing(settings, problems)
    if "distributed_type" in settings:  # without it, or with a wrong one, each key would seem to be out of place
        problems += _wrong_engine(kind, settings, groups, given)
    is_usable, num_processes = "distributed_type" in settings, settings.get("num_processes", 1)
    if wrong := wrong_degrees(kind, groups["parallelism_config"], num_processes):
        is_usable, problems = False, problems or wrong
    lines = [f"{_place(name, path, flags)}: {text}" for name, text in problems]
    zero_json = zero_path = None
    zero = groups["deepspeed_config"]
    if kind == "DEEPSPEED":
        is_usable &= "deepspeed_config_file" in zero
    if kind == "DEEPSPEED" and "deepspeed_config_file" in zero:
        zero_path = _resolve(zero["deepspeed_config_file"], path)
        zero_json, of_json = _read_zero_json(zero_path)
        lines += [f"{zero_path}: {text}" for text in of_json]
        if "stage" not in zero_json.get("zero_optimization", {}):
            return None, lines
        lines += wrong_for_sequences(zero_path, zero_json, groups["parallelism_config"])
        if zero_json["zero_optimization"]["stage"] == 3 and str(zero.get("zero3_init_flag")).lower() == "false":
            where = _place("deepspeed_config.zero3_init_flag", path, flags)
            lines.append(f"{where}: must be true for stage 3, which always shards weights while they load")
    return Gear(path, settings, zero_json, zero_path, num_processes) if is_usable else None, lines


def _leaf(name: str) -> str:
    """Return a key without its groups."""
    return name.rpartition(".")[2]


def _place(name: str, path: Path, flags: Mapping[str, str]) -> str:
    """Return where a key was set: the flag as it was given, or the file and the key."""
    leaf = _leaf(name)
    if leaf not in flags:
        return f"{path}: {name}"
    return f"--{leaf}" if leaf in BARE_FLAGS else f"--{leaf}={flags[leaf]}"


def _check(content: RawMapping, table: Table, group: str = "") -> tuple[RawMapping, list[tuple[str, str]]]:
    """Return the content without its wrong keys, and a problem for each of these: its name with groups, and why."""
    kept: RawMapping = {}
    problems = []
    for key, value in content.items():
        name, known = f"{group}{key}", table.get(key)
        if known is None:
            problems.append((name, f"unknown key{key_meant(str(key), table)}"))
        elif isinstance(known, Key):
            if text := None if value is None and not group else known.problem(value):  # null at the top means absent
                problems.append((name, text))
            elif value is not None and known.effect != "refused":  # a refused key may only ask for nothing
                kept[key] = value
        elif isinstance(value, dict):
            kept[key], below = _check(value, known, f"{name}.")
            problems += below
        elif value is not None:
            problems.append((name, f"must be a mapping, found {shown(value)}"))
    return kept, problems


def _read_flags(flags: Mapping[str, str]) -> tuple[RawMapping, list[tuple[str, str]]]:
    """Return the values of the launcher's flags, and a problem for each flag that is unknown, wrong or refused."""
    values, problems = {}, []
    for name, text in flags.items():
        key = _flag(name)
        if key is None:
            problems.append((name, f"the launcher has no such flag{nearest(name, list(FLAGS))}"))
            continue
        value = _flag_value(key, text)
        if problem := key.problem(value):
            problems.append((name, problem))
        else:
            values[name] = value
    return values, problems


def _flag(name: str) -> Key | None:
    return FLAGS.get(name, next((key for start, key in FAMILIES.items() if name.startswith(start)), None))


def is_flag(name: str) -> bool:
    """Return whether Accelerate's launcher has this flag."""
    return _flag(name) is not None


def _flag_value(key: Key, text: str) -> str | int:
    """Return the value of a flag in the type that the key takes, or its text if it does not fit."""
    number = int(text) if text.isdecimal() and len(text) < 20 else None
    parsed = (text, number, {"true": True, "false": False}.get(text.lower()))
    return next((value for value in parsed if value is not None and not key.problem(value)), text)


def _with_flags(settings: RawMapping, given: RawMapping) -> RawMapping:
    """Return a file's settings, overridden by the launcher's flags."""
    settings = settings | {name: value for name, value in given.items() if name in GEAR and name not in GROUPS}
    for group, table in GROUPS.items():
        if overridden := {name: given[name] for name in table if name in given}:
            settings[group] = (settings.get(group) or {}) | overridden
    return settings


def _missing(settings: RawMapping, problems: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a problem for each required key that the gear does not set."""
    required = {"distributed_type": 'is missing; set it to "NO", MULTI_GPU, FSDP or DEEPSPEED'}
    if settings.get("distributed_type", "NO") != "NO":
        required["num_processes"] = "is missing; set it, or pass --num_processes"
    if settings.get("distributed_type") == "FSDP":
        required["fsdp_config.fsdp_version"] = "must be 2"
    reported = {name for name, _ in problems}
    found = settings.keys() | {f"fsdp_config.{name}" for name in settings.get("fsdp_config") or {}} | reported
    return [(name, text) for name, text in required.items() if name not in found]


def _wrong_engine(
    kind: str, settings: RawMapping, groups: dict[str, RawMapping], given: RawMapping
) -> list[tuple[str, str]]:
    """Return the problems of settings and flags that do not fit this distributed_type."""
    other = f"does not fit this gear, whose distributed_type is {kind}; choose the engine by the gear"
    problems = [(flag, other) for flag, same in ENGINE_FLAGS.items() if flag in given and kind != same]
    if "use_parallelism_config" in given and not groups["parallelism_config"]:
        problems.append(("use_parallelism_config", "this gear has no parallelism_config; remove it"))
    if settings.get("use_cpu") is True and kind != "NO":
        text = f"true turns {kind} into plain data parallelism; remove it: a CPU run does not need it"
        problems.append(("use_cpu", text))
    for group, same in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if kind != same:
            names = [f"{group}.{name}" for name in groups[group] if name in given] or [group] * bool(groups[group])
            problems += [(name, f"is only for {same}, but distributed_type is {kind}; remove it") for name in names]
    if kind == "NO" and (count := settings.get("num_processes", 1)) != 1:
        problems.append(("num_processes", f'{count} ranks, but distributed_type is "NO"; use 1 rank, or the ddp gear'))
    if kind == "DEEPSPEED":
        problems += _wrong_zero(settings, groups["deepspeed_config"])
    return problems


def _wrong_zero(settings: RawMapping, zero: RawMapping) -> list[tuple[str, str]]:
    """Return the problems of a gear for ZeRO, apart from its JSON."""
    problems = []
    if "mixed_precision" in settings:
        text = "belongs in the ZeRO JSON (bf16.enabled); Accelerate allows only one of the two"
        problems.append(("mixed_precision", text))
    if "deepspeed_config_file" not in zero:
        text = "must name a JSON file such as ds_configs/zero3.json"
        problems.append(("deepspeed_config.deepspeed_config_file", text))
    if settings.get("num_machines", 1) > 1 and zero.get("deepspeed_multinode_launcher") != "standard":
        problems.append(("deepspeed_config.deepspeed_multinode_launcher", "must be standard for several machines"))
    return problems


def _resolve(name: str, gear_path: Path) -> Path:
    """Return the path of a ZeRO JSON.

    A relative name is looked up in the working directory, as Accelerate does, then in the folder above
    accelerate_configs/.
    """
    path = Path(name)
    try:
        here = path.is_absolute() or path.exists()
    except OSError:  # the name is too long
        here = True
    return path if here else gear_path.resolve().parent.parent / path


def _read_zero_json(path: Path) -> tuple[RawMapping, list[str]]:
    """Return a ZeRO JSON without its wrong keys, and every problem."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> RawMapping:
        twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        content = json.loads(read_text(path), object_pairs_hook=unique)
    except FileNotFoundError:
        return {}, ["no such file"]
    except UserError as error:
        return {}, [str(error).removeprefix(f"{path}: ")]
    except (ValueError, RecursionError) as error:
        return {}, [f"invalid JSON: {error}"]
    if not isinstance(content, dict):
        return {}, [f"must be a JSON object, found {type(content).__name__}"]
    kept, problems = _check(content, ZERO_JSON)
    stage = "zero_optimization.stage"
    reported = {name for name, _ in problems}
    if "stage" not in kept.get("zero_optimization", {}) and not reported & {"zero_optimization", stage}:
        problems.append((stage, "is missing; set it to 1, 2 or 3"))
    for part in ("offload_optimizer", "offload_param"):
        offload = kept.get("zero_optimization", {}).get(part, {})
        if offload.get("device") == "nvme" and "nvme_path" not in offload:
            problems.append((f"zero_optimization.{part}.nvme_path", "is missing; set it to a folder on a local disk"))
    if kept.get("bf16", {}).get("enabled"):
        for name, does in (("communication_data_type", "reduces"), ("data_types.grad_accum_dtype", "accumulates")):
            group = kept.get("data_types", {}) if "." in name else kept
            if _leaf(name) not in group and name not in reported:
                problems.append((name, f"must be fp32; otherwise DeepSpeed {does} the gradients in bf16"))
    return kept, [f"duplicate key {name!r}; keep one" for name in twice] + [f"{n}: {text}" for n, text in problems]
