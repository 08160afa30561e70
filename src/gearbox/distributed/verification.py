"""What was asked for is what runs: read off the wrapped model, its tensors and its optimizer, not off the files."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from gearbox.config.gear import Gear
from gearbox.config.recipe import Recipe
from gearbox.distributed import process_group
from gearbox.distributed.engine import precision
from gearbox.distributed.pipeline_parallel import Pipeline
from gearbox.distributed.sharded_state import local_bytes
from gearbox.errors import UserError


def verify(
    accelerator: Accelerator, model: Any, optimizer: Any, gear: Gear, recipe: Recipe, accumulation: int
) -> dict[str, str]:
    """Hold what runs against what was asked. Returns the facts for the log; raises UserError at any difference."""
    engine = _running_engine(model)
    if engine != _requested_engine(gear):  # the other facts are read off the engine
        raise _mismatch(gear, [f"engine: asked for {_requested_engine(gear)}, running {engine}"])
    facts: dict[str, tuple[Any, Any]] = {
        "ranks": (gear.num_processes, accelerator.num_processes),
        "engine": (engine, engine),
        "precision": (precision(gear), _running_precision(accelerator, model, gear)),
        "accumulation": (accumulation, accelerator.gradient_accumulation_steps),
    }
    if gear.engine == "zero":
        facts["clip"] = (float(recipe.optim.max_grad_norm), float(model.gradient_clipping()))
        facts["accumulation"] = (accumulation, model.gradient_accumulation_steps())
        if precision(gear) == "bf16":
            facts["gradients in"] = (torch.float32, model.communication_data_type)
            facts["gradients kept in"] = (torch.float32, model.get_data_types()[1])
    elif gear.engine == "fsdp":
        facts["gradients in"] = (torch.float32, model._get_fsdp_state()._mp_policy.reduce_dtype)
    if recipe.optim.master_weights == "fp32":
        facts["masters in"] = ({torch.float32}, _master_dtypes(model, gear, optimizer))
    wrong = [f"{name}: asked for {asked}, running {found}" for name, (asked, found) in facts.items() if asked != found]
    held, whole = local_bytes(model.parameters())
    trained, _ = local_bytes(p for p in model.parameters() if p.requires_grad)
    if gear.engine in ("fsdp", "tp") or gear.zero_stage == 3:
        share, ideal = held / whole, 1 / (gear.shard * gear.degree("tp"))
        # Shards are padded to whole rows: small models lie a little above 1/N, unsharded 4-bit weights far above.
        if share > ideal * 1.1 + 0.02:
            wrong.append(f"sharding: a rank should hold {ideal:.0%} of the parameters' bytes, but holds {share:.0%}")
    if gear.zero_stage in (1, 2):
        # The partitions that the optimizer updates, padded to whole buffers.
        kept = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if kept > trainable / gear.num_processes * 1.1 + 1000:
            wrong.append(f"sharding: the optimizer of a rank holds {kept:,} of {trainable:,} weights")
    if gear.engine == "pp":
        stages, whole = _stages(model)
        if len({*stages}) != gear.degree("pp"):
            wrong.append(f"stages: asked for {gear.degree('pp')}, running {stages}")
        facts["stages"] = ("layers " + ", ".join(dict.fromkeys(stages)),) * 2
        share = model.bubble(accumulation)
        facts["bubble"] = (f"(p-1)/(m+p-1) = {share:.0%} of a step idle, if all stages are as fast",) * 2
    if wrong:
        raise _mismatch(gear, wrong)
    shown = {name: _name(found) for name, (_, found) in facts.items()}
    parameters = f"{held / 2**20:,.1f} of {whole / 2**20:,.1f} MiB, {trained / 2**20:,.1f} MiB of it trained"
    return shown | {"parameters on this rank": parameters}


def _stages(model: Pipeline) -> tuple[list[str], int]:
    """The layers of each rank's stage, and the bytes of the whole model. UserError where two train one weight."""
    stages = process_group.ProcessGroup().gather(model.layers)
    held = process_group.ProcessGroup().gather(
        {name: (p.nbytes, p.requires_grad and p is not model.tied) for name, p in model.module.named_parameters()}
    )
    for name, (_, is_trained) in held[0].items():
        if is_trained and any(
            name in theirs for layers, theirs in zip(stages, held, strict=True) if layers != stages[0]
        ):
            raise UserError(f"adapter.targets: {name} would lie on two stages; take it out of the list")
    return stages, sum({name: size for part in held for name, (size, _) in part.items()}.values())


def _mismatch(gear: Gear, wrong: list[str]) -> UserError:
    return UserError(f"{gear.path}: what runs is not what was asked for: " + "; ".join(wrong))


def _name(value: Any) -> str:
    names = sorted(str(v).removeprefix("torch.") for v in (value if isinstance(value, set) else {value}))
    return ", ".join({"no": "fp32", "float32": "fp32", "bfloat16": "bf16"}.get(name, name) for name in names)


def _requested_engine(gear: Gear) -> str:
    engine = {
        "single": "one device", "ddp": "DDP", "fsdp": "FSDP2", "zero": f"ZeRO-{gear.zero_stage}", "tp": "one model",
        "pp": f"pipeline, {gear.schedule}",
    }[gear.engine]  # fmt: skip
    degrees = {name: gear.degree(name) for name in ("dp_replicate", "tp", "sp", "pp")} | {"offload": gear.offload}
    return _described(engine, degrees)


def _described(engine: str, degrees: dict[str, Any]) -> str:
    """Such as: FSDP2, dp_replicate 2, tp 2."""
    named = [f"{name} {degree}" for name, degree in degrees.items() if degree not in (1, None)]
    return ", ".join([engine, *named])


def _running_engine(model: Any) -> str:
    """As _engine_asked says it, read off the model and its tensors."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    meshes = {p.device_mesh: p.placements for p in model.parameters() if isinstance(p, DTensor)}
    degrees: dict[str, Any] = {"dp_replicate": 1, "tp": 1, "sp": 1, "pp": 1, "offload": None}
    for mesh, placements in meshes.items():
        for i, name in enumerate(mesh.mesh_dim_names or ()):
            if name == "tp" or (name == "dp_replicate" and placements[i].is_replicate()):
                degrees[name] = mesh.size(i)
    engine = "one model" if degrees["tp"] > 1 else "one device"
    if isinstance(model, DistributedDataParallel):
        engine = "DDP"
    elif isinstance(model, Pipeline):
        engine, degrees["pp"] = f"pipeline, {model.schedule}", model.stage.count
    elif isinstance(model, FSDPModule):
        engine = "FSDP2"
        param_groups = [
            g for m in model.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups
        ]
        if all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in param_groups):
            degrees["offload"] = "cpu"
    elif hasattr(model, "zero_optimization_stage"):
        engine = f"ZeRO-{model.zero_optimization_stage()}"
        degrees["sp"] = model.sequence_parallel_size
        places = [
            getattr(part, "device", "none") for part in (model.zero_offload_optimizer(), model.zero_offload_param())
        ]
        degrees["offload"] = next((device for device in ("nvme", "cpu") if device in map(_plain_value, places)), None)
    return _described(engine, degrees)


def _plain_value(value: Any) -> str:
    return str(getattr(value, "value", value))


def _running_precision(accelerator: Accelerator, model: Any, gear: Gear) -> str:
    if gear.engine == "zero":
        return "bf16" if model.bfloat16_enabled() else "fp16" if model.fp16_enabled() else "no"
    if gear.engine == "fsdp":
        compute = model._get_fsdp_state()._mp_policy.param_dtype
        return {torch.bfloat16: "bf16", torch.float32: "no"}.get(compute, str(compute))
    return str(accelerator.mixed_precision)


def _master_dtypes(model: Any, gear: Gear, optimizer: Any) -> set[torch.dtype]:
    """Of the tensors that the optimizer updates."""
    if gear.engine == "zero":
        engine = model.optimizer  # in bf16 ZeRO-1's has neither list, and its param_groups are the fp32 partitions
        flat = getattr(engine, "fp32_partitioned_groups_flat", None) or getattr(
            engine, "single_partition_of_fp32_groups", None
        )
        if flat is not None:
            return {tensor.dtype for tensor in flat if tensor is not None}
    return {p.dtype for group in optimizer.param_groups for p in group["params"]}
