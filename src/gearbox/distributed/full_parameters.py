"""One full parameter at a time, whatever engine holds it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from gearbox.distributed.sharded_state import Gather, alone, is_zero_parameter, persistent_buffers, resharded_parameters


def iter_full_parameters(
    accelerator: Any,
    bare: torch.nn.Module,
    only_trainable: bool,
    beside: Container[str] = (),
    gather: Gather = alone,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor of each parameter, on the CPU, one at a time; yields on rank 0, gathers on all.

    With only_trainable the frozen ones come where `beside` names them. Trained ones come in their fp32 masters.
    Persistent buffers come along. Every rank must run it to its end.
    """
    everything = [*resharded_parameters(bare), *persistent_buffers(bare)]
    wanted = [(name, p) for name, p in everything if p.requires_grad or not only_trainable or name in beside]
    for name, parameter in wanted:
        if isinstance(parameter, DTensor):
            whole = parameter.full_tensor()
        elif is_zero_parameter(parameter) and parameter.requires_grad:
            from deepspeed.utils import safe_get_full_fp32_param

            whole = safe_get_full_fp32_param(parameter)
        elif hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.data.clone() if accelerator.is_main_process else parameter.data
        else:
            whole = parameter
        if accelerator.is_main_process:
            yield name, whole.detach().cpu().clone()
    yield from _of_other_ranks(accelerator, dict(wanted), gather)


def _of_other_ranks(
    accelerator: Any, wanted: dict[str, torch.Tensor], gather: Gather
) -> Iterator[tuple[str, torch.Tensor]]:
    """What rank 0 does not hold, the later stages of a pipeline, each sent by the first rank that does."""
    everywhere = gather([(name, parameter.shape, parameter.dtype) for name, parameter in wanted.items()])
    seen = {name for name, *_ in everywhere[0]}
    for holder, held_there in enumerate(everywhere[1:], start=1):
        for name, shape, dtype in held_there:
            if name in seen:
                continue
            seen.add(name)
            if accelerator.process_index == holder:
                torch.distributed.send(wanted[name].detach().contiguous(), 0)
            elif accelerator.is_main_process:
                received = torch.empty(shape, dtype=dtype, device=accelerator.device)
                torch.distributed.recv(received, holder)
                yield name, received.cpu()


@torch.no_grad()
def copy_full_(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Give a parameter, or the part of it that this rank holds, its values out of the whole tensor, before prepare."""
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
