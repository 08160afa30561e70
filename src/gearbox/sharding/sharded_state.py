"""Read and restore this rank's shards of the parameters and the optimizer state, by name, under any engine.

An engine shards a tensor as ranges of the flattened tensor or, under tensor parallelism, as blocks. A saved shard can
be restored into any other sharding. `full` and every function with a `world` are collective: all ranks must call them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gearbox.checkpoint.shards import Scalar, ShardReader, TensorShard, scalars_from_json, scalars_to_json
from gearbox.errors import UserError
from gearbox.sharding.unwrap import STEPPED_SHARD, resharded_parameters, unwrap_optimizer
from gearbox.world import World, merged


@dataclass(frozen=True)
class ParameterShard(ABC):
    """This rank's shard of one parameter and of its optimizer state. Each way of sharding has a subclass."""

    name: str
    parameter: Any  # a tensor; under ZeRO it has attributes that DeepSpeed adds

    @property
    def full_shape(self) -> list[int]:
        """The shape of the full parameter."""
        return list(self.parameter.shape)

    @property
    def local_numel(self) -> int:
        """The number of elements that this rank holds between steps, with padding."""
        return int(self.parameter.numel())

    @property
    @abstractmethod
    def master_itemsize(self) -> int:
        """The bytes per element of the master, which the optimizer updates."""

    @abstractmethod
    def local(self) -> TensorShard | None:
        """Return this rank's shard of the master without padding; None or an empty shard if it has no part."""

    @abstractmethod
    def full(self) -> torch.Tensor:
        """Return the full master, or the full frozen parameter, gathered from all ranks."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return the tensors that the unwrapped optimizer keeps for the local shard, by kind."""

    @abstractmethod
    def scalars(self, optimizer: Optimizer) -> dict[str, Scalar]:
        """Return the numbers that the unwrapped optimizer keeps for the parameter, by kind."""

    def set(self, shard: TensorShard, value: torch.Tensor) -> None:
        """Write saved values into the local shard, or into a tensor of its optimizer state."""
        shard.tensor.copy_(value)


class TorchShard(ParameterShard):
    """A plain tensor, held in full, or a DTensor (FSDP2, tensor parallelism). Both are their own masters."""

    parameter: torch.Tensor

    @property
    def local_numel(self) -> int:
        """The number of elements that this rank holds."""
        return (self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter).numel()

    @property
    def master_itemsize(self) -> int:
        """The bytes per element."""
        return self.parameter.element_size()

    def local(self) -> TensorShard:
        """Return a view of the parameter, or of this rank's shard of it."""
        if not isinstance(self.parameter, DTensor):
            return TensorShard("parameter", self.name, 0, self.parameter.detach().view(-1))
        local = self.parameter.to_local().detach()
        offsets = block_offsets(self.parameter, local)
        row_shape = self.parameter.shape[1:]
        if local.shape[1:] != row_shape:
            return TensorShard("parameter", self.name, offsets, local)
        start = offsets[0] * math.prod(row_shape) if local.numel() else 0
        return TensorShard("parameter", self.name, start, local.view(-1))

    def full(self) -> torch.Tensor:
        """Return the parameter, gathered if it is sharded."""
        return self.parameter.full_tensor() if isinstance(self.parameter, DTensor) else self.parameter

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return the tensors that the optimizer keeps for the parameter, or for the shard in its place, by kind."""
        tensors = _tensors(optimizer.state.get(_stepped(self.parameter), {}))
        return {kind: t.to_local() if isinstance(t, DTensor) else t for kind, t in tensors.items()}

    def scalars(self, optimizer: Optimizer) -> dict[str, Scalar]:
        """Return the numbers that the optimizer keeps for the parameter, by kind."""
        return scalars_to_json(optimizer.state.get(_stepped(self.parameter), {}))


class _ZeroShard(ParameterShard):
    """A DeepSpeed parameter, whose fp32 master is in flat partitions."""

    master_itemsize = 4

    def full(self) -> torch.Tensor:
        """Return the full master, or the full frozen parameter under ZeRO-3, gathered."""
        import deepspeed

        full: torch.Tensor
        if self.parameter.requires_grad:
            full = deepspeed.utils.safe_get_full_fp32_param(self.parameter)
        else:
            with deepspeed.zero.GatheredParameters([self.parameter]):
                full = self.parameter.data.clone()
        return full

    def scalars(self, optimizer: Optimizer) -> dict[str, Scalar]:
        """Return the numbers that the optimizer keeps, by kind; they are equal for all partitions."""
        return next(map(scalars_to_json, optimizer.state.values()), {})


class Zero12Shard(_ZeroShard):
    """A parameter under ZeRO-1 or 2: each rank holds all of it, and at most a fragment of its master."""

    def local(self) -> TensorShard | None:
        """Return a view of the fragment, or None if it is on other ranks."""
        mapping = self.parameter._hp_mapping
        if mapping is None:
            return None
        return TensorShard("parameter", self.name, mapping.lp_fragment_address.start, mapping.hp_fragment)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return the fragment's range of the tensors that the optimizer keeps for the partition, by kind."""
        # Do not use the mapping's own fragments: they are linked when only the first group has its state.
        mapping = self.parameter._hp_mapping
        (partition,) = optimizer.param_groups[mapping.param_group_index]["params"]
        address = mapping.hp_fragment_address
        tensors = _tensors(optimizer.state.get(partition, {}))
        return {kind: tensor.narrow(0, address.start, address.numel) for kind, tensor in tensors.items()}

    def set_weights(self, full: torch.Tensor) -> None:
        """Copy flattened values into the weights of the forward pass, which are separate from the master."""
        self.parameter.data.copy_(full.view(self.parameter.shape))


class Zero3Shard(_ZeroShard):
    """A parameter under ZeRO-3: each rank holds an equal, padded range of it and of its master."""

    @property
    def full_shape(self) -> list[int]:
        """The shape of the full parameter."""
        return list(self.parameter.ds_shape)

    @property
    def local_numel(self) -> int:
        """The number of elements that this rank holds, with padding. A small parameter may stay gathered."""
        return int(self.parameter.ds_numel if self.parameter.ds_persist else self.parameter.ds_tensor.numel())

    def local(self) -> TensorShard:
        """Return this rank's range of the master."""
        from deepspeed.utils import safe_get_local_fp32_param

        start, numel = self.own_range()
        return TensorShard("parameter", self.name, start, safe_get_local_fp32_param(self.parameter)[:numel])

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return this rank's range of the tensors that the optimizer keeps, by kind."""
        from deepspeed.utils import safe_get_local_optimizer_state

        kinds = next((state.keys() for state in optimizer.state.values()), ())
        numel = self.own_range()[1]
        state = {kind: safe_get_local_optimizer_state(self.parameter, kind)[:numel] for kind in kinds if kind != "step"}
        return _tensors(state)

    def set(self, shard: TensorShard, value: torch.Tensor) -> None:
        """Set the master and the copy that is trained, or the optimizer's state, with DeepSpeed's padding."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        padded = torch.zeros(self.parameter.partition_numel(), dtype=value.dtype)
        padded[: len(value)] = value
        if shard.kind == "parameter":
            safe_set_local_fp32_param(self.parameter, padded)
            self.parameter.ds_tensor.data.copy_(padded)
        else:
            safe_set_local_optimizer_state(self.parameter, padded, shard.kind)

    def own_range(self) -> tuple[int, int]:
        """Return the first element and the length of this rank's range, without the padding."""
        size = self.parameter.partition_numel()
        start = size * torch.distributed.get_rank(self.parameter.ds_process_group)
        return start, max(0, min(size, self.parameter.ds_numel - start))


def shard_of(name: str, parameter: torch.Tensor) -> ParameterShard:
    """Return this rank's shard of a parameter or of a buffer; its class follows from the sharding."""
    if hasattr(parameter, "ds_id"):
        return Zero3Shard(name, parameter)
    return Zero12Shard(name, parameter) if hasattr(parameter, "_hp_mapping") else TorchShard(name, parameter)


def block_offsets(parameter: DTensor, local: torch.Tensor) -> tuple[int, ...]:
    """Return the offset of this rank's shard in each dimension."""
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    offsets, lengths = [0] * parameter.dim(), list(parameter.shape)
    sharded = [
        (type(placement).__name__, dim % parameter.dim(), i)
        for i, placement in enumerate(parameter.placements)
        if (dim := getattr(placement, "dim", None)) is not None
    ]
    # A dimension sharded twice was sharded by tp first, though the mesh lists tp last; torch calls the other strided.
    for _, dim, i in sorted(sharded):
        size = -(-lengths[dim] // mesh.size(i))
        first = min(coordinate[i] * size, lengths[dim])
        offsets[dim] += first
        lengths[dim] = min(size, lengths[dim] - first)
    assert lengths == list(local.shape), (parameter.placements, lengths, local.shape)
    return tuple(offsets)


def _stepped(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that the optimizer steps: the parameter, or this rank's shard in its place."""
    stepped: torch.Tensor = getattr(parameter, STEPPED_SHARD, parameter)
    return stepped


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {kind: value for kind, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that are part of the state dict."""
    kept = set(model.state_dict(keep_vars=True)) - {name for name, _ in model.named_parameters()}
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def _trained_shards(model: nn.Module) -> list[ParameterShard]:
    return [shard_of(name, p) for name, p in resharded_parameters(model) if p.requires_grad]


def full_shapes(model: nn.Module, world: World) -> dict[str, list[int]]:
    """Return the full shape of each trained parameter, whichever rank holds it."""
    return merged(world.gather({shard.name: shard.full_shape for shard in _trained_shards(model)}))


def checkpoint_bytes(model: nn.Module, optimizer: Optimizer, world: World) -> int:
    """Return the size of a checkpoint in bytes: each trained parameter's master and two moments, or Muon's only one."""
    base = unwrap_optimizer(optimizer)
    eight_bits = getattr(getattr(base, "args", None), "optim_bits", 32) == 8
    by_muon = {id(p) for group in base.param_groups if "momentum" in group for p in group["params"]}
    sizes = {}
    for shard in _trained_shards(model):
        count = 1 if id(shard.parameter) in by_muon else 2
        moments = count * (1 if eight_bits else shard.master_itemsize)
        sizes[shard.name] = math.prod(shard.full_shape) * (shard.master_itemsize + moments)
    return sum(merged(world.gather(sizes)).values())


def scalars(model: nn.Module, optimizer: Optimizer, world: World) -> dict[str, dict[str, Scalar]]:
    """Return the numbers that the optimizer keeps per parameter, such as AdamW's step count; equal on all ranks."""
    base = unwrap_optimizer(optimizer)
    found = {shard.name: numbers for shard in _trained_shards(model) if (numbers := shard.scalars(base))}
    return merged(world.gather(found))


def local_shards(model: nn.Module, optimizer: Optimizer, world: World) -> list[TensorShard]:
    """Return the shards that this rank writes: trained parameters and their optimizer state, without duplicates.

    If several ranks hold a shard, the rank with the least to write so far writes it.
    """
    base = unwrap_optimizer(optimizer)
    groups = [*(_with_state(shard, base) for shard in _trained_shards(model)), *([b] for b in _buffer_shards(model))]
    local = {shards[0].key: shards for shards in groups if shards}
    sizes_by_rank = world.gather({key: sum(s.tensor.nbytes for s in shards) for key, shards in local.items()})
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, sizes in enumerate(sizes_by_rank):
        for key in sizes:
            holders[key].append(rank)
    load = [0] * len(sizes_by_rank)
    written: list[TensorShard] = []
    for key, ranks in holders.items():
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += sizes_by_rank[writer][key]
        if writer == world.rank:
            written += local[key]
    return written


def _with_state(parameter: ParameterShard, optimizer: Optimizer) -> list[TensorShard]:
    """Return this rank's shards of a parameter and of its optimizer state; an empty list if it has no part."""
    local = parameter.local()
    if local is None or not local.tensor.numel():
        return []
    state = parameter.optimizer_state(optimizer)
    return [local, *(_state_shard(kind, local, tensor) for kind, tensor in state.items())]


def _state_shard(kind: str, local: TensorShard, tensor: torch.Tensor) -> TensorShard:
    """Return a tensor of the optimizer's state as a shard.

    An elementwise state is sharded like its parameter. Any other (8-bit values, block scales) fits only this sharding.
    """
    if tensor.numel() == local.tensor.numel() and tensor.is_floating_point():
        return TensorShard(kind, local.name, local.start, tensor.view(local.tensor.shape))
    return TensorShard(f"{kind}@{local.start}+{local.tensor.numel()}", local.name, 0, tensor.reshape(-1))


def _buffer_shards(model: nn.Module) -> Iterator[TensorShard]:
    if all(p.requires_grad for p in model.parameters()):  # else buffers belong to a frozen base
        for name, buffer in persistent_buffers(model):
            yield TensorShard("buffer", name, 0, buffer.detach().reshape(-1))


@torch.no_grad()
def restore(
    unwrapped: nn.Module, wrapped: nn.Module, optimizer: Optimizer, reader: ShardReader, written_by: str, world: World
) -> None:
    """Restore each trained parameter and its optimizer state. Call it before the first forward pass.

    `wrapped` is the model as the engine runs it. Raise UserError if the checkpoint is of another model, or if the
    optimizer state fits only the gear and ranks that `written_by` names.
    """
    _check_shapes(full_shapes(unwrapped, world), reader)
    parameters = _trained_shards(unwrapped)
    refusal = UserError(
        f"{reader.folder}: the optimizer state cannot be resharded for this gear; resume under {written_by}"
    )
    if not any(isinstance(parameter, Zero12Shard | Zero3Shard) for parameter in parameters):
        _make_state(unwrapped, optimizer, reader)
    elif not _make_zero_state(wrapped, optimizer, reader):
        raise refusal
    for parameter in parameters:
        for shard in _with_state(parameter, unwrap_optimizer(optimizer)):
            if shard.kind not in ("parameter", *reader.kinds(shard.name)):
                raise refusal
            parameter.set(shard, reader.read_shard(shard))
    for buffer in _buffer_shards(unwrapped):
        buffer.tensor.copy_(reader.read_shard(buffer))
    for parameter in parameters:
        if isinstance(parameter, Zero12Shard):
            parameter.set_weights(reader.read("parameter", parameter.name))


def _check_shapes(shapes: dict[str, list[int]], reader: ShardReader) -> None:
    if shapes != reader.shapes:
        odd = sorted(name for name in {*shapes, *reader.shapes} if shapes.get(name) != reader.shapes.get(name))
        raise UserError(
            f"{reader.folder}: belongs to another model: {len(odd)} parameters differ, such as {odd[0]}: "
            f"{reader.shapes.get(odd[0], 'missing')} there, {shapes.get(odd[0], 'missing')} here"
        )


def _make_state(model: nn.Module, optimizer: Optimizer, reader: ShardReader) -> None:
    """Create the state that the optimizer would create at its first step, to be filled later."""
    base = unwrap_optimizer(optimizer)
    names = {id(_stepped(parameter)): name for name, parameter in resharded_parameters(model)}
    for i, group in enumerate(base.param_groups):
        for j, parameter in enumerate(group["params"]):
            name = names[id(parameter)]
            kinds = reader.kinds(name)
            if not kinds:
                continue
            if hasattr(base, "init_state"):  # bitsandbytes: 8-bit values and their scales, paged or not
                base.init_state(group, parameter, i, j)
            else:
                base.state[parameter].update({kind: torch.zeros_like(parameter) for kind in kinds})
            base.state[parameter].update(scalars_from_json(reader.scalars.get(name, {}), parameter.device))


def _make_zero_state(engine_model: nn.Module, optimizer: Optimizer, reader: ShardReader) -> bool:
    """Create the state for DeepSpeed's flat partitions, or return False if the saved state does not fit them.

    A partition holds many parameters but has one step count.
    """
    base = unwrap_optimizer(optimizer)
    kinds = dict.fromkeys(kind for name in reader.shapes for kind in reader.kinds(name))
    scalars = [reader.scalars.get(name, {}) for name in reader.shapes]
    if any(numbers != scalars[0] for numbers in scalars) or any("@" in kind for kind in kinds):
        return False
    if kinds:
        make = getattr(base, "get_state_buffer", torch.zeros_like)  # bitsandbytes: paged if the optimizer is
        partitions = getattr(engine_model.optimizer, "fp32_partitioned_groups_flat", None)
        for partition in partitions or [p for group in base.param_groups for p in group["params"]]:
            base.state[partition] |= {kind: make(partition) for kind in kinds}
            base.state[partition] |= scalars_from_json(scalars[0], partition.device)
    return True
