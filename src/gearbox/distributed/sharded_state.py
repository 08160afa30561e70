"""A run's tensors by parameter name, whichever engine holds them: what this rank has, and putting it back.

With `backend`, `verification` and `gear`, the only module that may name an engine. An engine cuts a flattened tensor
into runs of elements, or (tensor parallelism) a tensor into boxes; a saved part fits any other cut. Nothing here
communicates but `whole_parameters` and what is given `gather`, which every rank must call.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gearbox.checkpoint.shards import ShardReader, TensorShard
from gearbox.distributed.unwrap import FULL_PARAMETER, unwrap_optimizer
from gearbox.errors import UserError

Gather = Callable[[Any], list[Any]]


def alone(found: Any) -> list[Any]:
    """As `backend.gather`, of one rank."""
    return [found]


def local_bytes(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Bytes of the parameters that this rank holds between steps, and of all shards together."""
    held = whole = 0
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            local, numel = parameter.to_local().numel(), parameter.numel()
        elif hasattr(parameter, "ds_tensor"):
            local, numel = parameter.ds_tensor.numel(), parameter.ds_numel
        else:
            local = numel = parameter.numel()
        held += local * parameter.element_size()
        whole += numel * parameter.element_size()
    return held, whole


def resharded_parameters(bare: torch.nn.Module) -> list[tuple[str, Any]]:
    """As the optimizer knows them. After a forward pass alone FSDP2 leaves the outermost ones gathered."""
    for module in bare.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(bare.named_parameters())


def persistent_buffers(bare: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The persistent ones."""
    kept = set(bare.state_dict(keep_vars=True)) - {name for name, _ in bare.named_parameters()}
    return [(name, buffer) for name, buffer in bare.named_buffers() if name in kept]


def is_zero_parameter(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def full_shapes(bare: torch.nn.Module, gather: Gather = alone) -> dict[str, list[int]]:
    """Of each trained parameter, whole, whichever rank holds it."""
    trained = {name: p for name, p in resharded_parameters(bare) if p.requires_grad}
    return _merged(gather({name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()}))


def _merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in found for name, value in part.items()}


def checkpoint_bytes(bare: torch.nn.Module, optimizer: Any, gather: Gather = alone) -> int:
    """Of a whole checkpoint: the master and two moments of each trained parameter."""
    eight_bits = getattr(getattr(unwrap_optimizer(optimizer), "args", None), "optim_bits", 32) == 8
    sizes = {}
    for name, parameter in resharded_parameters(bare):
        if parameter.requires_grad:
            master = 4 if is_zero_parameter(parameter) else parameter.element_size()
            moments = 2 if eight_bits else 2 * master
            sizes[name] = getattr(parameter, "ds_numel", parameter.numel()) * (master + moments)
    return sum(_merged(gather(sizes)).values())


def local_shards(bare: torch.nn.Module, optimizer: Any, rank: int, gather: Gather = alone) -> list[TensorShard]:
    """What this rank writes: its parts of all trained parameters and their optimizer state, and none twice.

    What several ranks hold is written by the one of them that has least to write so far. Every rank calls it.
    """
    parts = {pieces[0].key: pieces for pieces in _shards_by_parameter(bare, optimizer)}
    everywhere = gather({key: sum(piece.tensor.nbytes for piece in pieces) for key, pieces in parts.items()})
    holders: dict[str, list[int]] = defaultdict(list)
    for holder, sizes in enumerate(everywhere):
        for key in sizes:
            holders[key].append(holder)
    load = [0] * len(everywhere)
    mine: list[TensorShard] = []
    for key, holding in holders.items():
        writer = min(holding, key=lambda holder: load[holder])
        load[writer] += everywhere[writer][key]
        if writer == rank:
            mine += parts[key]
    return mine


def _shards_by_parameter(bare: torch.nn.Module, optimizer: Any) -> Iterator[list[TensorShard]]:
    """Of each trained parameter what this rank holds: itself, and what the optimizer keeps for it. Buffers alone."""
    state = _states(bare, optimizer)
    for name, parameter in resharded_parameters(bare):
        if not parameter.requires_grad:
            continue
        start, local = _local_shard(parameter)
        if local is not None and local.numel():
            pieces = [TensorShard("parameter", name, start, local)]
            for key, tensor in state(name, parameter).items():
                if isinstance(tensor, torch.Tensor) and tensor.dim():
                    pieces.append(_piece_of_state(key, name, start, local, tensor))
            yield pieces
    if all(p.requires_grad for p in bare.parameters()):  # else they belong to a frozen base
        for name, buffer in persistent_buffers(bare):
            yield [TensorShard("buffer", name, 0, buffer.detach().reshape(-1))]


def _piece_of_state(
    key: str, name: str, start: int | tuple[int, ...], local: torch.Tensor, tensor: torch.Tensor
) -> TensorShard:
    """Element by element it is cut like its parameter; else (8 bits, scales of blocks) only this cut reads it."""
    if tensor.numel() == local.numel() and tensor.is_floating_point():
        return TensorShard(key, name, start, tensor.view(local.shape))
    return TensorShard(f"{key}@{start}+{local.numel()}", name, 0, tensor.reshape(-1))


def _local_shard(parameter: Any) -> tuple[int | tuple[int, ...], torch.Tensor | None]:
    """This rank's part of a parameter's master, None where it has no part.

    A run of the flattened tensor: its first element and [n]; a box: the place of its first corner, and the box.
    """
    if isinstance(parameter, DTensor):
        local = parameter.detach().to_local()
        corner = _offsets(parameter, local)
        if local.shape[1:] == parameter.shape[1:]:  # whole rows
            return (corner[0] * math.prod(parameter.shape[1:]) if local.numel() else 0), local.view(-1)
        return corner, local
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        start, numel = _zero3_range(parameter)
        return start, safe_get_local_fp32_param(parameter)[:numel]
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        return (0, None) if mapping is None else (mapping.lp_fragment_address.start, mapping.hp_fragment)
    return 0, parameter.detach().view(-1)


def _offsets(parameter: DTensor, local: torch.Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in each dimension."""
    mesh = parameter.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    corner, lengths = [0] * parameter.dim(), list(parameter.shape)
    cuts = [
        (type(placement).__name__, dim % parameter.dim(), i)
        for i, placement in enumerate(parameter.placements)
        if (dim := getattr(placement, "dim", None)) is not None
    ]
    # A dimension cut twice was cut by tp first, though the mesh names it last; torch calls the other cut strided.
    for _, dim, i in sorted(cuts):
        size = -(-lengths[dim] // mesh.size(i))
        first = min(place[i] * size, lengths[dim])
        corner[dim] += first
        lengths[dim] = min(size, lengths[dim] - first)
    assert lengths == list(local.shape), (parameter.placements, lengths, local.shape)
    return tuple(corner)


def _zero3_range(parameter: Any) -> tuple[int, int]:
    """First element and length of this rank's part, without the padding."""
    size = parameter.partition_numel()
    start = size * torch.distributed.get_rank(parameter.ds_process_group)
    return start, max(0, min(size, parameter.ds_numel - start))


def _states(bare: torch.nn.Module, optimizer: Any) -> Any:
    """A function from (name, parameter) to what the optimizer keeps for this rank's part of it."""
    base = unwrap_optimizer(optimizer)
    by_parameter = {id(getattr(p, FULL_PARAMETER, p)): p for group in base.param_groups for p in group["params"]}

    def state(name: str, parameter: Any) -> dict[str, Any]:
        if hasattr(parameter, "ds_id"):
            from deepspeed.utils import safe_get_local_optimizer_state

            keys = next((kept.keys() for kept in base.state.values()), ())
            numel = _zero3_range(parameter)[1]
            return {key: safe_get_local_optimizer_state(parameter, key)[:numel] for key in keys if key != "step"}
        if hasattr(parameter, "_hp_mapping"):
            # Not the mapping's own fragments: they are linked when the first group has its state and no other has.
            mapping = parameter._hp_mapping
            (flat,) = base.param_groups[mapping.param_group_index]["params"]
            place = (0, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)
            kept = base.state.get(flat, {})
            return {key: t.narrow(*place) for key, t in kept.items() if isinstance(t, torch.Tensor) and t.dim()}
        kept = base.state.get(by_parameter[id(parameter)], {})
        return {key: t.to_local() if isinstance(t, DTensor) else t for key, t in kept.items()}

    return state


def scalars(bare: torch.nn.Module, optimizer: Any, gather: Gather = alone) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps of a parameter beside tensors: AdamW's count of steps. Equal on all ranks."""
    base = unwrap_optimizer(optimizer)
    names = {id(p): name for name, p in resharded_parameters(bare) if p.requires_grad}
    if any(map(is_zero_parameter, bare.parameters())):  # one for all parameters
        common = next((_scalars_of(kept) for kept in base.state.values()), {})
        return dict.fromkeys(names.values(), common) if common else {}
    found = {names[id(getattr(p, FULL_PARAMETER, p))]: _scalars_of(kept) for p, kept in base.state.items()}
    return _merged(gather({name: kept for name, kept in found.items() if kept}))


def _scalars_of(kept: dict[str, Any]) -> dict[str, Any]:
    """Numbers as they are; tensors without a dimension as {dtype: number}."""
    found: dict[str, Any] = {}
    for key, value in kept.items():
        if isinstance(value, torch.Tensor) and not value.dim():
            found[key] = {str(value.dtype).removeprefix("torch."): value.item()}
        elif isinstance(value, int | float):
            found[key] = value
    return found


def _scalar(saved: Any) -> Any:
    if isinstance(saved, dict):
        ((dtype, value),) = saved.items()
        return torch.tensor(value, dtype=getattr(torch, dtype))
    return saved


@torch.no_grad()
def restore(
    bare: torch.nn.Module, engine: Any, optimizer: Any, saved: ShardReader, written_by: str, gather: Gather = alone
) -> None:
    """Give each trained parameter and its optimizer state the saved values, before the first forward pass.

    `engine` is the wrapped model. Raises UserError where the checkpoint is of another model, or where the optimizer's
    state fits only the gear and ranks that `written_by` names.
    """
    ours = full_shapes(bare, gather)
    if ours != saved.shapes:
        odd = sorted(name for name in {*ours, *saved.shapes} if ours.get(name) != saved.shapes.get(name))
        raise UserError(
            f"{saved.folder}: holds another model: {len(odd)} parameters differ, such as {odd[0]}: "
            f"{saved.shapes.get(odd[0], 'missing')} there, {ours.get(odd[0], 'missing')} here"
        )
    parameters = dict(resharded_parameters(bare))
    is_zero = any(map(is_zero_parameter, parameters.values()))
    refusal = UserError(
        f"{saved.folder}: this optimizer's state cannot be cut anew for this gear; go on with it under {written_by}"
    )
    if is_zero and not _make_zero_state(engine.optimizer, optimizer, saved):
        raise refusal
    if not is_zero:
        _make_state(bare, optimizer, saved)
    for pieces in _shards_by_parameter(bare, optimizer):
        for piece in pieces:
            if piece.kind not in ("parameter", "buffer", *saved.kinds(piece.name)):
                raise refusal
            value = saved.read_shard(piece)
            if hasattr(parameters.get(piece.name), "ds_id"):
                _set_zero3(parameters[piece.name], piece.kind, value)
            else:
                piece.tensor.copy_(value)
    for name, parameter in parameters.items():
        if parameter.requires_grad and hasattr(parameter, "_hp_mapping"):
            # Only the masters were set; the weights of the next forward pass are another copy, whole on each rank.
            parameter.data.copy_(saved.read("parameter", name).view(parameter.shape))


def _make_state(bare: torch.nn.Module, optimizer: Any, saved: ShardReader) -> None:
    """What the optimizer would make at its first step, to be filled."""
    base = unwrap_optimizer(optimizer)
    names = {id(parameter): name for name, parameter in resharded_parameters(bare)}
    for i, group in enumerate(base.param_groups):
        for j, parameter in enumerate(group["params"]):
            name = names[id(getattr(parameter, FULL_PARAMETER, parameter))]
            kinds = saved.kinds(name)
            if not kinds:
                continue
            if hasattr(base, "init_state"):  # bitsandbytes': 8 bits and their scales, paged or not
                base.init_state(group, parameter, i, j)
            else:
                base.state[parameter].update({kind: torch.zeros_like(parameter) for kind in kinds})
            base.state[parameter].update({key: _scalar(kept) for key, kept in saved.scalars.get(name, {}).items()})


def _make_zero_state(zero: Any, optimizer: Any, saved: ShardReader) -> bool:
    """The same for DeepSpeed's flat partitions, one count of steps for each; False where the saved do not agree."""
    base = unwrap_optimizer(optimizer)
    kinds = {kind for name in saved.shapes for kind in saved.kinds(name)}
    counts = [saved.scalars.get(name, {}) for name in saved.shapes]
    if any(count != counts[0] for count in counts) or any("@" in kind for kind in kinds):
        return False
    if kinds:
        made = getattr(base, "get_state_buffer", torch.zeros_like)  # bitsandbytes': paged, if it is
        flats = getattr(zero, "fp32_partitioned_groups_flat", None)
        for flat in flats or [p for group in base.param_groups for p in group["params"]]:
            base.state[flat].update({kind: made(flat) for kind in kinds})
            base.state[flat].update({key: _scalar(kept) for key, kept in counts[0].items()})
    return True


def _set_zero3(parameter: Any, kind: str, value: torch.Tensor) -> None:
    """Set this rank's part of the master or of its state, padded as DeepSpeed pads it, and the copy that it trains."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    part = torch.zeros(parameter.partition_numel(), dtype=value.dtype)
    part[: len(value)] = value
    if kind == "parameter":
        safe_set_local_fp32_param(parameter, part)
        parameter.ds_tensor.data.copy_(part)
    else:
        safe_set_local_optimizer_state(parameter, part, kind)
