"""The engine. With `gear` (its file), `tensors` and `verification`, no other module may name one.

Starts the process group and Accelerate as the gear asks, and wraps model and optimizer; `verification` proves that
what was asked for is what runs. On a machine without a GPU the same engine runs on gloo in fp32, with as many ranks: a
rehearsal.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch.distributed.tensor import DTensor

from gearbox.config.gear import Gear
from gearbox.config.recipe import Recipe
from gearbox.distributed import sequence_parallel
from gearbox.distributed.pipeline_parallel import Pipeline
from gearbox.distributed.pipeline_stages import Stage
from gearbox.distributed.process_group import runs_on_cpu
from gearbox.distributed.tensor_parallel import (
    fix_replicated_gradients,
    fix_sharded_layers,
    norm_of_shards,
    split_groups_by_mesh,
)
from gearbox.distributed.unwrap import STEPPED_SHARD, unwrap_optimizer


def precision(gear: Gear) -> str:
    """no (fp32) or bf16. Most CPUs have no bf16 units, so a rehearsal is in fp32."""
    return "no" if runs_on_cpu() else gear.precision


def create_accelerator(gear: Gear, recipe: Recipe, accumulation: int, micro_rows: int) -> Accelerator:
    """The Accelerator of this gear, after start_processes."""
    options: dict[str, Any] = {"mixed_precision": precision(gear)}
    # Lists of micro batches, not a data loader: the count alone decides when gradients are reduced.
    # FSDP2 would keep the whole gradient in fp32 on each rank until the last of them: 30 GB for a 7B. It reduces each.
    options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
        num_steps=accumulation, sync_with_dataloader=False, sync_each_batch=gear.engine == "fsdp"
    )
    os.environ.pop(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None
    )  # checked by compatibility.check_against; it would beat the plugin
    if gear.engine == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            mixed_precision_policy=_fsdp_policy(gear), cpu_offload=_fsdp_offload(gear)
        )
        # The policy alone decides: with mixed_precision accelerate would upcast bf16 masters and add autocast on top.
        options["mixed_precision"] = "no"
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    if gear.engine == "zero":
        from accelerate.utils import DeepSpeedPlugin

        settings = gear.filled_json(recipe, accumulation, micro_rows, precision(gear))
        # zero.Init cannot partition 4-bit weights while they load; the engine partitions them afterwards.
        init = gear.zero_stage == 3 and recipe.model.quantize is None
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=init)
    options["parallelism_config"] = _parallelism_config(gear)
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # what the launcher read of it knows half of them
    if gear.engine == "ddp":
        from accelerate.utils import DistributedDataParallelKwargs

        options["kwargs_handlers"] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    return Accelerator(**options)


def _fsdp_policy(gear: Gear) -> Any:
    """Forward in the gear's precision, gradients always reduced in fp32 (accelerate's default would be bf16)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def _fsdp_offload(gear: Gear) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    # Pinning memory fails without a GPU.
    return CPUOffloadPolicy(pin_memory=not runs_on_cpu()) if gear.offload else OffloadPolicy()


def _parallelism_config(gear: Gear) -> Any:
    """The degrees that accelerate has to know. Those left out of the file follow from the number of ranks."""
    from accelerate import ParallelismConfig

    if all(gear.degree(name) == 1 for name in ("dp_replicate", "sp", "cp")) and (
        gear.degree("tp") == 1 or gear.engine != "fsdp"
    ):
        return None
    return ParallelismConfig(
        dp_replicate_size=gear.degree("dp_replicate"),
        dp_shard_size=gear.data_parallel // gear.degree("dp_replicate"),
        **{f"{name}_size": gear.degree(name) for name in ("tp", "cp", "sp")},
    )


def from_pretrained_kwargs(gear: Gear) -> dict[str, Any]:
    """What `from_pretrained` must be told: under tensor parallelism each rank reads only its part of each matrix."""
    if gear.degree("tp") == 1:
        return {}
    from transformers.distributed import DistributedConfig

    class TensorParallel(DistributedConfig):
        """transformers lays out the mesh of all ranks, and cuts over tp alone: FSDP comes after adapters, here."""

        dp_size = 1

    if gear.engine == "tp":
        fix_replicated_gradients()
    tp = gear.degree("tp")
    return {"distributed_config": TensorParallel(tp_size=tp, fsdp_size=gear.num_processes // tp)}


def prepare(
    gear: Gear, accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Model and optimizer as the engine runs them."""
    if gear.degree("sp") > 1:
        sequence_parallel.isolate_documents(model)
        accelerator.parallelism_config.sp_handler.sp_attn_implementation = model.config._attn_implementation
    if gear.engine == "pp":
        return _make_pipeline(gear, accelerator, model), accelerator.prepare(optimizer)
    if gear.degree("tp") > 1:
        fix_sharded_layers(model)
    if gear.engine == "tp":
        # As DDP's, without its wrapper: the ranks have one model together.
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(optimizer)
    elif gear.degree("tp") > 1:
        # accelerate 1.15's prepare() would first import a name that transformers 5.23 no longer has.
        model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    if gear.degree("tp") > 1:
        model.config.distributed_config = None  # else transformers' save_pretrained waits for all ranks
        split_groups_by_mesh(unwrap_optimizer(optimizer))
    if type(unwrap_optimizer(optimizer)).__module__.startswith("bitsandbytes"):
        step_on_local_shards(unwrap_optimizer(optimizer))
    return model, optimizer


def stage_of_rank(gear: Gear) -> Stage | None:
    """Which stage of a pipeline this rank has, None without one."""
    count = gear.degree("pp")
    return Stage(PartialState().process_index // gear.data_parallel, count) if count > 1 else None


def _make_pipeline(gear: Gear, accelerator: Accelerator, model: torch.nn.Module) -> Pipeline:
    mesh = torch.distributed.device_mesh.init_device_mesh(
        accelerator.device.type, (gear.degree("pp"), gear.data_parallel), mesh_dim_names=("pp", "dp")
    )
    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    # As DDP's, without its wrapper: on its device, and in autocast.
    placed = accelerator.prepare_model(model, evaluation_mode=True)
    return Pipeline(placed, mesh["pp"].get_group(), mesh["dp"].get_group(), gear.schedule, compute)


def unwrap_model(accelerator: Accelerator, model: Any) -> Any:
    """The model as it was before `prepare`."""
    return model.module if isinstance(model, Pipeline) else accelerator.unwrap_model(model)


def fix_ddp_bucket_order(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Let DDP order its buckets before step 1, by a backward pass of a batch without targets.

    The first pass decides it, and with it which rank's gradients are added first: from 3 ranks on a resumed run would
    otherwise differ in the last bit from one that was never interrupted.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        inputs = {name: tensor.to(accelerator.device) for name, tensor in batch.items() if name != "document_ids"}
        model(**inputs).backward()
        model.zero_grad()


def step_on_local_shards(optimizer: torch.optim.Optimizer) -> None:
    """Let an elementwise optimizer whose kernels know no DTensor work on each rank's own shard (FSDP2)."""
    pairs: list[tuple[Any, torch.nn.Parameter]] = []
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if isinstance(parameter, DTensor):
                local = torch.nn.Parameter(parameter.to_local())
                setattr(parameter, STEPPED_SHARD, local)  # by which its state is saved under its name
                pairs.append((parameter, local))
                group["params"][i] = local

    def lend_gradients(*_: Any) -> None:
        for parameter, local in pairs:
            local.grad = parameter.grad.to_local() if parameter.grad is not None else None

    def drop_gradients(*_: Any) -> None:
        for parameter, local in pairs:
            parameter.grad = local.grad = None

    optimizer.register_step_pre_hook(lend_gradients)
    optimizer.register_step_post_hook(drop_gradients)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Before the backward pass of the last micro batch: DeepSpeed takes its step inside it."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(gear: Gear, accelerator: Accelerator, model: Any, max_norm: float) -> float:
    """Clip the gradient of the whole step and return its norm before; not finite where the step must be skipped.

    ZeRO has clipped already, and taken its step: none, if the norm was not finite.
    """
    if getattr(getattr(model, "optimizer", None), "overflow", False):
        return math.nan
    if gear.engine == "pp":
        return model.clip_gradients(max_norm or math.inf)
    if gear.degree("tp") > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = norm_of_shards(gradients)
        if max_norm and norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm
    return float(accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf))


def seed_step(*numbers: int) -> None:
    """Let random numbers follow from these alone: with (seed, step, rank) a resumed run draws what it would have."""
    set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
