"""Adapters and added tokens: what is put into a loaded model before an engine wraps it.

Every gear calls these on the same weights, so all start alike: ZeRO-3 has partitioned them already and gathers one at
a time here; under FSDP only rank 0 has read them, and what it makes of them is sent to the others.
"""

from __future__ import annotations

import math
import re
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from gearbox.config.adapter_settings import saved_adapter_settings
from gearbox.config.recipe import Recipe
from gearbox.distributed import pipeline_stages
from gearbox.distributed.full_parameters import copy_full_
from gearbox.errors import UserError

WEIGHTS = "adapter_model.safetensors"
# Its advice is to share one adapter between tied embeddings, whose two parameters would then be views of one storage:
# an optimizer steps it twice, and shards of it part.
warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer is part of")
warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True` and the tied_target_modules")


def download_adapter(recipe: Recipe) -> Recipe:
    """The recipe with an adapter of the hub brought to this machine: its folder as adapter.path, its settings."""
    path = recipe.adapter.path
    if path is None or Path(path).is_dir():
        return recipe
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(path, allow_patterns=["*.json", "*.jinja", WEIGHTS])
        adapter = saved_adapter_settings(recipe.adapter, Path(folder))
    except ValueError as error:
        raise UserError(str(error)) from None
    except Exception as error:
        raise UserError(
            f"adapter.path: {path!r} is neither a folder here nor to be had from the hub: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None
    return recipe.model_copy(update={"adapter": adapter.model_copy(update={"path": folder})})


def check_tokens(recipe: Recipe, tokenizer: Any) -> None:
    """Raise UserError where the adapter at adapter.path was trained with other added tokens than the recipe gives."""
    if recipe.adapter.path is None:
        return
    folder, given = Path(recipe.adapter.path), recipe.model.add_tokens
    with safe_open(folder / WEIGHTS, "pt") as file:
        has_rows = any("lora_" not in name for name in file.keys())  # noqa: SIM118  it is no mapping
    if not has_rows:
        if given:
            raise UserError(
                f"model.add_tokens: the adapter in {folder} was trained without added tokens; take them out, or train "
                "a new adapter (adapter.path=null)"
            )
        return
    theirs = transformers.AutoTokenizer.from_pretrained(folder).get_added_vocab()
    known = set(tokenizer.get_vocab()) - set(given)
    added = [token for token in sorted(theirs, key=lambda token: theirs[token]) if token not in known]
    if added != given:
        raise UserError(
            f"model.add_tokens: is {given}, but the adapter in {folder} was trained with {added}; give these"
        )


def add_tokens(model: Any, tokenizer: Any, tokens: list[str]) -> None:
    """Give each token, which the tokenizer has already, a row of the embedding and of the head: the mean of all others.

    Rows that the model has to spare, as padding, are taken first.
    """
    if not tokens:
        return
    from peft.utils.integrations import gather_params_ctx

    ids = tokenizer.convert_tokens_to_ids(tokens)
    if max(ids) >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in {id(p): p for layer in layers for p in layer.parameters()}.values():  # tied ones once
        with gather_params_ctx(parameter):
            parameter.data[ids] = parameter.data[: min(ids)].float().mean(0).to(parameter.dtype)


def attach_adapter(model: Any, recipe: Recipe) -> Any:
    """The model, frozen, with a new adapter or the one at adapter.path, which alone is trained."""
    import peft

    adapter = recipe.adapter
    if adapter.path is not None:
        settings = peft.PeftConfig.from_pretrained(adapter.path)
        settings.inference_mode, settings.init_lora_weights = False, True
        settings.base_model_name_or_path = None  # a base has other names elsewhere; whether it fits, its shapes say
    else:
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=adapter.r,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.rslora,
            use_dora=adapter.method == "dora",
            target_modules=_targets(model, recipe),
        )
    settings.lora_dropout, settings.revision = adapter.dropout, recipe.model.revision
    linear = _linear_layers(model)
    try:
        if pipeline_stages.is_stage(
            model
        ):  # what all-linear means is settled for all stages: one rank saves the settings
            peft.get_peft_model(pipeline_stages.meta_model(model.config), settings)
        wrapped = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"adapter.targets: {' '.join(str(error).split())[:300]}") from None
    _init_adapter(wrapped, recipe.train.seed)
    if hasattr(model.get_output_embeddings(), "base_layer") and adapter.method == "dora":
        raise UserError(
            "adapter.targets: DoRA divides by the norm of each of the head's rows, and those of padding are zero; take "
            "the head out, or use adapter.method=lora"
        )
    if adapter.path is not None:
        reached = {name.removeprefix("base_model.model.") for name, _ in wrapped.named_modules()}
        left_out = [name for name in linear if f"{name}.base_layer" not in reached]
        if adapter.targets == "all-linear" and left_out:
            raise UserError(
                f"adapter.targets: is all-linear, but the adapter in {adapter.path} leaves out {left_out[0]}; take the "
                "key out"
            )
        _load_adapter_weights(wrapped, Path(adapter.path))
    _keep_tied(model)
    return wrapped


def _init_adapter(model: Any, seed: int) -> None:
    """First values that follow from the seed and the module's name alone, wherever it is and with whichever others.

    As PEFT draws them, but for that: a rank may hold a part of the layers, or of a layer.
    """
    for name, module in model.named_modules():
        draw = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
        for layer in getattr(module, "lora_A", {}).values():
            whole = torch.empty(layer.weight.shape)
            copy_full_(layer.weight, torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=draw))
        for parameter in getattr(module, "lora_embedding_B", {}).values():
            copy_full_(parameter, torch.randn(parameter.shape, generator=draw))


def _linear_layers(model: Any) -> list[str]:
    """What all-linear means: every linear layer but the output head."""
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]


def _targets(model: Any, recipe: Recipe) -> str | list[str]:
    """adapter.targets; with added tokens also the embedding and the head, whose new rows would else stay the mean."""
    targets = recipe.adapter.targets
    if not recipe.model.add_tokens:
        return targets
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if module in layers]
    if targets == "all-linear":
        return sorted({name.rpartition(".")[2] for name in _linear_layers(model)} | set(names))
    return [*targets, *names] if isinstance(targets, list) else rf"{targets}|(.*\.)?({'|'.join(map(re.escape, names))})"


def _load_adapter_weights(model: Any, folder: Path) -> None:
    """Put the weights of the adapter in `folder` in the place of the new ones. Raises UserError unless all fit."""
    import peft
    from peft.utils.integrations import gather_params_ctx

    found = load_file(folder / WEIGHTS)
    if pipeline_stages.is_stage(model):
        here = {name for name, _ in model.named_modules()}
        absent = {
            f"base_model.model.{name}" for name, _ in pipeline_stages.meta_model(model.config).named_modules()
        } - here
        found = {name: tensor for name, tensor in found.items() if name.split(".lora_")[0] not in absent}
    rows = {name: found.pop(name) for name in list(found) if "lora_" not in name}
    where = f"adapter.path: {folder} does not fit the model"
    try:
        result = peft.set_peft_model_state_dict(model, found)
    except RuntimeError as error:
        raise UserError(f"{where}: {str(error).splitlines()[-1].strip()}") from None
    parameters = dict(model.named_parameters())
    missing = [name for name in result.missing_keys if name in parameters and parameters[name].requires_grad]
    odd = [*(f"it lacks {name}" for name in missing), *(f"there is no {name}" for name in result.unexpected_keys)]
    for name, tensor in rows.items():  # of a frozen embedding or head, as long as the added tokens made it
        if name not in parameters:
            odd.append(f"there is no {name}")
            continue
        with gather_params_ctx(parameters[name]):
            if parameters[name].shape == tensor.shape:
                parameters[name].data.copy_(tensor)
            else:
                odd.append(f"{name} is {list(tensor.shape)} there, {list(parameters[name].shape)} here")
    if odd:
        raise UserError(f"{where}: {odd[0]}" + (f", and {len(odd) - 1} more" if odd[1:] else ""))


def _keep_tied(model: Any) -> None:
    """Tie an embedding to a head where both are adapted: transformers' own way knows no weights below adapters."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if hasattr(head, "base_layer") and head.weight is embedding.weight:

        def tie_weights(self: Any, *_: Any, **__: Any) -> None:
            head.get_base_layer().weight = getattr(embedding, "base_layer", embedding).weight

        model.tie_weights = types.MethodType(tie_weights, model)


def saved_frozen_names(model: Any, recipe: Recipe) -> set[str]:
    """Names of the frozen parameters that an adapter is saved with: those that the added tokens have rows in."""
    if recipe.adapter.method == "none" or not recipe.model.add_tokens:
        return set()
    core = model.get_base_model()
    layers = (core.get_input_embeddings(), core.get_output_embeddings())
    mine = {id(p) for layer in layers for p in layer.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in mine and not p.requires_grad}
