"""Add adapters and tokens to a loaded model, before an engine wraps it.

Every gear calls these functions on the same weights, so all gears start identically. ZeRO-3 has already partitioned the
weights and gathers them one at a time here. Under FSDP a rank holds only its rows of each matrix. All ranks receive
what rank 0 has added.
"""

from __future__ import annotations

import math
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gearbox.checks.model import no_such_module
from gearbox.config.adapter_settings import WEIGHTS, SavedAdapter, read_adapter_config, saved_adapter_settings
from gearbox.config.recipe import Adapter, Recipe
from gearbox.distributed import pipeline_stages
from gearbox.errors import UserError, one_line
from gearbox.model.pretrained import ADAPTER_FILES, Pretrained
from gearbox.sharding.full_parameters import copy_full_
from gearbox.sharding.unwrap import decoder_of, is_composite, without_adapter

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

# PEFT advises sharing one adapter between tied embeddings. Its two parameters would then be views of one storage: an
# optimizer updates that storage twice, and its shards diverge.
warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer is part of")
warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True` and the tied_target_modules")


def download_adapter(recipe: Recipe) -> Recipe:
    """Download an adapter from the Hub. Return the recipe with its folder as adapter.path and with its settings."""
    path = recipe.adapter.path
    if path is None or Path(path).is_dir():
        return recipe
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(path, allow_patterns=ADAPTER_FILES)
        adapter = saved_adapter_settings(recipe.adapter, Path(folder))
    except ValueError as error:
        raise UserError(str(error)) from None
    except Exception as error:
        raise UserError(
            f"adapter.path: {path!r} is not a local folder and could not be downloaded from the Hub: "
            f"{one_line(error, 200)}"
        ) from None
    return recipe.model_copy(update={"adapter": adapter.model_copy(update={"path": folder})})


def check_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise UserError if the recipe's added tokens differ from those of the adapter at adapter.path."""
    if recipe.adapter.path is None:
        return
    folder, given = Path(recipe.adapter.path), recipe.model.add_tokens
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            has_rows = any("lora_" not in name for name in file.keys())  # noqa: SIM118  not a mapping
    except SafetensorError as error:
        raise UserError(
            f"adapter.path: {folder / WEIGHTS} is damaged ({one_line(error)}); download or copy it again"
        ) from None
    if not has_rows:
        if given:
            raise UserError(
                f"model.add_tokens: the adapter in {folder} was trained without added tokens; remove them, or train a "
                "new adapter (adapter.path=null)"
            )
        return
    trust = recipe.model.trust_remote_code
    saved = Pretrained(str(folder), trust_remote_code=trust, key="adapter.path", is_adapter=True)
    saved_ids = saved.tokenizer().get_added_vocab()
    known = set(tokenizer.get_vocab()) - set(given)
    added = [token for token in sorted(saved_ids, key=lambda token: saved_ids[token]) if token not in known]
    if added != given:
        raise UserError(
            f"model.add_tokens: is {given}, but the adapter in {folder} was trained with {added}; use those"
        )


@contextmanager
def peft_without_bitsandbytes() -> Iterator[None]:
    """Hide bitsandbytes from PEFT, unless it is imported already, as for a quantized model.

    PEFT imports it wherever it is installed, for quantized layers only: 600 modules, a second and 50 MB on every rank.
    """
    if "bitsandbytes" in sys.modules:
        yield
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # documented: find_spec then returns None
    try:
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available

        yield
    finally:
        del sys.modules["bitsandbytes"]
        for remembers in (is_bnb_available, is_bnb_4bit_available):
            remembers.cache_clear()


def add_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> None:
    """Give each token a row of the embedding and of the head, initialized with the mean of all other rows.

    The tokenizer must already have the tokens. Padding rows of the embedding are used before it is resized.
    """
    if not tokens:
        return
    with peft_without_bitsandbytes():
        from peft.utils.integrations import gather_params_ctx

    ids = tokenizer.convert_tokens_to_ids(tokens)
    if max(ids) >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in {id(p): p for layer in layers for p in layer.parameters()}.values():  # tied parameters only once
        with gather_params_ctx(parameter):
            parameter.data[ids] = parameter.data[: min(ids)].float().mean(0).to(parameter.dtype)


@peft_without_bitsandbytes()
def attach_adapter(model: PreTrainedModel, recipe: Recipe) -> PeftModel:
    """Freeze the model, and return it with a trainable adapter: a new one or the one at adapter.path."""
    import peft

    adapter = recipe.adapter
    config = _peft_config(model, recipe)
    linear_layers = _linear_layers(model)
    # Resolves all-linear for all stages at once, since one rank saves the config.
    full = pipeline_stages.meta_model(model.config) if pipeline_stages.is_stage(model) else model
    names = [name for name, _ in full.named_modules()]
    try:
        whole = adapted = peft.get_peft_model(full, config)
        if full is not model:
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        _check_targets(adapter, names, names)
        where = "a pipeline stage has none of these modules: " if full is not model else ""
        advice = "; experts can have only LoRA without dropout: list other layers, such as [q_proj, v_proj]"
        of_experts = advice if "ParamWrapper" in str(error) else ""
        raise UserError(f"adapter.targets: {where}{one_line(error).rstrip('.')}{of_experts}") from None
    _check_targets(adapter, [*whole.targeted_module_names, *_converted(adapter, config)], names)
    _init_adapter(adapted, recipe.train.seed)
    if hasattr(model.get_output_embeddings(), "base_layer") and adapter.method == "dora":
        raise UserError(
            "adapter.targets: DoRA divides by the norm of each head row, which is 0 for padding; remove the head, or "
            "use adapter.method=lora"
        )
    if adapter.path is not None:
        modules = {name.removeprefix("base_model.model.") for name, _ in adapted.named_modules()}
        left_out = [name for name in linear_layers if f"{name}.base_layer" not in modules]
        if adapter.targets == "all-linear" and left_out:
            raise UserError(
                f"adapter.targets: is all-linear, but the adapter in {adapter.path} leaves out {left_out[0]}; remove "
                "the key"
            )
        _load_adapter_weights(adapted, Path(adapter.path))
    _keep_tied(model)
    return adapted


def _peft_config(model: PreTrainedModel, recipe: Recipe) -> PeftConfig:
    """Return PEFT's config: from adapter.path if it is set, otherwise built from the recipe."""
    import peft

    adapter = recipe.adapter
    if adapter.path is not None:
        # The base may have a different name here; its shapes are checked instead.
        try:
            config = peft_config(read_adapter_config(Path(adapter.path)))
        except ValueError as error:
            raise UserError(f"adapter.path: {adapter.path!r} {one_line(error)}") from None
    else:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=adapter.r,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.rslora,
            use_dora=adapter.method == "dora",
            target_modules=_targets(model, recipe),
            exclude_modules=special_layers(model) or None if adapter.targets == "all-linear" else None,
        )
    config.lora_dropout, config.revision = adapter.dropout, recipe.model.revision
    return config


def peft_config(settings: SavedAdapter) -> PeftConfig:
    """Return PEFT's config of a saved adapter. Raise ValueError for settings that do not go together."""
    import peft

    return peft.LoraConfig(task_type="CAUSAL_LM", **settings.options())


def _init_adapter(model: PeftModel, seed: int) -> None:
    """Draw initial values from the seed and each module's name, so that every gear draws the same values.

    PEFT uses the same distributions but draws in module order. A rank may hold only one stage, or shards of layers.
    """
    for name, module in model.named_modules():
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
        for layer in getattr(module, "lora_A", {}).values():
            full = torch.empty(layer.weight.shape)
            copy_full_(layer.weight, nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator))
        for parameter in getattr(module, "lora_embedding_B", {}).values():
            copy_full_(parameter, torch.randn(parameter.shape, generator=generator))


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers that all-linear means: every linear layer but the output head and special ones."""
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    excluded = {*special_layers(model), *(n for n, m in model.named_modules() if m is model.get_output_embeddings())}
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and name not in excluded]


def special_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers that are neither adapted by all-linear nor quantized.

    Some are of a class that computes something else, such as Llama 4's router. The kernels of Mamba read the weights
    of two layers, and so does Gemma 3n: these would bypass an adapter without a word.
    """
    names = []
    for name, module in model.named_modules():
        parent, _, own_name = name.rpartition(".")
        forward = type(module).forward
        is_changed = forward.__module__.startswith("transformers.models.") and type(module).__name__ != "FalconLinear"
        is_read = own_name in ("out_proj", "dt_proj") and hasattr(model.get_submodule(parent), "A_log")
        is_read |= own_name in ("correction_coefs", "prediction_coefs")
        if isinstance(module, nn.Linear) and (is_changed or is_read):
            names.append(name)
    return names


def _targets(model: PreTrainedModel, recipe: Recipe) -> str | list[str]:
    """Return adapter.targets. With added tokens, include the embedding and the head to train the new rows.

    For a composite model the result is a pattern: names would match its towers too when the adapter is loaded.
    """
    targets = _targets_with_tokens(model, recipe)
    if not is_composite(model.config) or (isinstance(targets, str) and targets != "all-linear"):
        return targets
    linear = _linear_layers(model) if targets == "all-linear" else []
    names = sorted({name.rpartition(".")[2] for name in linear}) or targets
    decoder = next(name for name, module in model.named_modules() if module is decoder_of(model))
    endings = "|".join(map(re.escape, names))
    return rf"{re.escape(decoder)}\.(.*\.)?({endings})|({endings})"


def _targets_with_tokens(model: PreTrainedModel, recipe: Recipe) -> str | list[str]:
    """Return adapter.targets, with the embedding and the head if tokens are added."""
    targets = recipe.adapter.targets
    if not recipe.model.add_tokens:
        return targets
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if module in layers]
    if targets == "all-linear":
        return sorted({name.rpartition(".")[2] for name in _linear_layers(model)} | set(names))
    return [*targets, *names] if isinstance(targets, list) else rf"{targets}|(.*\.)?({'|'.join(map(re.escape, names))})"


def _load_adapter_weights(model: PeftModel, folder: Path) -> None:
    """Replace the adapter's weights with those in `folder`. Raise UserError unless all of them fit."""
    import peft

    refusal = f"adapter.path: {folder} does not fit the model"
    weights = _weights_of_stage(model, load_file(folder / WEIGHTS))
    frozen = {name: weights.pop(name) for name in list(weights) if "lora_" not in name}
    try:
        result = peft.set_peft_model_state_dict(model, weights)
    except RuntimeError as error:
        raise UserError(f"{refusal}: {str(error).splitlines()[-1].strip()}") from None
    parameters = dict(model.named_parameters())
    missing = [name for name in result.missing_keys if name in parameters and parameters[name].requires_grad]
    problems = [
        *(f"it lacks {name}" for name in missing),
        *(f"the model has no {name}" for name in result.unexpected_keys),
        *_copy_frozen(parameters, frozen),
    ]
    if problems:
        raise UserError(f"{refusal}: {problems[0]}" + (f", and {len(problems) - 1} more" if problems[1:] else ""))


def _weights_of_stage(model: PeftModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights that belong to this stage of a pipeline, or all weights without a pipeline."""
    if not pipeline_stages.is_stage(model):
        return weights
    all_layers = pipeline_stages.meta_model(model.config).named_modules()
    elsewhere = {f"base_model.model.{name}" for name, _ in all_layers} - {name for name, _ in model.named_modules()}
    return {name: tensor for name, tensor in weights.items() if name.split(".lora_")[0] not in elsewhere}


def _copy_frozen(parameters: dict[str, nn.Parameter], frozen: dict[str, torch.Tensor]) -> list[str]:
    """Copy the saved embedding and head, which have rows for added tokens. Return a list of mismatches."""
    from peft.utils.integrations import gather_params_ctx

    problems = []
    for name, tensor in frozen.items():
        if name not in parameters:
            problems.append(f"the model has no {name}")
            continue
        with gather_params_ctx(parameters[name]):
            if parameters[name].shape == tensor.shape:
                parameters[name].data.copy_(tensor)
            else:
                problems.append(f"{name} is {list(tensor.shape)} there, but {list(parameters[name].shape)} here")
    return problems


def _keep_tied(model: PreTrainedModel) -> None:
    """Keep an adapted embedding and an adapted head tied. transformers cannot tie weights below adapters."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if hasattr(head, "base_layer") and head.weight is embedding.weight:

        def tie_weights(self: PreTrainedModel, *_: object, **__: object) -> None:
            head.get_base_layer().weight = getattr(embedding, "base_layer", embedding).weight

        model.tie_weights = types.MethodType(tie_weights, model)


def saved_frozen_names(model: PreTrainedModel | PeftModel, recipe: Recipe) -> set[str]:
    """Return the names of the frozen parameters saved with an adapter: those with rows for added tokens."""
    if recipe.adapter.method == "none" or not recipe.model.add_tokens:
        return set()
    base_model = without_adapter(model)
    layers = (base_model.get_input_embeddings(), base_model.get_output_embeddings())
    ids = {id(p) for layer in layers for p in layer.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in ids and not p.requires_grad}


def _converted(adapter: Adapter, config: PeftConfig) -> set[str]:
    """Return the names in adapter.targets that PEFT has replaced by parameters, as for the experts of a mixture."""
    kept = config.target_modules
    return set() if isinstance(kept, str) else set(adapter.targets) - set(kept or [])


def _check_targets(adapter: Adapter, adapted: Iterable[str], names: list[str]) -> None:
    """Raise UserError unless each name in adapter.targets matches one of the modules `adapted`.

    `names` are all modules of the model. A saved adapter's weights are checked instead.
    """
    if isinstance(adapter.targets, str) or adapter.path is not None:
        return
    ends = [f".{name}" for name in adapted]
    if unmatched := [name for name in adapter.targets if not any(end.endswith(f".{name}") for end in ends)]:
        known = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
        raise UserError(no_such_module(unmatched, known))
