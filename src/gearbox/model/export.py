"""Save a model or an adapter in a folder that `from_pretrained` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from gearbox import filesystem
from gearbox.distributed import pipeline_stages
from gearbox.distributed.unwrap import is_composite, without_adapter
from gearbox.model import dropout
from gearbox.model.pretrained import INDEX, Pretrained

if TYPE_CHECKING:
    from peft import PeftModel


def save(
    model: PreTrainedModel | PeftModel,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer: PreTrainedTokenizerFast,
    source: str,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write the full model, or only the adapter, in a folder that `from_pretrained` loads.

    `tensors` are unsharded, on the CPU. All ranks of a sharded model must call this with their own iterator. Only the
    rank that receives tensors writes. A full model is cast to `dtype`, tensor by tensor; an adapter keeps its dtype.
    `source` is the base of the adapter, and has the towers of a composite model. A rename makes the complete folder
    appear at once.
    """
    is_adapter = without_adapter(model) is not model
    weights = {name: tensor if is_adapter else tensor.to(dtype) for name, tensor in tensors}
    if not weights:
        return
    with filesystem.atomic_folder(folder) as aside:
        if is_adapter:
            _save_adapter(model, weights, source, aside)
        else:
            model.config.get_text_config().use_cache = True
            dropout.set_rates(model.config, model.own_dropout)
            named_as_loaded = revert_weight_conversion(model, weights)
            if is_composite(model.config):
                named_as_loaded |= _towers(model, named_as_loaded, source)
            sizes = {name: tensor.numel() for name, tensor in named_as_loaded.items()}  # saving consumes the tensors
            model.save_pretrained(aside, state_dict=named_as_loaded, save_original_format=False)
            _set_dtype(model.config, dtype)  # save_pretrained has written the dtype of the masters
            model.config.save_pretrained(aside)
            _count_parameters(aside / INDEX, sizes)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while it tested its model


def _count_parameters(index: Path, sizes: dict[str, int]) -> None:
    """Correct the number of parameters in the index of a large model: transformers counts those of this rank."""
    if index.exists():
        content = filesystem.read_json_object(index)
        content["metadata"]["total_parameters"] = sum(sizes[name] for name in content["weight_map"])
        filesystem.atomic_write(index, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Set the dtype in a config and in its parts."""
    config.dtype = dtype
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        _set_dtype(part, dtype)


def _towers(model: PreTrainedModel, trained: Collection[str], source: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the source that are not part of the trained text, by their names in its files.

    model: a composite model without its towers, or a stage of it. trained: the names of the text's tensors.
    """
    tied = dict.fromkeys(model._tied_weights_keys or (), torch.empty(0))
    text = {*trained, *revert_weight_conversion(model, tied)}
    towers: dict[str, torch.Tensor] = {}
    revision = getattr(model.config, "_commit_hash", None)
    for path in Pretrained(source, revision).weight_files():
        with safe_open(path, "pt") as file:
            towers |= {name: file.get_tensor(name) for name in set(file.keys()) - text}
    return towers


def stops(model: PreTrainedModel | PeftModel) -> set[int]:
    """Return the tokens at which generation stops."""
    ids = getattr(without_adapter(model).generation_config, "eos_token_id", None)
    return {*ids} if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()


def stop_at(model: PreTrainedModel | PeftModel, tokens: set[int]) -> None:
    """Let generation also stop at these tokens, here and with the saved model."""
    config, new = without_adapter(model).generation_config, sorted(tokens - stops(model))
    if new and config is not None:
        config.eos_token_id = [*sorted(stops(model)), *new]
        # transformers refuses to save a changed config if it has a fault that a published one may have.
        config._original_object_hash = hash(config)


def _save_adapter(model: PeftModel, weights: dict[str, torch.Tensor], source: str, folder: Path) -> None:
    """Write an adapter and its config in PEFT's format."""
    if pipeline_stages.is_stage(model):
        import peft

        # PEFT writes only weights for which the model has adapters, so give it the full model.
        model = peft.get_peft_model(pipeline_stages.meta_model(model.config), model.peft_config["default"])
    model.peft_config["default"].base_model_name_or_path = source
    # "auto" would ask the Hub for the size of the base's vocabulary.
    has_rows = any("lora_" not in name for name in weights)
    model.save_pretrained(folder, state_dict=weights, save_embedding_layers=has_rows)
    if (generation := without_adapter(model).generation_config) is not None:
        generation.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def stored_dtype(config: PretrainedConfig, source: Pretrained) -> torch.dtype:
    """Return the dtype of the weights in a pretrained checkpoint, which is also the dtype of the saved model."""
    dtype = config.dtype or config.get_text_config().dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    for path in source.weight_files()[:1]:
        with safe_open(path, "pt") as file:
            found = {file.get_tensor(name).dtype for name in [*file.keys()][:1]}
        return next((one for one in found if one.is_floating_point), torch.float32)
    return torch.float32
