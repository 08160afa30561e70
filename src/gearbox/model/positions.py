"""Find out how many positions a model has, before its weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from gearbox.distributed import pipeline_stages
from gearbox.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")  # last part of the name
TOWERS = ("vision", "image", "img", "audio")  # parts of the names of modules that do not read text


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions in the model's table, or None if it computes positions of any number.

    Rotary models compute them. Others are built without memory, to look for a table.
    """
    if getattr(config.get_text_config(decoder=True), "rope_parameters", None):
        return None
    try:
        model = pipeline_stages.meta_model(config)
    except Exception:  # loading will explain it
        return None
    return min(_table_sizes(model), default=None)


def _table_sizes(model: PreTrainedModel) -> list[int]:
    """Return the number of positions of each table in a model: embeddings, and buffers of GPT-J and CTRL."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    sizes = {name: module.num_embeddings - getattr(module, "offset", 0) for name, module in modules.items()}
    sizes |= {name: len(buffer) for name, buffer in model.named_buffers() if buffer.dim() == 2}
    for module in model.modules():  # CTRL's table is a plain attribute
        sizes |= {name: len(value) for name, value in vars(module).items() if name in TABLES and hasattr(value, "dim")}
    return [
        size
        for name, size in sizes.items()
        if name.rpartition(".")[2] in TABLES and not any(tower in name for tower in TOWERS)
    ]


def check_row_tokens(config: PretrainedConfig, row_tokens: int, limit: int | None) -> str | None:
    """Return a hint if rows are longer than those that the model was trained with.

    Raise UserError if they are longer than its table of positions: `limit`, from `num_positions`.
    """
    text = config.get_text_config(decoder=True)
    if limit is not None and row_tokens > limit:
        keys = [key for key, value in vars(text).items() if value == limit and "position" in key]
        named = f"{keys[0]} in its config.json" if keys else "the size of its table"
        raise UserError(
            f"batch.row_tokens: rows of {row_tokens:,} tokens, but {config.model_type} has {limit:,} positions "
            f"({named}); use {limit} or less"
        )
    trained = getattr(text, "max_position_embeddings", None)
    if limit is None and isinstance(trained, int) and 0 < trained < row_tokens:
        return (
            f"batch.row_tokens: rows of {row_tokens:,} tokens are longer than the {trained:,} positions that "
            f"{config.model_type} was trained with (max_position_embeddings in its config.json)"
        )
    return None
