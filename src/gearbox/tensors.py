"""A run's tensors by parameter name, whichever engine holds them: what this rank has, and putting it back.

Beside `backend`, the only module that may name an engine. Every engine here cuts a flattened tensor into runs of
elements, so a rank's part is always a start and a length, and a saved part fits any other cut. Nothing here
communicates but `whole_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from gearbox.checkpoint import Piece, Reader
from gearbox.config import UserError

WHOLE = "whole"  # where a parameter of an optimizer is only this rank's part of one: the attribute that names it


def bare_optimizer(optimizer: Any) -> Any:
    """Under accelerate's wrapper and DeepSpeed's."""
    while hasattr(optimizer, "optimizer") and isinstance(optimizer.optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def bytes_held(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
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


def whole_parameters(
    accelerator: Any, model: Any, only_trainable: bool, beside: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor of each parameter, on the CPU, one at a time; yields on rank 0, gathers on all.

    With only_trainable the frozen ones come where `beside` names them. Trained ones come in their fp32 masters.
    Persistent buffers come along. Every rank must run it to its end.
    """
    bare = accelerator.unwrap_model(model)
    for name, parameter in [*_parameters(bare), *_buffers(bare)]:
        if only_trainable and not parameter.requires_grad and name not in beside:
            continue
        if isinstance(parameter, DTensor):
            whole = parameter.full_tensor()
        elif _is_zero(parameter) and parameter.requires_grad:
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


def _parameters(bare: torch.nn.Module) -> list[tuple[str, Any]]:
    """As the optimizer knows them. After a forward pass alone FSDP2 leaves the outermost ones gathered."""
    for module in bare.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(bare.named_parameters())


def _buffers(bare: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The persistent ones."""
    kept = set(bare.state_dict(keep_vars=True)) - {name for name, _ in bare.named_parameters()}
    return [(name, buffer) for name, buffer in bare.named_buffers() if name in kept]


def _is_zero(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


# --------------------------------------------------------------------------- what a rank holds


def shapes(bare: torch.nn.Module) -> dict[str, list[int]]:
    """Of each trained parameter, whole."""
    trained = {name: p for name, p in _parameters(bare) if p.requires_grad}
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()}


def state_bytes(bare: torch.nn.Module, optimizer: Any) -> int:
    """Of a whole checkpoint: the master and two moments of each trained parameter."""
    eight_bits = getattr(getattr(bare_optimizer(optimizer), "args", None), "optim_bits", 32) == 8
    total = 0
    for _, parameter in _parameters(bare):
        if parameter.requires_grad:
            master = 4 if _is_zero(parameter) else parameter.element_size()
            moments = 2 if eight_bits else 2 * master
            total += getattr(parameter, "ds_numel", parameter.numel()) * (master + moments)
    return total


def held(bare: torch.nn.Module, optimizer: Any, rank: int, num_ranks: int) -> list[Piece]:
    """What this rank writes: its parts of all trained parameters and their optimizer state, and none twice.

    What every rank has whole is shared out by size.
    """
    mine: list[Piece] = []
    load = [0] * num_ranks
    for pieces, is_replicated in _groups(bare, optimizer):
        if is_replicated:
            owner = load.index(min(load))
            load[owner] += sum(piece.tensor.nbytes for piece in pieces)
            if owner != rank:
                continue
        mine += pieces
    return mine


def _groups(bare: torch.nn.Module, optimizer: Any) -> Iterator[tuple[list[Piece], bool]]:
    """The pieces of each parameter on this rank, and whether all ranks have the same."""
    state = _states(bare, optimizer)
    for name, parameter in _parameters(bare):
        if not parameter.requires_grad:
            continue
        start, local = _part(parameter)
        if local is not None and local.numel():
            kept = state(name, parameter)
            pieces = [Piece("parameter", name, start, local)]
            for key, tensor in kept.items():
                if isinstance(tensor, torch.Tensor) and tensor.dim():
                    pieces.append(_piece_of_state(key, name, start, local.numel(), tensor))
            yield pieces, not (_is_zero(parameter) or isinstance(parameter, DTensor))
    if all(p.requires_grad for p in bare.parameters()):  # else they belong to a frozen base
        for name, buffer in _buffers(bare):
            yield [Piece("buffer", name, 0, buffer.detach().reshape(-1))], True


def _piece_of_state(key: str, name: str, start: int, numel: int, tensor: torch.Tensor) -> Piece:
    """Element by element it is cut like its parameter; else (8 bits, scales of blocks) only this cut reads it."""
    if tensor.numel() == numel and tensor.is_floating_point():
        return Piece(key, name, start, tensor.reshape(-1))
    return Piece(f"{key}@{start}+{numel}", name, 0, tensor.reshape(-1))


def _part(parameter: Any) -> tuple[int, torch.Tensor | None]:
    """First element and a flat view of this rank's part of a parameter's master, None where it has no part."""
    if isinstance(parameter, DTensor):
        assert parameter.placements == (Shard(0),), parameter.placements
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        local = parameter.detach().to_local()
        return (offset[0] * math.prod(parameter.shape[1:]) if local.numel() else 0), local.view(-1)
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        start, numel = _zero3_range(parameter)
        return start, safe_get_local_fp32_param(parameter)[:numel]
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        return (0, None) if mapping is None else (mapping.lp_fragment_address.start, mapping.hp_fragment)
    return 0, parameter.detach().view(-1)


def _zero3_range(parameter: Any) -> tuple[int, int]:
    """First element and length of this rank's part, without the padding."""
    size = parameter.partition_numel()
    start = size * torch.distributed.get_rank(parameter.ds_process_group)
    return start, max(0, min(size, parameter.ds_numel - start))


def _states(bare: torch.nn.Module, optimizer: Any) -> Any:
    """A function from (name, parameter) to what the optimizer keeps for this rank's part of it."""
    base = bare_optimizer(optimizer)
    by_parameter = {id(getattr(p, WHOLE, p)): p for group in base.param_groups for p in group["params"]}

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


def scalars(bare: torch.nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps of a parameter beside tensors: AdamW's count of steps. Equal on all ranks."""
    base = bare_optimizer(optimizer)
    names = {id(p): name for name, p in _parameters(bare) if p.requires_grad}
    if any(map(_is_zero, bare.parameters())):  # one for all parameters
        common = next((_scalars_of(kept) for kept in base.state.values()), {})
        return dict.fromkeys(names.values(), common) if common else {}
    found = {names[id(getattr(p, WHOLE, p))]: _scalars_of(kept) for p, kept in base.state.items()}
    return {name: kept for name, kept in found.items() if kept}


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


# --------------------------------------------------------------------------- putting it back


@torch.no_grad()
def restore(bare: torch.nn.Module, engine: Any, optimizer: Any, saved: Reader, written_by: str) -> None:
    """Give each trained parameter and its optimizer state the saved values, before the first forward pass.

    `engine` is the wrapped model. Raises UserError where the checkpoint is of another model, or where the optimizer's
    state fits only the gear and ranks that `written_by` names.
    """
    ours = shapes(bare)
    if ours != saved.shapes:
        odd = sorted(name for name in {*ours, *saved.shapes} if ours.get(name) != saved.shapes.get(name))
        raise UserError(
            f"{saved.folder}: holds another model: {len(odd)} parameters differ, such as {odd[0]}: "
            f"{saved.shapes.get(odd[0], 'missing')} there, {ours.get(odd[0], 'missing')} here"
        )
    parameters = dict(_parameters(bare))
    is_zero = any(map(_is_zero, parameters.values()))
    refusal = UserError(
        f"{saved.folder}: this optimizer's state cannot be cut anew for this gear; go on with it under {written_by}"
    )
    if is_zero and not _make_zero_state(engine.optimizer, optimizer, saved):
        raise refusal
    if not is_zero:
        _make_state(bare, optimizer, saved)
    for pieces, _ in _groups(bare, optimizer):
        for piece in pieces:
            if piece.kind not in ("parameter", "buffer", *saved.kinds(piece.name)):
                raise refusal
            value = saved.read(piece.kind, piece.name, piece.start, piece.tensor.numel())
            if hasattr(parameters.get(piece.name), "ds_id"):
                _set_zero3(parameters[piece.name], piece.kind, value)
            else:
                piece.tensor.copy_(value)
    for name, parameter in parameters.items():
        if parameter.requires_grad and hasattr(parameter, "_hp_mapping"):
            # Only the masters were set; the weights of the next forward pass are another copy, whole on each rank.
            parameter.data.copy_(saved.read("parameter", name).view(parameter.shape))


def _make_state(bare: torch.nn.Module, optimizer: Any, saved: Reader) -> None:
    """What the optimizer would make at its first step, to be filled."""
    base = bare_optimizer(optimizer)
    names = {id(parameter): name for name, parameter in _parameters(bare)}
    for i, group in enumerate(base.param_groups):
        for j, parameter in enumerate(group["params"]):
            name = names[id(getattr(parameter, WHOLE, parameter))]
            kinds = saved.kinds(name)
            if not kinds:
                continue
            if hasattr(base, "init_state"):  # bitsandbytes': 8 bits and their scales, paged or not
                base.init_state(group, parameter, i, j)
            else:
                base.state[parameter].update({kind: torch.zeros_like(parameter) for kind in kinds})
            base.state[parameter].update({key: _scalar(kept) for key, kept in saved.scalars.get(name, {}).items()})


def _make_zero_state(zero: Any, optimizer: Any, saved: Reader) -> bool:
    """The same for DeepSpeed's flat partitions, one count of steps for each; False where the saved do not agree."""
    base = bare_optimizer(optimizer)
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
