"""The folder that from_pretrained loads, and a saved model for inference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gearbox import filesystem
from gearbox.distributed import pipeline_stages


def save(
    model: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Any,
    source: str,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write what `from_pretrained` loads: the whole model, or the adapter alone. `tensors` are whole, on the CPU.

    All ranks of a sharded model must call this with their own iterator; only the rank that is given tensors writes.
    A whole model is cast to dtype, as it comes in; an adapter keeps its own. The folder appears at once, by a rename.
    """
    is_adapter = hasattr(model, "peft_config")
    weights = {name: tensor if is_adapter else tensor.to(dtype) for name, tensor in tensors}
    if not weights:
        return
    with filesystem.atomic_folder(folder, folder.with_name(f"{folder.name}.tmp")) as aside:
        if is_adapter:
            if pipeline_stages.is_stage(model):
                import peft

                # Of what it is given PEFT writes only that for which the model has adapters: let it be the whole model.
                model = peft.get_peft_model(pipeline_stages.meta_model(model.config), model.peft_config["default"])
            model.peft_config["default"].base_model_name_or_path = source
            # "auto" would ask the hub for the size of the base's vocabulary.
            has_rows = any("lora_" not in name for name in weights)
            model.save_pretrained(aside, state_dict=weights, save_embedding_layers=has_rows)
            (aside / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        else:
            model.config.use_cache = True
            model.config.dtype = dtype
            model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it was asked


def stored_dtype(config: Any) -> torch.dtype:
    """The dtype in which a checkpoint's weights are kept, and in which the trained ones are saved."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def load_for_answers(folder: Path, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A saved model (an adapter with its base) and its tokenizer, on the CPU or the first GPU, as a user loads it."""
    settings = folder / "adapter_config.json"
    adapter = json.loads(settings.read_text()) if settings.is_file() else {}
    base, revision = adapter.get("base_model_name_or_path", str(folder)), adapter.get("revision")
    trust = {"trust_remote_code": trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(base, revision=revision, dtype="auto", use_safetensors=True, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    if settings.is_file():
        import peft

        if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # the adapter brings their rows
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model = peft.PeftModel.from_pretrained(model, str(folder), use_safetensors=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer
