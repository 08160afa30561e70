"""Divide the tokens of a row among several ranks, and keep packed documents isolated.

Shapes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers.utils.generic import is_flash_attention_requested

from gearbox.config.gear import Gear
from gearbox.errors import UserError
from gearbox.kernels.attention import DOCUMENTS, Parts, dividing_rows
from gearbox.rows.units import IGNORE_INDEX, NOT_COMPARED


def check_attention(gear: Gear, family: str, attention: str) -> None:
    """Raise UserError if ranks share rows and the model's attention needs a mask, which would cover only one's tokens.

    Ulysses passes full sequences with their positions to the attention, which then isolates packed documents. Ring
    attention is attention by document.
    """
    if not gear.shares_rows or attention == DOCUMENTS:
        return
    if gear.degree("sp") == 1 or not is_flash_attention_requested(requested_attention_implementation=attention):
        raise UserError(
            f"model.name: {family} computes attention with a mask ({attention}) here, and ranks cannot share the rows "
            f"of a mask; use the gear {'zero3' if gear.degree('sp') > 1 else 'fsdp'}"
        )


@contextmanager
def local_tokens(
    gear: Gear, accelerator: Accelerator, inputs: dict[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tokens of a micro-batch ([B, T] each) that this rank computes when ranks share a sequence.

    Rows are padded to a divisible length, with tokens without targets. The attention of ring, in forward and backward
    passes, gathers keys and values only within this context.
    """
    degree = gear.degree("sp") * gear.degree("cp")
    if degree == 1:
        yield inputs
        return
    rank = accelerator.process_index % degree
    if gear.degree("sp") > 1:
        inputs = _padded_to_multiple(inputs, degree)
        yield {name: tensor.chunk(degree, dim=1)[rank].contiguous() for name, tensor in inputs.items()}
        return
    # Later tokens read more keys: so each rank computes an early part of a row, and a late part.
    inputs = _padded_to_multiple(inputs, 2 * degree)
    size = inputs["labels"].shape[1] // (2 * degree)
    mine = [slice(part * size, (part + 1) * size) for part in (rank, 2 * degree - 1 - rank)]
    group = accelerator.torch_device_mesh["cp"].get_group()

    def gather(local: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, _GatherTokens.apply(local, group))  # type: ignore[no-untyped-call]

    parts = Parts.of(inputs["position_ids"].cpu(), mine, gather)
    parts = replace(parts, bounds=parts.bounds.to(accelerator.device, non_blocking=True))
    with dividing_rows(parts):
        yield {name: torch.cat([tensor[:, part] for part in mine], 1) for name, tensor in inputs.items()}


class _GatherTokens(torch.autograd.Function):
    """Gather the complete rows, [B, K, T, E], from each rank's early and late part, and add up their gradients."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401  torch's
        ctx.group = group
        gathered = local.new_empty(group.size() * len(local), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        batch, heads, num_tokens, width = local.shape
        early, late = gathered.view(-1, batch, heads, 2, num_tokens // 2, width).unbind(3)
        return torch.cat([early, late.flip(0)]).permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401  torch's
        early, late = torch.stack(gradient.chunk(2 * ctx.group.size(), 2)).chunk(2)
        by_rank = torch.stack([early, late.flip(0)], 3).flatten(3, 4)  # [ranks, B, K, T / ranks, E]
        local = torch.empty_like(by_rank[0])
        dist.reduce_scatter_tensor(local, by_rank.flatten(0, 1), group=ctx.group)
        return local, None


def sum_over_sharing(gear: Gear, accelerator: Accelerator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sums a tensor over the ranks that share rows.

    All of them must then compute the same. Its backward pass is the sum of their equal gradients.
    """
    if not gear.shares_rows:
        return lambda part: part
    if gear.degree("sp") > 1:
        from deepspeed.utils import groups

        group = groups._get_sequence_parallel_group()
    else:
        group = accelerator.torch_device_mesh["cp"].get_group()
    return lambda part: cast(torch.Tensor, _SumOverRanks.apply(part, group))  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over ranks, whose gradient is equal on all of them."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401  torch's
        ctx.size = group.size()
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401  torch's
        return gradient * ctx.size, None


def _padded_to_multiple(inputs: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Pad rows to a multiple of a length and add positions. The padding is a document without targets."""
    width = inputs["labels"].shape[1]
    more = -width % multiple
    positions = torch.arange(width, device=inputs["labels"].device).expand_as(inputs["labels"])
    inputs = {"position_ids": positions, **inputs}
    ends = {
        "position_ids": torch.arange(more, device=positions.device),
        "labels": torch.tensor(IGNORE_INDEX),
        "answers": torch.tensor(NOT_COMPARED),
    }
    padding = {
        name: ends.get(name, torch.tensor(0)).to(tensor).expand(len(tensor), more, *tensor.shape[2:])
        for name, tensor in inputs.items()
    }
    return {name: torch.cat([tensor, padding[name]], 1) for name, tensor in inputs.items()}
