"""What cannot be joined: a gear with a recipe, known from the files alone, and a gear with a model's architecture.

Each refusal names what was found and the nearest that works.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gearbox.config.gear import Gear
from gearbox.config.recipe import BatchPlan, Recipe
from gearbox.errors import UserError


class Refusal(NamedTuple):
    """A recipe and a gear that cannot be joined: when they meet, and what of the recipe to change into what."""

    applies: Callable[[Gear, Recipe], bool]
    text: str


REFUSALS = [
    Refusal(
        lambda gear, recipe: gear.zero_stage > 0 and recipe.optim.master_weights == "bf16",
        "optim.master_weights: ZeRO always keeps fp32 masters; use fp32, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.zero_stage > 0 and recipe.optim.name.endswith("8bit"),
        "optim.name: 8-bit states are scaled in blocks, which under ZeRO lie across parameters, so that no checkpoint "
        "could hold them by parameter; use adamw or paged_adamw, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.offload is not None and recipe.optim.name != "adamw",
        "optim.name: this gear keeps the optimizer in the host's memory, where the 8-bit and paged kinds are of no "
        "use; use adamw, or the same gear without offload",
    ),
    Refusal(
        lambda gear, recipe: gear.zero_stage == 3 and recipe.method == "qdora",
        "adapter.method: QDoRA cannot run under ZeRO-3: PEFT puts other 4-bit weights in place of those that the "
        "engine knows; use lora (QLoRA), or the fsdp or zero2 gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("tp") > 1 and recipe.model.quantize is not None,
        "model.quantize: tensor parallelism cuts matrices, and packed 4-bit weights cannot be cut so; use "
        "quantize: null, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("tp") > 1 and recipe.adapter.method == "dora",
        "adapter.method: DoRA needs the norm of whole rows, which tensor parallelism cuts; use lora, or the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("tp") > 1 and bool(recipe.model.add_tokens),
        "model.add_tokens: an embedding cut over ranks by tensor parallelism cannot be given rows; use the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.engine == "pp" and bool(recipe.model.add_tokens),
        "model.add_tokens: the stages of a pipeline cannot be given rows; use the fsdp gear",
    ),
    Refusal(
        lambda gear, recipe: gear.degree("sp") > 1 and recipe.model.attention == "eager",
        "model.attention: sequence parallelism needs sdpa or flash_attention_2, found eager",
    ),
    Refusal(
        lambda gear, recipe: recipe.adapter.method == "dora" and bool(recipe.model.add_tokens),
        "model.add_tokens: DoRA divides by the norm of each of the head's rows, and those of padding are zero; use "
        "adapter.method=lora",
    ),
]


def check_against(gear: Gear, recipe: Recipe, recipe_path: Path, batch: BatchPlan) -> None:
    """Raise UserError where the JSON or the environment contradicts the recipe, or both cannot be joined."""
    problems = []
    if gear.zero_json is not None:
        owned = gear.filled_json(recipe, batch, gear.precision)
        keys = {
            "gradient_clipping": f"optim.max_grad_norm of {recipe_path}",
            "gradient_accumulation_steps": "what batch.rows, batch.micro_rows and the ranks give",
            "train_micro_batch_size_per_gpu": f"batch.micro_rows of {recipe_path}",
            "train_batch_size": f"batch.rows of {recipe_path}, filled up to whole micro batches",
        }
        for key, owner in keys.items():
            found = gear.zero_json.get(key, "auto")
            if found != "auto" and found != owned[key]:
                problems.append(f'{gear.zero_path}: {key}: is {found}, but {owner} says {owned[key]}; write "auto"')
    if gear.degree("sp") > 1 and recipe.model.attention == "flash_attention_2" and batch.micro_rows > 1:
        problems.append(
            f"{recipe_path}: batch.micro_rows: flash attention keeps packed documents apart in one row at a time, and "
            f"{gear.path} cuts each row over ranks; use 1"
        )
    problems += [f"{recipe_path}: {refusal.text}" for refusal in REFUSALS if refusal.applies(gear, recipe)]
    if importlib.util.find_spec("bitsandbytes") is None:
        hint = "needs bitsandbytes, which is not installed: pip install bitsandbytes, or use"
        if recipe.model.quantize:
            problems.append(f"{recipe_path}: model.quantize: {recipe.model.quantize} {hint} null")
        if recipe.optim.name != "adamw":
            problems.append(f"{recipe_path}: optim.name: {recipe.optim.name} {hint} adamw")
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    found = os.environ.get(variable, "auto")
    # The launcher of ZeRO gears sets the variable itself, to auto or 1; the filled JSON decides there.
    if gear.zero_json is None and found not in ("auto", str(batch.accumulation_steps)):
        problems.append(
            f"{variable}={found} in the environment, but {recipe_path} gives {batch.accumulation_steps}; unset it"
        )
    if problems:
        raise UserError("\n".join(problems))


def check_architecture(gear: Gear, config: Any, router_loss: float | None = None) -> None:
    """Raise UserError where the model (its config.json, read by transformers) cannot be cut as the gear asks.

    `router_loss` is the recipe's.
    """
    if getattr(config, "router_aux_loss_coef", None) and router_loss != 0:
        for name, lacks in (("pp", "all layers"), ("sp", "a whole row"), ("cp", "a whole row")):
            if gear.degree(name) > 1:
                raise UserError(
                    f"{gear.path}: balancing the experts of {config.model_type} takes {lacks} on one rank; use "
                    "accelerate_configs/fsdp.yaml, or model.router_loss=0"
                )
    tp, sp, pp = gear.degree("tp"), gear.degree("sp"), gear.degree("pp")
    if pp > 1 and not getattr(config, "base_model_pp_plan", None):
        raise UserError(
            f"{gear.path}: a pipeline: {config.model_type} has no plan for it in transformers; use "
            "accelerate_configs/fsdp.yaml"
        )
    if pp > config.num_hidden_layers:
        raise UserError(
            f"{gear.path}: parallelism_config_pp_size: {pp} stages, but this model has {config.num_hidden_layers} "
            f"layers; {config.num_hidden_layers} or fewer would do"
        )
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    named = f"{heads} attention heads" + (f" and {key_heads} key heads" if key_heads != heads else "")
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if tp > 1 and (not plan or any(style.startswith("packed") for style in plan.values())):
        why = "fuses matrices that would be cut apart" if plan else "has no plan for it in transformers"
        raise UserError(f"{gear.path}: tensor parallelism: {config.model_type} {why}; use accelerate_configs/fsdp.yaml")
    if heads % tp or key_heads % tp:
        fits = [n for n in range(1, key_heads + 1) if heads % n == key_heads % n == 0]
        raise _does_not_divide(gear, "tp", named, fits)
    if heads % sp or (key_heads % sp and sp % key_heads):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise _does_not_divide(gear, "sp", named, fits)


def _does_not_divide(gear: Gear, name: str, what: str, fits: list[int]) -> UserError:
    return UserError(
        f"{gear.path}: parallelism_config_{name}_size: {gear.degree(name)} does not divide this model's {what}; "
        f"{' or '.join(map(str, fits))} would"
    )
