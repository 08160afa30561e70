"""The folder that from_pretrained loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from gearbox import filesystem
from gearbox.distributed import pipeline_stages
from gearbox.distributed.unwrap import without_adapter

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
    """Write what `from_pretrained` loads: the full model, or the adapter alone. `tensors` are full, on the CPU.

    All ranks of a sharded model must call this with their own iterator; only the rank that is given tensors writes.
    A full model is cast to dtype, tensor by tensor; an adapter keeps its own. `source` is what an adapter was trained
    upon. The folder appears at once, by a rename.
    """
    is_adapter = without_adapter(model) is not model
    weights = {name: tensor if is_adapter else tensor.to(dtype) for name, tensor in tensors}
    if not weights:
        return
    with filesystem.atomic_folder(folder, folder.with_name(f"{folder.name}.tmp")) as aside:
        if is_adapter:
            _save_adapter(model, weights, source, aside)
        else:
            model.config.use_cache = True
            model.config.dtype = dtype
            model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while its model was asked


def _save_adapter(model: PeftModel, weights: dict[str, torch.Tensor], source: str, folder: Path) -> None:
    """Write an adapter with its config, in PEFT's format."""
    if pipeline_stages.is_stage(model):
        import peft

        # Of the weights it is given PEFT writes only those for which the model has adapters: let it be the full model.
        model = peft.get_peft_model(pipeline_stages.meta_model(model.config), model.peft_config["default"])
    model.peft_config["default"].base_model_name_or_path = source
    # "auto" would ask the hub for the size of the base's vocabulary.
    has_rows = any("lora_" not in name for name in weights)
    model.save_pretrained(folder, state_dict=weights, save_embedding_layers=has_rows)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def stored_dtype(config: PretrainedConfig) -> torch.dtype:
    """Return the dtype in which a checkpoint's weights are stored, and in which the trained ones are saved."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
