"""Refuse a gear that cannot divide a model with its architecture: layers, heads, experts.

Each refusal names the setting and the nearest one that works.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gearbox.config.gear import Gear
from gearbox.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_architecture(gear: Gear, config: PretrainedConfig, router_loss: float | None = None) -> None:
    """Raise UserError if the gear cannot divide a model with this config across ranks.

    `router_loss` is the recipe's model.router_loss.
    """
    text = config.get_text_config()
    _check_router_loss(gear, text, router_loss)
    _check_stages(gear, text)
    _check_experts(gear, text)
    _check_heads(gear, text)


def _check_router_loss(gear: Gear, config: PretrainedConfig, router_loss: float | None) -> None:
    """Raise UserError if the router loss needs layers or tokens that no single rank has."""
    if not getattr(config, "router_aux_loss_coef", None) or router_loss == 0:
        return
    for name, needed in (("pp", "all layers"), ("sp", "a complete row"), ("cp", "a complete row")):
        if gear.degree(name) > 1:
            raise UserError(
                f"{gear.path}: balancing the experts of {config.model_type} needs {needed} on one rank; use "
                "accelerate_configs/fsdp.yaml, or model.router_loss=0"
            )


def _check_stages(gear: Gear, config: PretrainedConfig) -> None:
    """Raise UserError if the layers cannot be divided into the gear's pipeline stages."""
    num_stages = gear.degree("pp")
    if num_stages == 1:
        return
    if not getattr(config, "base_model_pp_plan", None):
        raise UserError(
            f"{gear.path}: pipeline parallelism: transformers has no pipeline plan for {config.model_type}; use "
            "accelerate_configs/fsdp.yaml"
        )
    if num_stages > config.num_hidden_layers:
        raise UserError(
            f"{gear.path}: parallelism_config_pp_size: {num_stages} stages, but this model has "
            f"{config.num_hidden_layers} layers; use {config.num_hidden_layers} or fewer"
        )


def _check_experts(gear: Gear, config: PretrainedConfig) -> None:
    """Raise UserError if expert parallelism cannot divide this model's experts among all ranks."""
    ep, num_ranks = gear.degree("ep"), gear.num_processes
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((number for name in names if isinstance(number := getattr(config, name, None), int)), 0)
    if ep > 1 and not (count and getattr(config, "base_model_ep_plan", None)):
        why = "transformers has no expert-parallel plan for" if count else "there are no experts to divide in"
        raise UserError(f"{gear.path}: {why} {config.model_type}; use accelerate_configs/fsdp.yaml")
    if count % ep:
        raise _does_not_divide(gear, "ep", f"{count} experts", [n for n in range(1, count + 1) if count % n == 0])
    if ep > 1 and count % num_ranks:
        text = f"{num_ranks} ranks cannot divide {count} experts evenly; use {math.gcd(num_ranks, count)}"
        raise UserError(f"{gear.path}: num_processes: {text}, or accelerate_configs/fsdp.yaml")


def _check_heads(gear: Gear, config: PretrainedConfig) -> None:
    """Raise UserError if tensor or sequence parallelism cannot divide the attention heads."""
    tp, sp = gear.degree("tp"), gear.degree("sp")
    if tp == sp == 1:
        return
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise UserError(
            f"{gear.path}: {config.model_type} has no attention heads to divide; use accelerate_configs/fsdp.yaml"
        )
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if sp > 1 and not hasattr(config, "num_key_value_heads"):
        raise UserError(
            f"{gear.path}: DeepSpeed reads num_key_value_heads from the model's config.json, and {config.model_type} "
            "has none; use accelerate_configs/ring.yaml"
        )
    named = f"{heads} attention heads" + (f" and {key_heads} key-value heads" if key_heads != heads else "")
    if tp > 1:
        _check_tensor_plan(gear, config)
    if heads % tp or key_heads % tp:
        fitting = [n for n in range(1, key_heads + 1) if heads % n == key_heads % n == 0]
        raise _does_not_divide(gear, "tp", named, fitting)
    if heads % sp or (key_heads % sp and sp % key_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise _does_not_divide(gear, "sp", named, fitting)


def _check_tensor_plan(gear: Gear, config: PretrainedConfig) -> None:
    """Raise UserError if transformers cannot split the matrices of this family."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or any(style.startswith("packed") for style in plan.values()):
        fused = f"{config.model_type} fuses matrices that tensor parallelism would split"
        why = fused if plan else f"transformers has no tensor-parallel plan for {config.model_type}"
        raise UserError(f"{gear.path}: tensor parallelism: {why}; use accelerate_configs/fsdp.yaml")


def _does_not_divide(gear: Gear, name: str, heads: str, fitting: list[int]) -> UserError:
    """Return the error for a degree that does not divide the heads, with the degrees that do."""
    return UserError(
        f"{gear.path}: parallelism_config_{name}_size: {gear.degree(name)} does not divide this model's {heads}; "
        f"use {' or '.join(map(str, fitting))}"
    )
