"""What cannot be combined: a gear with a recipe, known from the files alone, and a gear with a model's architecture.

Each refusal names the setting and the nearest one that works.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gearbox.config.gear import Gear
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from gearbox.config.job import BatchPlan


class Refusal(NamedTuple):
    """A gear and a recipe that cannot be combined."""

    applies: Callable[[Gear, Recipe], bool]
    text: str
    """The recipe's key, why it cannot be, and what to change."""


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
    """Raise UserError where the JSON or the environment contradicts the recipe, or where gear and recipe do not fit."""
    problems = _contradictions(gear, recipe, recipe_path, batch)
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
    value = os.environ.get(variable, "auto")
    # The launcher of ZeRO gears sets the variable itself, to auto or 1; the filled JSON decides there.
    if gear.zero_json is None and value not in ("auto", str(batch.accumulation_steps)):
        problems.append(
            f"{variable}={value} in the environment, but {recipe_path} gives {batch.accumulation_steps}; unset it"
        )
    if problems:
        raise UserError("\n".join(problems))


def _contradictions(gear: Gear, recipe: Recipe, recipe_path: Path, batch: BatchPlan) -> list[str]:
    """Return a problem for each number of the ZeRO JSON that is not the recipe's."""
    if gear.zero_json is None:
        return []
    owned = gear.filled_json(recipe, batch, gear.precision)
    owners = {
        "gradient_clipping": f"optim.max_grad_norm of {recipe_path}",
        "gradient_accumulation_steps": "what batch.rows, batch.micro_rows and the ranks give",
        "train_micro_batch_size_per_gpu": f"batch.micro_rows of {recipe_path}",
        "train_batch_size": f"batch.rows of {recipe_path}, filled up to whole micro batches",
    }
    given = {key: gear.zero_json.get(key, "auto") for key in owners}
    return [
        f'{gear.zero_path}: {key}: is {given[key]}, but {owner} says {owned[key]}; write "auto"'
        for key, owner in owners.items()
        if given[key] != "auto" and given[key] != owned[key]
    ]


def check_architecture(gear: Gear, config: PretrainedConfig, router_loss: float | None = None) -> None:
    """Raise UserError where the gear cannot divide the model of this config over ranks.

    `router_loss` is the recipe's.
    """
    _check_router_loss(gear, config, router_loss)
    _check_stages(gear, config)
    _check_heads(gear, config)


def _check_router_loss(gear: Gear, config: PretrainedConfig, router_loss: float | None) -> None:
    """Raise UserError where no rank has what the loss of a mixture's routers needs."""
    if not getattr(config, "router_aux_loss_coef", None) or router_loss == 0:
        return
    for name, needed in (("pp", "all layers"), ("sp", "a whole row"), ("cp", "a whole row")):
        if gear.degree(name) > 1:
            raise UserError(
                f"{gear.path}: balancing the experts of {config.model_type} takes {needed} on one rank; use "
                "accelerate_configs/fsdp.yaml, or model.router_loss=0"
            )


def _check_stages(gear: Gear, config: PretrainedConfig) -> None:
    """Raise UserError where the layers cannot be divided into the gear's pipeline stages."""
    num_stages = gear.degree("pp")
    if num_stages > 1 and not getattr(config, "base_model_pp_plan", None):
        raise UserError(
            f"{gear.path}: a pipeline: {config.model_type} has no plan for it in transformers; use "
            "accelerate_configs/fsdp.yaml"
        )
    if num_stages > config.num_hidden_layers:
        raise UserError(
            f"{gear.path}: parallelism_config_pp_size: {num_stages} stages, but this model has "
            f"{config.num_hidden_layers} layers; {config.num_hidden_layers} or fewer would do"
        )


def _check_heads(gear: Gear, config: PretrainedConfig) -> None:
    """Raise UserError where tensor or sequence parallelism cannot divide the attention heads."""
    tp, sp = gear.degree("tp"), gear.degree("sp")
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    named = f"{heads} attention heads" + (f" and {key_heads} key heads" if key_heads != heads else "")
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if tp > 1 and (not plan or any(style.startswith("packed") for style in plan.values())):
        why = "fuses matrices that would be cut apart" if plan else "has no plan for it in transformers"
        raise UserError(f"{gear.path}: tensor parallelism: {config.model_type} {why}; use accelerate_configs/fsdp.yaml")
    if heads % tp or key_heads % tp:
        fitting = [n for n in range(1, key_heads + 1) if heads % n == key_heads % n == 0]
        raise _does_not_divide(gear, "tp", named, fitting)
    if heads % sp or (key_heads % sp and sp % key_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise _does_not_divide(gear, "sp", named, fitting)


def _does_not_divide(gear: Gear, name: str, heads: str, fitting: list[int]) -> UserError:
    """Return the refusal of a degree, with the degrees that would divide the heads."""
    return UserError(
        f"{gear.path}: parallelism_config_{name}_size: {gear.degree(name)} does not divide this model's {heads}; "
        f"{' or '.join(map(str, fitting))} would"
    )
