"""Verify that the running engine matches the request, by its wrapped model, tensors and optimizer, not by the files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gearbox.config.gear import Gear
from gearbox.config.recipe import Recipe
from gearbox.distributed import engine, process_group
from gearbox.distributed.pipeline_parallel import Pipeline
from gearbox.distributed.tensor_parallel import split_parameters
from gearbox.errors import UserError
from gearbox.kernels import blocks
from gearbox.sharding.experts import names_of_experts
from gearbox.sharding.sharded_state import Zero3Shard, shard_of
from gearbox.sharding.unwrap import frees_weights, num_gathered_ahead, resharded_parameters, without_adapter
from gearbox.world import World, merged

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class EngineFacts:
    """The verified facts about the running engine."""

    engine: str
    """For example: FSDP2, tp 2."""
    precision: str
    """fp32 or bf16."""
    accumulation_steps: int
    lines: dict[str, str]
    """All facts by name, in the order in which they are printed."""


MOST_GATHERED = 0.25  # of the bytes of all parameters, in the small ones that ZeRO-3 never shards


class _Fact(NamedTuple):
    requested: object
    running: object


def verify(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    gear: Gear,
    recipe: Recipe,
    accumulation_steps: int,
) -> EngineFacts:
    """Compare the running configuration with the requested one and return it. Raise UserError on any mismatch."""
    name = _running_engine(model)
    if name != _requested_engine(gear):  # the other facts are read from the engine
        raise _mismatch(gear, [f"engine: requested {_requested_engine(gear)}, running {name}"])
    running_steps = _running_accumulation_steps(accelerator, model, gear)
    facts = {
        "ranks": _Fact(gear.num_processes, accelerator.num_processes),
        "engine": _Fact(name, name),
        "precision": _Fact(engine.precision(gear), _running_precision(accelerator, model, gear)),
        "accumulation rounds": _Fact(accumulation_steps, running_steps),
        **_gradient_facts(model, gear, recipe),
        **_perf_facts(accelerator, model, gear, recipe),
    }
    if recipe.optim.master_weights == "fp32":
        facts["master weights"] = _Fact({torch.float32}, _master_dtypes(model, gear, optimizer))
    problems = [f"{name}: requested {f.requested}, running {f.running}" for name, f in facts.items() if f[0] != f[1]]
    problems += _sharding_problems(model, optimizer, gear)
    lines = {name: _format(fact.running) for name, fact in facts.items()}
    local, full = _local_and_full_bytes(model.named_parameters())
    if isinstance(model, Pipeline):
        stages, full = _gather_stages(model, process_group.ProcessGroup())
        if len({*stages}) != gear.degree("pp"):
            problems.append(f"stages: requested {gear.degree('pp')}, running {stages}")
        share = model.bubble(accumulation_steps)
        lines["pipeline stages"] = "layers " + ", ".join(dict.fromkeys(stages))
        lines["pipeline bubble"] = f"{share:.0%} of a step idle if all stages are equally fast: (p-1)/(m+p-1)"
    if problems:
        raise _mismatch(gear, problems)
    trained, _ = _local_and_full_bytes((name, p) for name, p in model.named_parameters() if p.requires_grad)
    lines["parameters on rank 0"] = (
        f"{local / 2**20:,.1f} of {full / 2**20:,.1f} MiB, {trained / 2**20:,.1f} MiB trainable"
    )
    return EngineFacts(lines["engine"], lines["precision"], running_steps, lines)


def _mismatch(gear: Gear, problems: list[str]) -> UserError:
    return UserError(f"{gear.path}: the running configuration does not match the requested one: " + "; ".join(problems))


def _format(value: object) -> str:
    names = sorted(str(v).removeprefix("torch.") for v in (value if isinstance(value, set) else {value}))
    return ", ".join(
        {"no": "fp32", "float32": "fp32", "bfloat16": "bf16", "True": "yes", "False": "no"}.get(name, name)
        for name in names
    )


def _requested_engine(gear: Gear) -> str:
    names = {
        "single": "one device",
        "ddp": "DDP",
        "fsdp": "FSDP2",
        "zero": f"ZeRO-{gear.zero_stage}",
        "tp": "one model",
        "pp": f"pipeline, {gear.schedule}",
    }
    degrees = {name: gear.degree(name) for name in ("dp_replicate", "tp", "ep", "sp", "pp")}
    return _described(names[gear.engine], {**degrees, "offload": gear.offload})


def _described(name: str, degrees: dict[str, int | str | None]) -> str:
    """Return an engine's description, such as "FSDP2, dp_replicate 2, tp 2"."""
    return ", ".join([name, *(f"{key} {degree}" for key, degree in degrees.items() if degree not in (1, None))])


def _running_engine(model: nn.Module) -> str:
    """Describe the engine in the words of `_requested_engine`, from the model and its tensors."""
    mesh_degrees = _mesh_degrees(model)
    degrees: dict[str, int | str | None] = {**mesh_degrees, "sp": 1, "pp": 1, "offload": None}
    if isinstance(model, DistributedDataParallel):
        return _described("DDP", degrees)
    if isinstance(model, Pipeline):
        return _described(f"pipeline, {model.schedule}", degrees | {"pp": model.stage.count})
    if isinstance(model, FSDPModule):
        return _described("FSDP2", degrees | {"ep": _running_ep(model), "offload": _fsdp_offload(model)})
    if hasattr(model, "zero_optimization_stage"):
        zero = cast("DeepSpeedEngine", model)
        degrees |= {"sp": zero.sequence_parallel_size, "offload": _zero_offload(zero)}
        return _described(f"ZeRO-{zero.zero_optimization_stage()}", degrees)
    return _described("one model" if mesh_degrees["tp"] > 1 else "one device", degrees)


def _mesh_degrees(model: nn.Module) -> dict[str, int]:
    """Return the degrees of parallelism that the parameters' meshes show."""
    meshes = {p.device_mesh: p.placements for p in model.parameters() if isinstance(p, DTensor)}
    degrees = {"dp_replicate": 1, "tp": 1, "ep": 1}
    for mesh, placements in meshes.items():
        for i, name in enumerate(mesh.mesh_dim_names or ()):
            if name == "tp" or (name == "dp_replicate" and placements[i].is_replicate()):
                degrees[name] = mesh.size(i)
    return degrees


def _running_ep(model: nn.Module) -> int:
    """Return the number of ranks that divide the experts, as the experts' meshes show; the least of all layers."""
    divided = names_of_experts(model)
    meshes = [getattr(p, "device_mesh", None) for name, p in model.named_parameters() if name in divided]
    dimensions = [dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) if mesh else {} for mesh in meshes]
    return min([sizes.get("ep", 1) for sizes in dimensions], default=1)


def _fsdp_offload(model: nn.Module) -> str | None:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    policies = [group.offload_policy for state in states for group in state._fsdp_param_groups]
    return "cpu" if all(isinstance(policy, CPUOffloadPolicy) for policy in policies) else None


def _zero_offload(zero: DeepSpeedEngine) -> str | None:
    configs = [zero.zero_offload_optimizer(), zero.zero_offload_param()]
    devices = [getattr(config, "device", "none") for config in configs]
    names = [str(getattr(device, "value", device)) for device in devices]
    return next((name for name in ("nvme", "cpu") if name in names), None)


def _running_accumulation_steps(accelerator: Accelerator, model: nn.Module, gear: Gear) -> int:
    if gear.engine == "zero":
        return int(cast("DeepSpeedEngine", model).gradient_accumulation_steps())
    return int(accelerator.gradient_accumulation_steps)


def _running_precision(accelerator: Accelerator, model: nn.Module, gear: Gear) -> str:
    if gear.engine == "zero":
        zero = cast("DeepSpeedEngine", model)
        return "bf16" if zero.bfloat16_enabled() else "fp16" if zero.fp16_enabled() else "no"
    if isinstance(model, FSDPModule):
        compute = model._get_fsdp_state()._mp_policy.param_dtype
        return "bf16" if compute is torch.bfloat16 else "no" if compute is torch.float32 else str(compute)
    return str(accelerator.mixed_precision)


def _gradient_facts(model: nn.Module, gear: Gear, recipe: Recipe) -> dict[str, _Fact]:
    """Return the clip and the dtypes in which gradients are reduced and kept, where the engine decides them."""
    if gear.engine == "zero":
        zero = cast("DeepSpeedEngine", model)
        facts = {"gradient clip": _Fact(float(recipe.optim.max_grad_norm), float(zero.gradient_clipping()))}
        if engine.precision(gear) == "bf16":
            facts["gradient reduction"] = _Fact(torch.float32, zero.communication_data_type)
            facts["gradient buffers"] = _Fact(torch.float32, zero.get_data_types()[1])
        return facts
    if isinstance(model, FSDPModule):
        return {"gradient reduction": _Fact(torch.float32, model._get_fsdp_state()._mp_policy.reduce_dtype)}
    return {}


def _perf_facts(accelerator: Accelerator, model: nn.Module, gear: Gear, recipe: Recipe) -> dict[str, _Fact]:
    """Return what the recipe's group perf and the gear ask of the layers, apart from facts that are the default."""
    perf, layers = recipe.perf, blocks.blocks_of(without_adapter(engine.unwrap(accelerator, model)))
    of_layers = {blocks.running(layer) for layer in layers} or {blocks.Running()}
    of_modules = {type(module).__name__ for module in model.modules()}
    frees = {frees_weights(layer) for layer in layers if isinstance(layer, FSDPModule)}
    hooks = model._comm_hooks if isinstance(model, DistributedDataParallel) else ()
    asks_bf16 = gear.engine == "ddp" and perf.ddp_compression == "bf16"
    num_ahead = max(1, min(perf.prefetch, len(layers) - 1)) if gear.engine == "fsdp" else 1
    facts = {
        "checkpointing": (_Fact({perf.checkpointing}, {layer.checkpointing for layer in of_layers}), {"none"}),
        "compiled layers": (_Fact({perf.compile}, {layer.compiled for layer in of_layers}), {False}),
        "float8 products": (_Fact(perf.float8, "Float8Linear" in of_modules), False),
        "layers gathered ahead": (_Fact(num_ahead, num_gathered_ahead(layers)), 1),
        "freed after forward": (_Fact({gear.frees_weights}, frees or {gear.frees_weights}), {True}),
        "gradients sent in bf16": (_Fact(asks_bf16, bool(hooks)), False),
    }
    return {name: fact for name, (fact, default) in facts.items() if not fact.requested == fact.running == default}


def _master_dtypes(model: nn.Module, gear: Gear, optimizer: Optimizer) -> set[torch.dtype]:
    """Return the dtypes of the tensors that the optimizer updates."""
    if gear.engine == "zero":
        zero = model.optimizer  # ZeRO-1 in bf16 has neither list; its param_groups are the fp32 partitions
        partitions = getattr(zero, "fp32_partitioned_groups_flat", None) or getattr(
            zero, "single_partition_of_fp32_groups", None
        )
        if partitions is not None:
            return {tensor.dtype for tensor in partitions if tensor is not None}
    return {p.dtype for group in optimizer.param_groups for p in group["params"]}


def _local_and_full_bytes(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """Return the bytes of parameters that this rank holds between steps, and the bytes of the full parameters."""
    local = full = 0
    for name, parameter in parameters:
        shard = shard_of(name, parameter)
        local += shard.local_numel * parameter.element_size()
        full += math.prod(shard.full_shape) * parameter.element_size()
    return local, full


def count_weights(model: nn.Module, world: World) -> tuple[int, int]:
    """Return the numbers of trained weights and of all weights, over all stages. A weight in 4 bits counts as one."""
    counts = {}
    for name, parameter in resharded_parameters(model):
        packed = _quant_state(model, name)
        shape = shard_of(name, parameter).full_shape if packed is None else packed.shape
        counts[name] = (math.prod(shape), parameter.requires_grad)
    of_all = merged(world.gather(counts)).values()
    return sum(count for count, is_trained in of_all if is_trained), sum(count for count, _ in of_all)


def _quant_state(model: nn.Module, name: str) -> QuantState | None:
    """Return how the parameter of this name is packed in 4 bits, or None if it is not packed."""
    module, _, kind = name.rpartition(".")
    return getattr(model.get_submodule(module), "quant_state", None) if kind == "weight" else None


def _sharding_problems(model: nn.Module, optimizer: Optimizer, gear: Gear) -> list[str]:
    """Return a problem if this rank holds more than its share of the parameters or of the optimizer's masters."""
    if gear.engine in ("fsdp", "tp") or gear.zero_stage == 3:
        persistent = [one for one in model.named_parameters() if getattr(one[1], "ds_persist", False)]
        gathered, full = _local_and_full_bytes(persistent)[0], _local_and_full_bytes(model.named_parameters())[1]
        if gathered > MOST_GATHERED * full:
            return [
                f"sharding: {gathered / full:.0%} of the parameters' bytes stay gathered on every rank, and at most "
                f"{MOST_GATHERED:.0%} may; lower stage3_param_persistence_threshold"
            ]
        return _unsharded(model, gear, {name for name, _ in persistent})
    if gear.zero_stage in (1, 2):
        # The partitions that the optimizer updates, padded to full buffers.
        kept = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if kept > trainable / gear.num_processes * 1.1 + 1000:
            return [f"sharding: the optimizer of a rank holds {kept:,} of {trainable:,} weights"]
    return []


def _unsharded(model: nn.Module, gear: Gear, persistent: set[str]) -> list[str]:
    """Return a problem if this rank holds more of a parameter than its share, rounded up to a row or a column."""
    split = split_parameters(model) if gear.degree("tp") > 1 else set()
    found = []
    for name, parameter in model.named_parameters():
        shard, num_ranks = shard_of(name, parameter), gear.shard * (gear.degree("tp") if parameter in split else 1)
        shape = shard.full_shape
        row, column = math.prod(shape[1:]), math.prod(shape[:-1]) if parameter in split else 0
        most = math.prod(shape) // num_ranks + row + column
        if name not in persistent and num_ranks > 1 and shard.local_numel > most:
            found.append((shard.local_numel, math.prod(shape), name.removeprefix("base_model.model."), num_ranks))
    if not found:
        return []
    local, full, name, num_ranks = max(found)
    more = f", and too much of {len(found) - 1} more parameters" if len(found) > 1 else ""
    return [f"sharding: a rank should hold 1/{num_ranks} of {name}, but holds {local:,} of {full:,} weights{more}"]


def _gather_stages(model: Pipeline, world: World) -> tuple[list[str], int]:
    """Return the layers of each rank's stage and the bytes of the full model.

    Raise UserError if two stages train the same weight.
    """
    stages = world.gather(model.layers)
    parameters = world.gather(
        {name: (p.nbytes, p.requires_grad and p is not model.tied) for name, p in model.module.named_parameters()}
    )
    for name, (_, is_trained) in parameters[0].items():
        if is_trained and any(
            name in others for layers, others in zip(stages, parameters, strict=True) if layers != stages[0]
        ):
            raise UserError(f"adapter.targets: {name} would be trained on two stages; remove it from the list")
    return stages, sum(size for size, _ in merged(parameters).values())


def check_finite(model: nn.Module, world: World) -> None:
    """Raise UserError on every rank if a weight is NaN or infinite. Each rank reads its shards.

    Weights in 4 bits are packed bytes in the guise of floating point; their scales are not checked.
    """
    odd = None
    for name, parameter in model.named_parameters():
        shard, local = shard_of(name, parameter), parameter.detach()
        if isinstance(shard, Zero3Shard):  # DeepSpeed leaves the padding after the range uninitialized
            local = shard.parameter.ds_tensor.detach()[: shard.own_range()[1]]
        local = local.to_local() if isinstance(local, DTensor) else local
        if _quant_state(model, name) is None and local.is_floating_point() and not bool(torch.isfinite(local).all()):
            odd = name
            break
    if names := [found for found in world.gather(odd) if found is not None]:
        raise UserError(
            f"model.name: {names[0].removeprefix('base_model.model.')} has values that are NaN or infinite: the "
            "weights are damaged; download or convert them again"
        )
