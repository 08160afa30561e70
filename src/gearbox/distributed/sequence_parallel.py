"""Divide the tokens of a row among several ranks, and keep packed documents isolated.

Shapes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from transformers.utils.generic import is_flash_attention_requested

from gearbox.config.gear import Gear
from gearbox.errors import UserError
from gearbox.kernels.attention import DOCUMENTS
from gearbox.rows.batches import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_attention(model: PreTrainedModel) -> None:
    """Raise UserError if the model's attention needs a mask, which would cover only this rank's tokens.

    Ulysses passes full sequences with their positions to the attention, which then isolates packed documents.
    """
    name = model.config._attn_implementation
    if name != DOCUMENTS and not is_flash_attention_requested(model.config):
        raise UserError(
            f"model.name: {model.config.model_type} computes attention with a mask ({name}) here, and ranks cannot "
            "share the rows of a mask; use the gear zero3"
        )


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
