"""Compare the model's config.json with gear, row length and adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gearbox.checks.family import TABLES, has_router_loss, is_language_model, module_names
from gearbox.checks.finding import Said
from gearbox.config.gear import Gear
from gearbox.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from gearbox.checks.subject import Subject

# Scalings that multiply the positions that a model was trained with. Others already count them.
EXTENDING = ("linear", "dynamic", "yarn")
MOST_TIMES = 10_000
PICKLES = (".bin", ".pt", ".pth")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_SAFETENSORS = (
    "{!r} has no safetensors weights, and pickled weights could run code; convert them in a sandbox with "
    "AutoModelForCausalLM.from_pretrained(..., use_safetensors=False).save_pretrained(FOLDER)"
)
NO_INDEX = "{} has safetensors files, but neither {} nor {}; download or copy the model again"
NO_SHARD = "{} names {}, which is not in the folder; download or copy it again"
NO_WEIGHTS = "the folder {!r} has no weights; copy model.safetensors there, or set model.init: random"
NO_LANGUAGE_MODEL = (
    "{!r} ({}) is not a causal language model; use a family that the installed transformers has for text"
)
QUANTIZED = "the weights of {!r} are quantized; set adapter.method=lora to freeze them"


def readable(subject: Subject) -> Iterator[Said]:
    """Check that the model's small files can be read."""
    model = subject.model
    if subject.recipe.run.rehearse:
        return
    _ = model.config, model.tokenizer_config, model.token_ids  # reads them
    for text in model.damaged:
        yield subject.say(f"model.name: {text}; download or copy it again")


def trainable(subject: Subject) -> Iterator[Said]:
    """Check that this is a language model whose weights are here, and can be trained."""
    recipe, content, folder = subject.recipe, subject.model.config, subject.model.folder
    if content is None:
        return
    name, kind = recipe.model.name, content.get("model_type")
    if isinstance(kind, str) and "auto_map" not in content and not is_language_model(kind):
        yield subject.say(f"model.name: {NO_LANGUAGE_MODEL.format(name, kind)}")
    if recipe.run.rehearse or recipe.model.init == "random" or folder is None or not Path(name).is_dir():
        return  # the run downloads what the cache of the Hub lacks
    if content.get("quantization_config") and recipe.adapter.method == "none":
        yield subject.say(f"model.name: {QUANTIZED.format(name)}")
    if text := _missing_weights(subject, folder):
        yield subject.say(f"model.name: {text}")


def _missing_weights(subject: Subject, folder: Path) -> str | None:
    """Return why the weights cannot be loaded from a folder, or None if its files are there."""
    name = subject.recipe.model.name
    if not any(folder.glob("*.safetensors")):
        is_pickled = any(path.suffix in PICKLES for path in folder.iterdir())
        return (NO_SAFETENSORS if is_pickled else NO_WEIGHTS).format(name)
    if (folder / SINGLE).exists():
        return None
    if not (folder / INDEX).exists():
        return NO_INDEX.format(folder, SINGLE, INDEX)
    shards = subject.model.read(INDEX).get("weight_map")
    names = sorted(map(str, shards.values())) if isinstance(shards, dict) else []
    missing = next((one for one in names if not (folder / one).is_file()), None)
    return None if missing is None else NO_SHARD.format(folder / INDEX, missing)


def architecture(subject: Subject) -> Iterator[Said]:
    """Check that the gear can divide the model."""
    config, job = subject.config, subject.job
    if job is None or config is None:
        return
    try:
        check_architecture(job.gear, config, job.recipe.model.router_loss if has_router_loss(config) else 0.0)
    except UserError as error:
        yield Said(str(error), key="parallelism_config")
    except (ArithmeticError, TypeError, ValueError):
        return  # a size in config.json is no number, which transformers reports


def positions(subject: Subject) -> Iterator[Said]:
    """Check that rows are not longer than what the model can read, or was trained with."""
    config, row_tokens = subject.config, subject.recipe.batch.row_tokens
    if config is None:
        return
    table = TABLES.get(config.model_type)
    limit = getattr(config, table, None) if table else None
    if text := too_long_for_table(config.model_type, row_tokens, limit, table):
        yield subject.say(text)
    elif text := longer_than_trained(config, row_tokens, limit):
        yield subject.say(text, "hint")


def too_long_for_table(family: str, row_tokens: int, limit: int | None, key: str | None) -> str | None:
    """Return why rows do not fit a table of `limit` positions, given by this key of config.json; None if they do."""
    if limit is None or row_tokens <= limit:
        return None
    named = f"{key} in its config.json" if key else "the size of its table"
    return (
        f"batch.row_tokens: rows of {row_tokens:,} tokens, but {family} has {limit:,} positions ({named}); use {limit} "
        "or less"
    )


def longer_than_trained(config: object, row_tokens: int, limit: int | None) -> str | None:
    """Return a hint if rows are longer than those that a model without a table was trained with."""
    trained = getattr(config, "max_position_embeddings", None)
    if limit is not None or not isinstance(trained, int) or trained <= 0:
        return None
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(scaling, dict) and (scaling.get("rope_type") or scaling.get("type")) in EXTENDING:
        factor = scaling.get("factor", 1)
        original = scaling.get("original_max_position_embeddings") or trained
        if isinstance(factor, int | float) and isinstance(original, int) and 1 <= factor <= MOST_TIMES:
            trained = max(trained, int(original * factor))
    if row_tokens <= trained:
        return None
    return (
        f"batch.row_tokens: rows of {row_tokens:,} tokens are longer than the {trained:,} positions that "
        f"{getattr(config, 'model_type', 'the model')} was trained with (max_position_embeddings in its config.json)"
    )


def targets(subject: Subject) -> Iterator[Said]:
    """Check that each name in adapter.targets is that of a module. The run checks it again on the model itself."""
    adapter, config = subject.recipe.adapter, subject.config
    if adapter.method == "none" or adapter.path is not None or adapter.targets == "all-linear":
        return
    if isinstance(adapter.targets, str):
        if re.fullmatch(r"[\w-]+", adapter.targets):
            text = f"{adapter.targets!r} is read as a pattern of complete names, and no module has only this name"
            near = nearest(adapter.targets, ["all-linear"]) or f"; use all-linear, or a list: [{adapter.targets}]"
            yield subject.say(f"adapter.targets: {text}{near}")
        return
    if config is None:
        return
    names = module_names(config.model_type)
    if names is None:
        return
    last = {name: name.rpartition(".")[2] for name in adapter.targets}
    if unmatched := [name for name, end in last.items() if end not in names.words and not end.isdecimal()]:
        yield subject.say(no_such_module(unmatched, sorted(names.linear)))


def no_such_module(unmatched: list[str], known: list[str]) -> str:
    """Return the message for targets that match nothing."""
    named = " or ".join(f"{name!r}{nearest(name, known)}" for name in unmatched)
    return f"adapter.targets: no module of the model is named {named}"


def added_tokens(subject: Subject) -> Iterator[Said]:
    """Check that the added tokens are new."""
    recipe = subject.recipe
    if not recipe.run.rehearse and (
        known := [token for token in recipe.model.add_tokens if token in subject.model.token_ids]
    ):
        yield subject.say(known_token(known[0], recipe.model.name))


def known_token(token: str, model: str) -> str:
    """Return the message for an added token that the tokenizer already has."""
    return f"model.add_tokens: {token!r} is already a token of {model}; remove it"


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
