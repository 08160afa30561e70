"""Read only this rank's rows of each weight, for an engine that shards weights by rows (FSDP2).

`from_pretrained` maps the files of the weights into memory, which all ranks of a machine share, and passes on one
tensor at a time. This rank copies its rows of each matrix, and keeps no other memory. Until the engine has wrapped the
model, a stand-in has the shape of the full matrix, and a single value in memory: NaN.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from accelerate.utils import fsdp_utils
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.distributed.sharding_utils import _dtensor_from_local_like

from gearbox.errors import UserError, one_line
from gearbox.kernels.blocks import blocks_of
from gearbox.sharding.experts import divide_experts, expert_part, is_of_experts, names_of_experts
from gearbox.sharding.sharded_state import block_offsets, persistent_buffers
from gearbox.sharding.unwrap import are_separate, shares_parameters, without_adapter

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

OWN_ROWS = "own_rows"
"""The attribute of a stand-in with this rank's rows of the weight."""
MAPPED = "mapped"
"""The attribute of a stand-in for a tied weight with its full value, to compare the two."""
READS_RANK_0 = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # transformers then leaves the buffers of other ranks empty


@dataclass(frozen=True)
class RowRange:
    """The part `index` of `count` equal parts of a weight's rows, as FSDP2 divides them, and the device for it."""

    index: int
    count: int
    device: torch.device
    ep: int = 1
    """The number of ranks that hold different experts."""

    def of(self, num_rows: int, of_experts: bool) -> slice:
        """Return this part of `num_rows` rows. All parts but the last ones are equally long; the last may be empty."""
        size = -(-num_rows // self.count)
        index = expert_part(self.index, self.count, self.ep) if of_experts else self.index
        return slice(min(index * size, num_rows), min((index + 1) * size, num_rows))

    def copy(self, full: torch.Tensor, dtype: torch.dtype, of_experts: bool) -> torch.Tensor:
        """Return a copy of this part of a weight in `dtype`."""
        return full[self.of(len(full), of_experts)].to(self.device, dtype, copy=True).contiguous()


def row_range(accelerator: Accelerator, ep: int) -> RowRange | None:
    """Return the rows of this rank under FSDP2, or None if its engine does not shard a model without weights."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not plugin.cpu_ram_efficient_loading or not dist.is_initialized():
        return None
    index, count = dist.get_rank(), dist.get_world_size()
    mesh = accelerator.torch_device_mesh
    if mesh is not None:  # its last dimension shards, the one before it replicates
        shards = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
        index, count = shards.get_coordinate()[-1], shards.size(shards.ndim - 1)
    is_offloaded = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    return RowRange(index, count, torch.device("cpu") if is_offloaded else accelerator.device, ep)


@contextmanager
def reading(rows: RowRange | None, whole_ends: bool = False) -> Iterator[None]:
    """Let from_pretrained keep only these rows of each weight; None keeps all.

    With `whole_ends` the embedding and the output head stay whole, so that they can get more rows.
    """
    if rows is None:
        yield
        return
    materialize = core_model_loading._materialize_copy
    set_parameter, are_equal = core_model_loading.set_param_for_module, modeling_utils._tied_params_are_equal

    def keep_rows(model: PreTrainedModel, name: str, value: torch.Tensor, *others: object) -> None:
        """Set a parameter to a stand-in with this rank's rows of `value`, which is mapped from a file."""
        place, _, own_name = name.rpartition(".")
        module = model.get_submodule(place)
        expected = getattr(module, own_name, None)
        if not isinstance(expected, torch.Tensor):
            set_parameter(model, name, value, *others)
            return
        dtype = _planned_dtype(model, name, expected.dtype)
        shape = expected.to_local().shape if isinstance(expected, DTensor) else expected.shape
        ends = (model.get_input_embeddings(), model.get_output_embeddings()) if whole_ends else ()
        if not isinstance(expected, nn.Parameter) or len(shape) < 2 or shape != value.shape or module in ends:
            set_parameter(model, name, value.to(dtype), *others)
            return
        stand_in = torch.full((1,), float("nan") if dtype.is_floating_point else 0, dtype=dtype).expand(shape)
        set_parameter(model, name, stand_in, *others)
        parameter = getattr(module, own_name)
        setattr(parameter, OWN_ROWS, rows.copy(value, dtype, is_of_experts(model, name)))
        if name in {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}:
            setattr(parameter, MAPPED, value)
        if isinstance(parameter, DTensor):  # transformers has given the stand-in memory
            parameter._local_tensor = stand_in

    def mapped(parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter with its own values in place of the stand-in's."""
        value = getattr(parameter, MAPPED, None)
        if value is None:
            return parameter
        value = cast(torch.Tensor, value).to(parameter.dtype)
        return _dtensor_from_local_like(value, parameter) if isinstance(parameter, DTensor) else value

    variables = {name: os.environ.get(name) for name in (READS_RANK_0, "HF_DEACTIVATE_ASYNC_LOAD")}
    os.environ.update({READS_RANK_0: "false", "HF_DEACTIVATE_ASYNC_LOAD": "1"})  # threads would read far ahead
    core_model_loading.set_param_for_module = keep_rows
    core_model_loading._materialize_copy = lambda tensor, device=None, dtype=None: tensor[...]
    modeling_utils._tied_params_are_equal = lambda source, target: are_equal(mapped(source), mapped(target))
    try:
        yield
    finally:
        core_model_loading.set_param_for_module, core_model_loading._materialize_copy = set_parameter, materialize
        modeling_utils._tied_params_are_equal = are_equal
        for name, value in variables.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _planned_dtype(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter of a model of `dtype`: some families keep a few in fp32."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return dtype
    pattern, groups, _ = core_model_loading.build_glob_alternation([*plan])
    found = pattern.search(name)
    return dtype if found is None else plan[groups[found.lastgroup]]


def _collect(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's rows of each parameter that has a stand-in, by name. Tied parameters have two names."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        vars(parameter).pop(MAPPED, None)
        if hasattr(parameter, OWN_ROWS):
            found[name] = getattr(parameter, OWN_ROWS)
    return found


def _fill(model: nn.Module, parts: dict[str, torch.Tensor], full: dict[str, torch.Tensor], rows: RowRange) -> None:
    """Give a model that FSDP2 has sharded on the meta device its weights.

    `parts` are this rank's rows. Other weights, such as a new adapter's, are taken from rank 0's `full`, unless tensor
    parallelism has divided them among ranks. Every rank must call this.
    """
    filled: dict[str, torch.Tensor] = {}
    experts = names_of_experts(model)
    has_tp = any(isinstance(tensor, DTensor) for tensor in full.values())
    for name, sharded in model.state_dict().items():
        assert isinstance(sharded, DTensor), name
        if name in parts:
            local = parts[name]
        elif has_tp:
            whole = full[name]
            local = rows.copy(whole.to_local() if isinstance(whole, DTensor) else whole, sharded.dtype, False)
        else:
            sent = full[name].detach().to(sharded.device_mesh.device_type).contiguous()
            dist.broadcast(sent, 0)
            local = rows.copy(sent, sharded.dtype, name in experts)
        expected = sharded.to_local()
        first = rows.of(len(sharded), name in experts).start
        assert has_tp or not expected.numel() or block_offsets(sharded, expected)[0] == first, name
        assert (local.shape, local.dtype) == (expected.shape, expected.dtype), name
        filled[name] = DTensor.from_local(
            local,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )
    model.load_state_dict(filled, assign=True)


@contextmanager
def wrapping(model: nn.Module, accelerator: Accelerator, ep: int) -> Iterator[None]:
    """Let accelerate wrap a model for FSDP2 with the rows that this rank has read, and its experts divided by `ep`.

    accelerate would send all weights from rank 0. It also fails on persistent buffers and on layers that are not there.
    The persistent buffers, such as a router's correction bias, are taken from rank 0. They count as not persistent
    until accelerate has sharded the parameters.
    """
    causal_lm = without_adapter(model)
    ends = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    blocks = {cls.__name__ for block in blocks_of(causal_lm) for cls in type(block).__mro__}
    names = [name for name in causal_lm._no_split_modules or () if are_separate(model, name, ends[0])]
    causal_lm._no_split_modules = [name for name in names if name in blocks]  # Mamba also names a part of each block
    if shares_parameters(causal_lm, ends):  # accelerate would put these into a group without the third module
        causal_lm.get_input_embeddings = causal_lm.get_output_embeddings = lambda: None
    held_back = []
    for name, buffer in persistent_buffers(model):
        sent = buffer.to(accelerator.device)  # NCCL sends only what is on a GPU
        dist.broadcast(sent, 0)
        buffer.copy_(sent)
        parent, _, own_name = name.rpartition(".")
        held_back.append((model.get_submodule(parent), own_name))
    for module, name in held_back:
        module._non_persistent_buffers_set.add(name)
    rows, parts, usual = row_range(accelerator, ep), _collect(model), fsdp_utils.fsdp2_load_full_state_dict
    usual_policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy

    def divide_first(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> Callable[[nn.Module], bool] | None:
        # Among the inputs of experts are the routers' weights, which other gears do not round either.
        policy = replace(plugin.mixed_precision_policy, cast_forward_inputs=False)
        options = {"reshard_after_forward": plugin.reshard_after_forward, "offload_policy": plugin.cpu_offload}
        divide_experts(model, ep, accelerator.device.type, options | {"mp_policy": policy})
        return cast("Callable[[nn.Module], bool] | None", usual_policy(plugin, model))

    if ep > 1:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = divide_first
    if rows is not None:
        fsdp_utils.fsdp2_load_full_state_dict = lambda _, sharded, full, **__: _fill(sharded, parts, full, rows)
    try:
        yield
    except ValueError as error:
        if "transformer layer class" not in str(error):
            raise
        key = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
        raise UserError(f"{key}: {one_line(error)} Remove the key to wrap the layers of the family") from None
    finally:
        fsdp_utils.fsdp2_load_full_state_dict = usual
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = usual_policy
    for module, name in held_back:
        module._non_persistent_buffers_set.discard(name)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        vars(causal_lm).pop(name, None)
