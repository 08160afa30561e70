"""Rows whose tokens several ranks share: what each computes of a row, and documents that stay apart all the same.

Shapes: B rows of a micro batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gearbox.config.gear import Gear
from gearbox.data.batches import IGNORE_INDEX
from gearbox.errors import UserError


def isolate_documents(model: Any) -> None:
    """Let sdpa build the mask of packed documents from their positions, if it is given none.

    Ulysses hands the attention whole sequences with their positions, and drops the mask, which was made for a part.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if model.config._attn_implementation == "eager":
        raise UserError(
            f"model.name: {model.config.model_type} has eager attention alone, which cannot cut rows; use zero3"
        )
    if model.config._attn_implementation != "sdpa":
        return
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def isolated(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *rest: Any, **options: Any) -> Any:
        positions = options.get("position_ids")
        if attention_mask is None and positions is not None and (positions[:, 1:] == 0).any():
            document = (positions == 0).cumsum(1)  # [B, T]
            same = document[:, None, :, None] == document[:, None, None, :]
            attention_mask = same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
        return usual(module, query, key, value, attention_mask, *rest, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = isolated


@contextmanager
def local_tokens(gear: Gear, accelerator: Any, inputs: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Of a micro batch ([B, T] each) the tokens that this rank computes, where ranks share a sequence.

    Rows are filled up with tokens without targets to a length that can be cut.
    """
    num_parts, rank = gear.degree("sp"), accelerator.process_index % gear.degree("sp")
    num_cuts = num_parts * 2 * gear.degree("cp") if gear.degree("cp") > 1 else num_parts
    if num_cuts > 1:
        inputs = _padded_to_multiple(inputs, num_cuts)
    if gear.degree("cp") > 1:
        buffers = list(inputs.values())
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            yield inputs
    else:
        yield {name: tensor.chunk(num_parts, dim=1)[rank].contiguous() for name, tensor in inputs.items()}


def _padded_to_multiple(inputs: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Rows of a multiple of that length, with positions: what is added is a document of its own without targets."""
    width = inputs["labels"].shape[1]
    more = -width % multiple
    positions = torch.arange(width, device=inputs["labels"].device).expand_as(inputs["labels"])
    inputs = {"position_ids": positions, **inputs}
    ends = {"position_ids": torch.arange(more, device=positions.device), "labels": torch.tensor(IGNORE_INDEX)}
    return {
        name: torch.cat([tensor, ends.get(name, torch.tensor(0)).to(tensor).expand(len(tensor), more)], 1)
        for name, tensor in inputs.items()
    }
