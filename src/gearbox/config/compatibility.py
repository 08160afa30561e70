"""Refuse combinations that cannot run: degrees with ranks, a gear with a recipe.

Each refusal names the setting and the nearest one that works.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gearbox.config.gear_keys import DEGREES
from gearbox.config.loader import RawMapping, located
from gearbox.config.recipe import Recipe
from gearbox.config.recipe_values import TRACKERS

if TYPE_CHECKING:
    from gearbox.config.gear import Gear
    from gearbox.config.job import BatchPlan


class Refusal(NamedTuple):
    """A gear and a recipe that cannot be combined."""

    applies: Callable[[Gear, Recipe], bool]
    text: str
    """The recipe's key, why the combination fails, and what to change."""


def _divides_layers(gear: Gear) -> bool:
    """Return True if several ranks compute a layer, its experts, a row or the stack of layers together."""
    return any(gear.degree(name) > 1 for name in ("tp", "ep", "pp", "sp", "cp"))


REFUSALS = [
    Refusal(
        lambda gear, recipe: gear.zero_stage > 0 and recipe.optim.master_weights == "bf16",
        "optim.master_weights: ZeRO always keeps fp32 masters; use fp32, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.zero_stage > 0 and recipe.optim.name.endswith("8bit"),
        "optim.name: under ZeRO, 8-bit scaling blocks span parameters and cannot be saved by parameter; use adamw or "
        "paged_adamw, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.zero_stage > 0 and recipe.optim.name == "muon",
        "optim.name: Muon needs complete matrices, which ZeRO flattens and joins; use adamw, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.engine == "fsdp" and gear.offload is not None and recipe.optim.name == "muon",
        "optim.name: Muon multiplies complete matrices, which takes too long in host memory, where this gear keeps the "
        "optimizer; use adamw, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.offload is not None and recipe.optim.name not in ("adamw", "muon"),
        "optim.name: this gear keeps the optimizer in host memory, where 8-bit and paged states save nothing; use "
        "adamw, or the same gear without offload",
    ),
    Refusal(
        lambda gear, recipe: gear.zero_stage == 3 and recipe.method == "qdora",
        "adapter.method: QDoRA cannot run under ZeRO-3: PEFT replaces 4-bit weights that the engine tracks; "
        "use lora (QLoRA), or gear fsdp or zero2",
    ),
    Refusal(
        lambda gear, recipe: gear.has_several_meshes and recipe.model.quantize is not None,
        "model.quantize: tensor and expert parallelism split weights, but packed 4-bit weights cannot be split; use "
        "quantize: null, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("tp") > 1 and recipe.adapter.method == "dora",
        "adapter.method: DoRA needs the norms of complete rows, which tensor parallelism splits; use lora, or the fsdp "
        "gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("tp") > 1 and bool(recipe.model.add_tokens),
        "model.add_tokens: tensor parallelism cannot add rows to a sharded embedding; use the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("ep") > 1 and recipe.adapts_all,
        "adapter.targets: all-linear also adapts experts, which this gear divides; list attention layers, such as "
        "[q_proj, v_proj], or use the fsdp gear, as without experts",
    ),
    Refusal(
        lambda gear, recipe: gear.engine == "pp" and bool(recipe.model.add_tokens),
        "model.add_tokens: pipeline stages cannot add rows to the embedding; use the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("sp") > 1 and recipe.model.attention in ("eager", "sdpa"),
        "model.attention: sequence parallelism cannot split the masks of eager and sdpa; use auto or flash_attention_2",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("cp") > 1 and recipe.model.attention not in ("auto", "documents"),
        "model.attention: ring attention is attention by document; use auto",
    ),
    Refusal(
        lambda gear, recipe: recipe.perf.checkpointing == "selective" and gear.zero_stage == 3,
        "perf.checkpointing: ZeRO-3 gathers weights within a layer, and selective cannot recompute that; use full, or "
        "the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: recipe.perf.checkpointing == "selective" and gear.degree("cp") > 1,
        "perf.checkpointing: ring attention sends keys within a layer, which selective would not do again; use full",
    ),
    Refusal(
        lambda gear, recipe: recipe.perf.compile and (gear.zero_stage == 3 or _divides_layers(gear)),
        "perf.compile: this gear communicates within a layer, or divides the layers, and its layers are not compiled; "
        "use compile: false, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: recipe.perf.kernels == "liger" and _divides_layers(gear),
        "perf.kernels: liger computes whole layers, which this gear divides among ranks; use auto, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: recipe.perf.float8 and recipe.adapter.method != "none",
        "perf.float8: multiplies the weights that are trained, but an adapter freezes them; use float8: false",
    ),
    Refusal(
        lambda gear, recipe: recipe.perf.float8 and (gear.engine == "zero" or _divides_layers(gear)),
        "perf.float8: runs under the single, ddp and fsdp gears; use float8: false, or one of these",
    ),
    Refusal(
        lambda gear, recipe: recipe.adapter.method == "dora" and bool(recipe.model.add_tokens),
        "model.add_tokens: DoRA divides by the norm of each row of the output head, and padding rows are zero; use "
        "adapter.method=lora",
    ),
]


def has_flash_attention() -> bool:
    """Return True if a package has the functions of flash_attention_2. kernels downloads them from the Hub."""
    return any(importlib.util.find_spec(package) is not None for package in ("flash_attn", "kernels"))


def conflicts(gear: Gear, recipe: Recipe, recipe_path: Path, batch: BatchPlan) -> list[str]:
    """Return a problem for each conflict of the gear, its ZeRO JSON or the environment with the recipe."""
    problems = _contradictions(gear, recipe, recipe_path, batch)
    if gear.degree("sp") > 1 and recipe.model.attention == "flash_attention_2" and batch.micro_rows > 1:
        text = (
            "batch.micro_rows: flash attention isolates packed documents in one row at a time, and "
            f"{gear.path} splits each row across ranks; use 1"
        )
        problems.append(located(text, recipe, recipe_path))
    of_recipe = [refusal.text for refusal in REFUSALS if refusal.applies(gear, recipe)]
    if importlib.util.find_spec("bitsandbytes") is None:
        hint = "needs bitsandbytes, which is not installed; run pip install bitsandbytes, or use"
        if recipe.model.quantize:
            of_recipe.append(f"model.quantize: {recipe.model.quantize} {hint} null")
        if recipe.optim.name not in ("adamw", "muon"):
            of_recipe.append(f"optim.name: {recipe.optim.name} {hint} adamw")
    of_recipe += _missing_tools(recipe)
    if recipe.model.attention == "flash_attention_2" and not has_flash_attention():
        of_recipe.append(
            "model.attention: flash_attention_2 needs flash_attn, which is not installed; use auto (torch's own flash "
            "kernel on a GPU), or build flash-attn with nvcc"
        )
    problems += [located(text, recipe, recipe_path) for text in of_recipe]
    return problems + [
        f"{name}={os.environ[name]} is set in the environment, but {text}; unset it"
        for name, (allowed, text) in _variables(gear, recipe_path, batch).items()
        if os.environ.get(name, "").lower() not in {"", *allowed}
    ]


def _missing_tools(recipe: Recipe) -> list[str]:
    """Return a problem for each key of perf whose package or compiler is missing, and for each tracker's package."""
    perf, problems = recipe.perf, []
    if perf.kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        problems.append(
            "perf.kernels: liger needs liger_kernel, which is not installed; run pip install liger-kernel, or use auto"
        )
    if perf.float8 and importlib.util.find_spec("torchao") is None:
        problems.append("perf.float8: needs torchao, which is not installed; run pip install torchao, or use false")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    if perf.compile and not shutil.which(compiler):
        problems.append("perf.compile: needs a C++ compiler, and there is none; run apt-get install g++, or use false")
    missing = [name for name in recipe.run.trackers if importlib.util.find_spec(TRACKERS[name]) is None]
    if missing:
        packages = " ".join(TRACKERS[name] for name in missing)
        problems.append(
            f"run.trackers: not installed for {', '.join(missing)}; run pip install {packages}, or remove it from the "
            "list"
        )
    return problems


def _variables(gear: Gear, recipe_path: Path, batch: BatchPlan) -> dict[str, tuple[set[str], str]]:
    """Return the variables by which Accelerate would change a run, each with its allowed values and what decides.

    Its launcher sets some of them, always to a value that is allowed here.
    """
    kind = gear.settings.get("distributed_type", "NO")
    wrapping = gear.settings.get("fsdp_config") or {}
    decides = f"{gear.path} decides that"
    steps = batch.accumulation_steps
    # For ZeRO gears the launcher sets the number of steps to auto or 1, and the filled JSON decides.
    all_steps = {"1"} if gear.zero_json is not None else set()
    variables = {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ({"auto", str(steps), *all_steps}, f"{recipe_path} gives {steps}"),
        "ACCELERATE_GRADIENT_CLIPPING": ({"auto"}, f"optim.max_grad_norm in {recipe_path} decides that"),
        "ACCELERATE_MIXED_PRECISION": ({"no", gear.precision}, decides),
        "ACCELERATE_USE_FSDP": ({"false", "true"} if kind == "FSDP" else {"false"}, decides),
        "ACCELERATE_USE_DEEPSPEED": ({"false", "true"} if kind == "DEEPSPEED" else {"false"}, decides),
        "ACCELERATE_USE_MEGATRON_LM": ({"false"}, "Megatron-LM is not supported"),
        "ACCELERATE_DYNAMO_BACKEND": ({"no"}, f"perf.compile in {recipe_path} decides that"),
        "ACCELERATE_FP8_BACKEND": ({"no"}, f"perf.float8 in {recipe_path} decides that"),
        "ACCELERATE_TORCH_DEVICE": (set(), "each rank takes its own device"),
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": ({"allgather"}, "only allgather is supported"),
    }
    inline = ("zero_stage", "offload_optimizer_device", "offload_param_device", "moe_layer_cls_names")
    for name in inline if gear.zero_json is not None else ():
        variables[f"ACCELERATE_DEEPSPEED_{name.upper()}"] = (set(), f"{gear.zero_path} decides that")
    if kind == "FSDP":
        variables["FSDP_IGNORED_MODULES"] = (set(), "all modules are sharded")
        variables["FSDP_ACTIVATION_CHECKPOINTING"] = ({"false"}, f"{recipe_path} decides that")
        for key, name in (
            ("auto_wrap_policy", "AUTO_WRAP_POLICY"),
            ("transformer_layer_cls_to_wrap", "TRANSFORMER_CLS_TO_WRAP"),
        ):
            variables[f"FSDP_{name}"] = ({str(wrapping.get(f"fsdp_{key}", "")).lower()}, decides)
    return variables


def _contradictions(gear: Gear, recipe: Recipe, recipe_path: Path, batch: BatchPlan) -> list[str]:
    """Return a problem for each number in the ZeRO JSON that contradicts the recipe."""
    if gear.zero_json is None:
        return []
    owned = gear.filled_json(recipe, batch, gear.precision)
    owners = {
        "gradient_clipping": f"optim.max_grad_norm in {recipe_path} is",
        "gradient_accumulation_steps": "batch.rows, batch.micro_rows and the ranks give",
        "train_micro_batch_size_per_gpu": f"batch.micro_rows in {recipe_path} is",
        "train_batch_size": f"batch.rows in {recipe_path}, padded to full micro-batches, is",
    }
    given = {key: gear.zero_json.get(key, "auto") for key in owners}
    return [
        f'{gear.zero_path}: {key}: is {given[key]}, but {owner} {owned[key]}; use "auto"'
        for key, owner in owners.items()
        if given[key] != "auto" and given[key] != owned[key]
    ]


def wrong_degrees(kind: str, parallelism: RawMapping, num_processes: int) -> list[tuple[str, str]]:
    """Return the problems with the degrees of parallelism, each with its key. `kind` is distributed_type."""
    sizes = {name: parallelism.get(f"parallelism_config_{name}_size", 1) for name in DEGREES}
    degrees = {name: size for name, size in sizes.items() if size > 1}
    problems = [
        (_size_key(name), f"{kind} does not support this; distributed_type must be {' or '.join(DEGREES[name])}")
        for name in degrees
        if kind not in DEGREES[name]
    ]
    alone = {"tp", "cp", "pp", "ep"} | ({"dp_replicate"} if "ep" in degrees else set())
    if len(joined := degrees.keys() & alone) > 1:
        text = f"{' and '.join(sorted(joined))} cannot be combined; tp can be combined with FSDP, and so can ep"
        problems.append(("parallelism_config", text))
    if problems or not degrees:
        return problems
    return _wrong_num_processes(kind, degrees, num_processes)


def _size_key(name: str) -> str:
    """Return the key of a degree of parallelism."""
    return f"parallelism_config.parallelism_config_{name}_size"


def _wrong_num_processes(kind: str, degrees: dict[str, int], num_processes: int) -> list[tuple[str, str]]:
    """Return the reason why this number of ranks does not fit these degrees, which are all above 1."""
    fixed = {name: size for name, size in degrees.items() if name != "dp_shard"}
    product = math.prod(fixed.values())
    named = " x ".join(f"{name}={size}" for name, size in fixed.items())
    if num_processes % product:
        near = max(1, num_processes // product) * product
        text = f"{num_processes} ranks are not divisible by {named}; use {near} or {near + product}"
        return [("num_processes", text)]
    rest = num_processes // product * degrees.get("ep", 1)  # ranks with different experts have different rows
    if degrees.get("dp_shard", rest) != rest:
        text = f"{num_processes} ranks / ({named or 1}) is {rest}, not {degrees['dp_shard']}"
        return [(_size_key("dp_shard"), text)]
    if "dp_replicate" in degrees and rest == 1:
        per_replica = num_processes // degrees["dp_replicate"]
        left = "one rank per replica" if per_replica == 1 else f"{per_replica} ranks per replica, all for tp or cp"
        text = f"{num_processes} ranks in {degrees['dp_replicate']} replicas leave {left}, with nothing to shard"
        return [("num_processes", f"{text}; use {2 * product} ranks, or accelerate_configs/ddp.yaml")]
    if kind == "MULTI_GPU" and "tp" in degrees and rest > 1:
        text = f"{num_processes} ranks exceed tp={degrees['tp']}; more ranks need FSDP (see fsdp_tp)"
        return [("num_processes", text)]
    return []


def wrong_for_sequences(zero_path: Path, zero_json: RawMapping, parallelism: RawMapping) -> list[str]:
    """Return the reason why sequence parallelism cannot run with this ZeRO JSON.

    In stage 3 with reduce_scatter, DeepSpeed 0.19 averages gradients over all ranks. Otherwise it averages only over
    ranks with different rows.
    """
    settings = zero_json["zero_optimization"]
    if parallelism.get("parallelism_config_sp_size", 1) == 1 or (
        settings["stage"] == 3 and settings.get("reduce_scatter", True)
    ):
        return []
    return [
        f"{zero_path}: zero_optimization: sequence parallelism is tested only with stage 3 and reduce_scatter; "
        "otherwise DeepSpeed scales the gradients differently"
    ]
