"""The engine: Accelerate started as the gear asks, the wrapped model and optimizer, and what a step does with them.

`verification` proves that what was asked for is what runs. On a machine without a GPU the same engine runs on gloo in
fp32, with as many ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from gearbox.checkpoint.shards import TensorShard
from gearbox.config.gear import Gear
from gearbox.config.job import Job
from gearbox.distributed import sequence_parallel, sharded_state
from gearbox.distributed.pipeline_parallel import Pipeline
from gearbox.distributed.pipeline_stages import Stage
from gearbox.distributed.process_group import ProcessGroup, runs_on_cpu
from gearbox.distributed.tensor_parallel import (
    fix_replicated_gradients,
    fix_sharded_layers,
    norm_of_shards,
    split_groups_by_mesh,
)
from gearbox.distributed.unwrap import STEPPED_SHARD, unwrap_optimizer

if TYPE_CHECKING:
    from accelerate import ParallelismConfig
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


@dataclass
class Engine:
    """A model under an engine. Every rank has one and makes the same calls, in the same order."""

    job: Job
    world: ProcessGroup
    accelerator: Accelerator
    model: nn.Module
    """As the engine wraps it: call this one. With labels it returns the sum of its target tokens' losses
    (model/loss.py); without gradients, each token's."""
    unwrapped: nn.Module
    """As it was loaded: its parameters have the model's own names."""
    optimizer: Optimizer
    source: str
    """Folder or hub id of the weights it started from."""
    stored_dtype: torch.dtype
    """In which those are stored, and the trained ones are saved."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return cast(torch.device, self.accelerator.device)

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, where the model is cut into stages."""
        return self.model if isinstance(self.model, Pipeline) else None

    @property
    def data_shard(self) -> tuple[int, int]:
        """Which part of a step's rows this rank trains, and how many parts there are."""
        gear = self.job.gear
        return gear.data_rank(self.world.rank), gear.data_parallel

    @property
    def eval_shard(self) -> tuple[int, int]:
        """Which part of the held-out rows this rank evaluates, and how many parts there are.

        Ranks that share a sequence in training evaluate different rows.
        """
        return self.job.gear.eval_shard(self.world.rank)

    def to_device(self, micro_batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model, on its device."""
        return {name: tensor.to(self.device) for name, tensor in micro_batch.items() if name != "chunk_ids"}

    @contextmanager
    def forward_inputs(self, micro_batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Enter gradient accumulation, which decides `is_last_micro_batch`; yield the model's inputs on this rank."""
        with self.accelerator.accumulate(self.model), self.local_tokens(self.to_device(micro_batch)) as inputs:
            yield inputs

    def local_tokens(self, inputs: dict[str, torch.Tensor]) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Yield this rank's tokens of rows [B, T] that several ranks share; all of them where none do."""
        return sequence_parallel.local_tokens(self.job.gear, self.accelerator, inputs)

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the micro batch under way is the last one of its step."""
        return bool(self.accelerator.sync_gradients)

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks with tokens of their own, on every rank."""
        return self.sum_over_all_ranks(value) / self.job.gear.degree("tp")  # whose ranks all have the same tokens

    def sum_over_all_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on every rank."""
        return cast(torch.Tensor, self.accelerator.reduce(value, "sum"))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that is summed over ranks and micro batches.

        Engines average over the ranks that have tokens of their own (dp, cp, sp) and over the micro batches: both are
        undone here. ZeRO clips and takes its step inside the last backward pass of a step.
        """
        self.accelerator.backward(loss * (self.job.gear.averaged_over * self.job.batch.accumulation_steps))

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradient of the whole step and return its norm before; not finite where the step must be skipped.

        ZeRO has clipped already in `backward`, and taken its step; it took none if the norm was not finite.
        """
        if getattr(getattr(self.model, "optimizer", None), "overflow", False):
            return math.nan
        if self.pipeline is not None:
            return self.pipeline.clip_gradients(max_norm or math.inf)
        if self.job.gear.degree("tp") > 1:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            norm = norm_of_shards(gradients)
            if max_norm and norm > max_norm:
                for gradient in gradients:
                    gradient.mul_(max_norm / norm)
            return norm
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm or math.inf))

    def step_and_zero(self, skip: bool) -> None:
        """Take the optimizer's step, unless it is skipped or accumulation continues, and clear the gradients."""
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def set_learning_rate(self, rate: float) -> None:
        """Set it before the backward pass of the last micro batch: DeepSpeed takes its step inside that."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def seed_step(self, step: int) -> None:
        """Let random numbers follow from (seed, step, rank): a resumed run draws what an uninterrupted one would."""
        seed_step(self.job.recipe.train.seed, step, self.world.rank // self.job.gear.degree("tp"))

    def fix_ddp_bucket_order(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Let DDP order its buckets before step 1, by a backward pass of a batch without targets.

        The first pass decides it, and with it which rank's gradients are added first: from 3 ranks on a resumed run
        would otherwise differ in the last bit from an uninterrupted one.
        """
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model(**self.to_device(batch)).backward()
            self.model.zero_grad()

    def local_shards(self) -> list[TensorShard]:
        """Return what this rank writes to a checkpoint. Every rank calls it."""
        return sharded_state.local_shards(self.unwrapped, self.optimizer, self.world)


def seed_step(*numbers: int) -> None:
    """Seed all random generators by these numbers."""
    set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def unwrap(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model as it was before `prepare`."""
    return model.module if isinstance(model, Pipeline) else cast(nn.Module, accelerator.unwrap_model(model))


def precision(gear: Gear) -> str:
    """Return no (fp32) or bf16. Most CPUs have no bf16 units, so they compute in fp32."""
    return "no" if runs_on_cpu() else gear.precision


def create_accelerator(job: Job) -> Accelerator:
    """Return the Accelerator of the job's gear, after join_process_group."""
    gear = job.gear
    options: dict[str, Any] = {"mixed_precision": precision(gear)}
    # Lists of micro batches, not a data loader: the count alone decides when gradients are reduced.
    # FSDP2 would keep the whole gradient in fp32 on each rank until the last of them: 30 GB for a 7B. It reduces each.
    options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
        num_steps=job.batch.accumulation_steps, sync_with_dataloader=False, sync_each_batch=gear.engine == "fsdp"
    )
    # Checked by compatibility.check_against; it would override the plugin.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
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

        settings = gear.filled_json(job.recipe, job.batch, precision(gear))
        # zero.Init cannot partition 4-bit weights while they load; the engine partitions them afterwards.
        init = gear.zero_stage == 3 and job.recipe.model.quantize is None
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=init)
    options["parallelism_config"] = _parallelism_config(gear)
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # what the launcher read of it knows half of them
    if gear.engine == "ddp":
        from accelerate.utils import DistributedDataParallelKwargs

        options["kwargs_handlers"] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    return Accelerator(**options)


def _fsdp_policy(gear: Gear) -> MixedPrecisionPolicy:
    """Forward in the gear's precision, gradients always reduced in fp32 (accelerate's default would be bf16)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def _fsdp_offload(gear: Gear) -> CPUOffloadPolicy | OffloadPolicy:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    # Pinning memory fails without a GPU.
    return CPUOffloadPolicy(pin_memory=not runs_on_cpu()) if gear.offload else OffloadPolicy()


def _parallelism_config(gear: Gear) -> ParallelismConfig | None:
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
    """Return options of `from_pretrained`: under tensor parallelism each rank reads only its shard of each matrix."""
    if gear.degree("tp") == 1:
        return {}
    from transformers.distributed import DistributedConfig

    class TensorParallel(DistributedConfig):  # type: ignore[misc]
        """Let transformers lay out the mesh of all ranks, and shard over tp only: FSDP comes after adapters, here."""

        dp_size = 1

    if gear.engine == "tp":
        fix_replicated_gradients()
    tp = gear.degree("tp")
    return {"distributed_config": TensorParallel(tp_size=tp, fsdp_size=gear.num_processes // tp)}


def prepare(
    gear: Gear, accelerator: Accelerator, model: PreTrainedModel, optimizer: Optimizer
) -> tuple[nn.Module, Optimizer]:
    """Return model and optimizer as the engine runs them."""
    if gear.degree("sp") > 1:
        sequence_parallel.isolate_documents(model)
        accelerator.parallelism_config.sp_handler.sp_attn_implementation = model.config._attn_implementation
    if gear.engine == "pp":
        return _make_pipeline(gear, accelerator, model), accelerator.prepare(optimizer)
    if gear.degree("tp") > 1:
        fix_sharded_layers(model)
    if gear.engine == "tp":
        # As under DDP, without its wrapper: the ranks share one model.
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


def stage_of_rank(gear: Gear, rank: int) -> Stage | None:
    """Return which stage of a pipeline this rank has, None without one."""
    count = gear.degree("pp")
    return Stage(rank // gear.data_parallel, count) if count > 1 else None


def _make_pipeline(gear: Gear, accelerator: Accelerator, model: torch.nn.Module) -> Pipeline:
    mesh = torch.distributed.device_mesh.init_device_mesh(
        accelerator.device.type, (gear.degree("pp"), gear.data_parallel), mesh_dim_names=("pp", "dp")
    )
    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    # As under DDP, without its wrapper: on its device, and in autocast.
    placed = accelerator.prepare_model(model, evaluation_mode=True)
    return Pipeline(placed, mesh["pp"].get_group(), mesh["dp"].get_group(), gear.schedule, compute)


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

    def lend_gradients(*_: object) -> None:
        for parameter, local in pairs:
            local.grad = parameter.grad.to_local() if parameter.grad is not None else None

    def drop_gradients(*_: object) -> None:
        for parameter, local in pairs:
            parameter.grad = local.grad = None

    optimizer.register_step_pre_hook(lend_gradients)
    optimizer.register_step_post_hook(drop_gradients)
