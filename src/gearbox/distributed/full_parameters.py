"""Gather full parameters under any engine, one at a time, and copy full tensors into sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from gearbox.distributed.sharded_state import block_offsets, persistent_buffers, shard_of
from gearbox.distributed.unwrap import resharded_parameters
from gearbox.world import World


def iter_full_parameters(
    model: torch.nn.Module,
    world: World,
    device: torch.device,
    only_trainable: bool,
    also: Container[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield on rank 0 the name and full tensor, on the CPU, of each parameter and persistent buffer.

    Trained parameters are fp32 masters. With `only_trainable`, frozen ones are included only if `also` names them.
    All ranks gather one tensor at a time, so each rank must exhaust the iterator. `device` receives tensors of other
    ranks.
    """
    tensors = [*resharded_parameters(model), *persistent_buffers(model)]
    wanted = [(name, t) for name, t in tensors if t.requires_grad or not only_trainable or name in also]
    for name, tensor in wanted:
        full = shard_of(name, tensor).full()
        if world.rank == 0:
            yield name, full.detach().cpu().clone()
    yield from _from_other_ranks(dict(wanted), world, device)


def _from_other_ranks(
    wanted: dict[str, torch.Tensor], world: World, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield on rank 0 the tensors that it lacks: later pipeline stages, sent by the first rank of each stage."""
    wanted_by_rank = world.gather([(name, tensor.shape, tensor.dtype) for name, tensor in wanted.items()])
    seen = {name for name, *_ in wanted_by_rank[0]}
    for holder, wanted_there in enumerate(wanted_by_rank[1:], start=1):
        for name, shape, dtype in wanted_there:
            if name in seen:
                continue
            seen.add(name)
            if world.rank == holder:
                torch.distributed.send(wanted[name].detach().contiguous(), 0)
            elif world.rank == 0:
                received = torch.empty(shape, dtype=dtype, device=device)
                torch.distributed.recv(received, holder)
                yield name, received.cpu()


@torch.no_grad()
def copy_full_(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor into a parameter, or this rank's shard of it into a sharded one. Call it before `prepare`."""
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)


@contextmanager
def keeping_loaded_weights() -> Iterator[None]:
    """Let from_pretrained under ZeRO-3 initialize only modules with a missing weight.

    It calls the family's `_init_weights` for all modules, which leaves loaded weights as they are. But several families
    read the shape of a weight there, and a partitioned weight has none.
    """
    usual = PreTrainedModel._initialize_weights

    def initialize(self: PreTrainedModel, module: torch.nn.Module, *options: bool) -> None:
        weights = [*module.parameters()]
        are_loaded = bool(weights) and all(getattr(weight, "_is_hf_initialized", False) for weight in weights)
        if not (are_loaded and is_deepspeed_zero3_enabled()):
            usual(self, module, *options)

    PreTrainedModel._initialize_weights = initialize
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = usual


def local_and_computed(
    parameter: torch.Tensor, tensor: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a parameter, and the same part of what `compute` makes of a full tensor.

    Ranks with other parts of `tensor`, which is sharded like the parameter, gather it: all of them must call this.
    """
    if not isinstance(parameter, DTensor) or not isinstance(tensor, DTensor):
        return parameter, compute(tensor)
    local = parameter.to_local()
    corner = zip(block_offsets(parameter, local), local.shape, strict=True)
    return local, compute(tensor.full_tensor())[tuple(slice(first, first + length) for first, length in corner)]
