"""Divide the tokens of a row among several ranks, and keep packed documents isolated.

Shapes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

from gearbox.config.gear import Gear
from gearbox.data.batches import IGNORE_INDEX
from gearbox.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def isolate_documents(model: PreTrainedModel) -> None:
    """Make sdpa build the mask of packed documents from their positions if it receives no mask.

    Ulysses passes full sequences with their positions to the attention. It drops the mask, which covers only this
    rank's tokens. Raise UserError if the model has only eager attention.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if model.config._attn_implementation == "eager":
        raise UserError(
            f"model.name: {model.config.model_type} has only eager attention, which cannot split rows; use zero3"
        )
    if model.config._attn_implementation != "sdpa":
        return
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def isolated(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *rest: object,
        **options: object,
    ) -> object:
        positions = options.get("position_ids")
        if attention_mask is None and isinstance(positions, torch.Tensor) and (positions[:, 1:] == 0).any():
            document = (positions == 0).cumsum(1)  # [B, T]
            same = document[:, None, :, None] == document[:, None, None, :]
            attention_mask = same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
        return usual(module, query, key, value, attention_mask, *rest, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = isolated


@contextmanager
def local_tokens(
    gear: Gear, accelerator: Accelerator, inputs: dict[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tokens of a micro-batch ([B, T] each) that this rank computes when ranks share a sequence.

    Rows are padded to a divisible length, with tokens without targets.
    """
    num_ranks, rank = gear.degree("sp"), accelerator.process_index % gear.degree("sp")
    num_chunks = num_ranks * 2 * gear.degree("cp") if gear.degree("cp") > 1 else num_ranks
    if num_chunks > 1:
        inputs = _padded_to_multiple(inputs, num_chunks)
    if gear.degree("cp") > 1:
        buffers = list(inputs.values())
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            yield inputs
    else:
        yield {name: tensor.chunk(num_ranks, dim=1)[rank].contiguous() for name, tensor in inputs.items()}


def _padded_to_multiple(inputs: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Pad rows to a multiple of a length and add positions. The padding is a document without targets."""
    width = inputs["labels"].shape[1]
    more = -width % multiple
    positions = torch.arange(width, device=inputs["labels"].device).expand_as(inputs["labels"])
    inputs = {"position_ids": positions, **inputs}
    ends = {"position_ids": torch.arange(more, device=positions.device), "labels": torch.tensor(IGNORE_INDEX)}
    return {
        name: torch.cat([tensor, ends.get(name, torch.tensor(0)).to(tensor).expand(len(tensor), more)], 1)
        for name, tensor in inputs.items()
    }
