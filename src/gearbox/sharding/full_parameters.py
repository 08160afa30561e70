"""Gather full parameters under any engine, one at a time, and copy full tensors into sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from gearbox.checkpoint.shards import ShardReader
from gearbox.sharding.sharded_state import block_offsets, persistent_buffers, shard_of
from gearbox.sharding.unwrap import resharded_parameters
from gearbox.world import World


class FullParameters:
    """The full parameters and persistent buffers of all ranks, which rank 0 receives one at a time.

    All ranks gather one tensor at a time, so each rank must create one and iterate over it once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        world: World,
        device: torch.device,
        only_trainable: bool,
        also: Container[str] = (),
        saved: ShardReader | None = None,
    ) -> None:
        """List the tensors. With `only_trainable`, include only frozen ones that `also` names.

        `device` receives tensors of other ranks. `saved` is a checkpoint whose values replace those of the model. What
        it lacks is frozen, so it comes from the model.
        """
        self.world, self.device, self.saved = world, device, saved
        tensors = [*resharded_parameters(model), *persistent_buffers(model)]
        self._own = {name: t for name, t in tensors if t.requires_grad or not only_trainable or name in also}
        shapes = {name: tuple(shard_of(name, tensor).full_shape) for name, tensor in self._own.items()}
        self._by_rank = world.gather({name: (shape, self._own[name].dtype) for name, shape in shapes.items()})
        self.expected = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for named in self._by_rank
            for name, (shape, dtype) in named.items()
        }
        """A tensor without data for each one that arrives. Masters arrive in fp32, whatever the dtype here."""

    @property
    def arrive_here(self) -> bool:
        """True on the rank that receives the tensors. All others only take part in gathering them."""
        return self.world.rank == 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield on rank 0 the name of each tensor, and the tensor on the CPU. Trained parameters are fp32 masters.

        A tensor that this process holds in full is not copied. This keeps no tensor while it gathers the next one.
        """
        for name, tensor in self._gathered():
            if self.saved is not None and (name in self.saved.shapes or self.saved.kinds(name)):
                kind = "parameter" if name in self.saved.shapes else "buffer"
                tensor = self.saved.read(kind, name).view(tensor.shape)
            yield name, tensor
            del tensor  # so that it is not kept while the next one is gathered

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield on rank 0 the tensors of the model. All ranks gather them together."""
        for name, tensor in self._own.items():
            if self.arrive_here:
                yield name, shard_of(name, tensor).full().detach().cpu()
            else:
                shard_of(name, tensor).full()
        yield from self._from_other_ranks()

    def _from_other_ranks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield on rank 0 the tensors that it lacks: later pipeline stages, sent by the first rank of each stage."""
        seen = {*self._by_rank[0]}
        for holder, held_there in enumerate(self._by_rank[1:], start=1):
            for name, (shape, dtype) in held_there.items():
                if name in seen:
                    continue
                seen.add(name)
                if self.world.rank == holder:
                    torch.distributed.send(self._own[name].detach().contiguous(), 0)
                elif self.arrive_here:
                    yield name, self._received(shape, dtype, holder)

    def _received(self, shape: tuple[int, ...], dtype: torch.dtype, holder: int) -> torch.Tensor:
        """Return a tensor that another rank sends."""
        received = torch.empty(shape, dtype=dtype, device=self.device)
        torch.distributed.recv(received, holder)
        return received.cpu()


@torch.no_grad()
def copy_full_(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor into a parameter, or this rank's shard of it into a sharded one. Call it before `prepare`."""
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)


@contextmanager
def keeping_loaded_weights(is_quantized: bool) -> Iterator[None]:
    """Let from_pretrained under ZeRO-3 initialize only modules with a missing weight.

    It calls the family's `_init_weights` for all modules, which leaves loaded weights as they are. But several families
    read the shape of a weight there, and a partitioned weight has none. Buffers of a quantized model have no values
    yet, because it was built without memory.
    """
    usual = PreTrainedModel._initialize_weights

    def initialize(self: PreTrainedModel, module: torch.nn.Module, *options: bool) -> None:
        weights = [*module.parameters()]
        are_loaded = bool(weights) and all(getattr(weight, "_is_hf_initialized", False) for weight in weights)
        has_empty_buffers = is_quantized and any(True for _ in module.buffers(recurse=False))
        if has_empty_buffers or not (are_loaded and is_deepspeed_zero3_enabled()):
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
