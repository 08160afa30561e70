"""Start Accelerate for a gear, wrap the model and the optimizer, and run the parts of a training step on them.

`verification` checks that the running engine matches the gear. On a machine without a GPU the same engine runs on
gloo in fp32, with the same number of ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from gearbox.checkpoint.shards import TensorShard
from gearbox.config.gear import Gear
from gearbox.config.job import Job
from gearbox.config.recipe import Perf, Recipe
from gearbox.distributed import sequence_parallel, tensor_parallel
from gearbox.distributed.pipeline_parallel import Pipeline
from gearbox.distributed.pipeline_stages import Stage
from gearbox.distributed.process_group import ProcessGroup, fill_sizes_by_width, runs_on_cpu
from gearbox.distributed.tensor_parallel import (
    fix_sharded_layers,
    norm_of_shards,
    split_groups_by_mesh,
)
from gearbox.errors import UserError, one_line
from gearbox.kernels import attention
from gearbox.kernels.blocks import blocks_of
from gearbox.planning.fit import Fit
from gearbox.rows.batches import Batch, PackedRows
from gearbox.rows.units import IGNORE_INDEX
from gearbox.sharding import fsdp_loading, sharded_state
from gearbox.sharding.unwrap import (
    checking_hooks,
    gather_ahead,
    step_on_local_shards,
    unwrap_optimizer,
    without_adapter,
)

if TYPE_CHECKING:
    from accelerate import ParallelismConfig
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


@dataclass
class Engine:
    """A model and its optimizer under an engine. Every rank makes the same calls in the same order."""

    job: Job
    world: ProcessGroup
    accelerator: Accelerator
    model: nn.Module
    """The model as the engine wraps it; call this one. With labels it returns the sum of the target tokens' losses
    (model/loss.py). Without gradients it returns the loss of each token."""
    unwrapped: nn.Module
    """The model as it was loaded: its parameters have the model's own names."""
    optimizer: Optimizer
    source: str
    """Folder or Hub id of the starting weights."""
    stored_dtype: torch.dtype
    """The dtype of the starting weights in their files; trained weights are saved in it."""
    num_positions: int | None = None
    """The number of positions that the model has, or None if it has no such limit."""
    fit: Fit | None = None
    """The predicted memory of this rank."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return cast(torch.device, self.accelerator.device)

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline if the model is split into stages, else None."""
        return self.model if isinstance(self.model, Pipeline) else None

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of a step's rows. The ranks of one model share a part."""
        return self.job.gear.data_rank(self.world.rank)

    @property
    def eval_shard(self) -> tuple[int, int]:
        """The index of this rank's part of the held-out rows, and the number of parts; sp and cp ranks differ in it."""
        return self.job.gear.eval_shard(self.world.rank)

    def to_device(self, micro_batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model on its device."""
        inputs = {name: tensor for name, tensor in micro_batch.items() if name != "chunk_ids"}
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}

    def accumulating(self) -> AbstractContextManager[None]:
        """Enter the next micro-batch. This sets `is_last_micro_batch`."""
        return cast("AbstractContextManager[None]", self.accelerator.accumulate(self.model))

    @contextmanager
    def forward_inputs(self, one_pass: Batch, ends_micro_batch: bool) -> Iterator[dict[str, Any]]:
        """Yield the model's inputs on this rank. Only the pass that ends a micro-batch may send gradients."""
        quiet = nullcontext() if ends_micro_batch else self.accelerator.no_sync(self.model)
        tokens = {name: tensor for name, tensor in one_pass.items() if name != "chunk_ids"}
        with quiet, self.local_tokens(tokens) as inputs:  # on the CPU, where ring attention reads the positions
            yield self.to_device(inputs) | self._counted(one_pass)

    def _counted(self, micro_batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return what the model would otherwise read from tensors on a GPU, and wait: targets and documents."""
        gear, causal_lm = self.job.gear, without_adapter(cast(PreTrainedModel, self.unwrapped))
        if self.device.type == "cpu" or gear.shares_rows:
            return {}
        counted: dict[str, Any] = {"num_targets": int((micro_batch["labels"] != IGNORE_INDEX).sum())}
        if "position_ids" in micro_batch and causal_lm.takes_bounds:
            bounds = attention.bounds_of(micro_batch["position_ids"])
            starts = bounds["cu_seq_lens_q"].pin_memory().to(self.device, non_blocking=True)
            counted |= bounds | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        return counted

    def local_tokens(self, inputs: dict[str, torch.Tensor]) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Yield this rank's tokens of rows [B, T]: a part if several ranks share each row, else all of them."""
        return sequence_parallel.local_tokens(self.job.gear, self.accelerator, inputs)

    @property
    def is_last_micro_batch(self) -> bool:
        """True while the current micro-batch is the last one of its step."""
        return bool(self.accelerator.sync_gradients)

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks on every rank, counting ranks with the same tokens once."""
        return self.sum_over_all_ranks(value) / self.job.gear.degree("tp")  # tp ranks share the same tokens

    def sum_over_all_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on every rank."""
        return cast(torch.Tensor, self.accelerator.reduce(value, "sum"))

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss that is summed over ranks and micro-batches.

        Engines average over the ranks with different tokens (dp, cp, sp) and over the micro-batches. Both averages
        are undone here. ZeRO clips and steps inside the last backward pass of a step.
        """
        self.accelerator.backward(loss * (self.job.gear.averaged_over * self.job.batch.accumulation_steps))

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradient of the step and return its norm before clipping; skip the step if it is not finite.

        ZeRO has already clipped and stepped in `backward`. It did not step if the norm was not finite.
        """
        if getattr(getattr(self.model, "optimizer", None), "overflow", False):
            return math.nan
        if self.pipeline is not None:
            return self.pipeline.clip_gradients(max_norm or math.inf)
        if self.job.gear.has_several_meshes:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            norm = norm_of_shards(gradients)
            if max_norm and norm > max_norm:
                for gradient in gradients:
                    gradient.mul_(max_norm / norm)
            return norm
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm or math.inf))

    def step_and_zero(self, skip: bool) -> None:
        """Step the optimizer, unless the step is skipped or accumulation continues, and clear the gradients.

        Under DDP they stay parts of its buckets: else the next micro-batches, which send nothing, would allocate all of
        them once more. Parameters that a step may leave out get no gradient then, so that no optimizer decays them.
        """
        if not skip:
            self.optimizer.step()
        wrapped = self.model
        keeps = isinstance(wrapped, nn.parallel.DistributedDataParallel) and not wrapped.find_unused_parameters
        self.optimizer.zero_grad(set_to_none=not keeps)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate. Call this before the last micro-batch's backward pass: DeepSpeed steps inside it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def seed_step(self, step: int) -> None:
        """Seed from (seed, step, rank), so that a resumed run draws the same numbers as an uninterrupted one."""
        numbers = (self.job.recipe.train.seed, step, self.world.rank // self.job.gear.degree("tp"))
        set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))

    def warm_up(self, rows: PackedRows) -> None:
        """Run backward passes of rows without targets before step 1, if DDP or compiled layers need it.

        With DDP, the first backward pass decides the order of its buckets, and with it which ranks' gradients are added
        first. The second makes the gradients parts of the buckets: until then DDP multiplies them by 1 / ranks, and
        afterwards it divides them. Otherwise a resumed run on 3 or more ranks would differ from an uninterrupted one in
        the last bit. Layers are compiled here, where no time limit runs, for rows of one document and of several (see
        `checking_hooks`).
        """
        if self.job.recipe.perf.compile and self.job.gear.engine != "zero":  # ZeRO steps inside a backward pass
            with checking_hooks(blocks_of(without_adapter(self.unwrapped))):
                for row in (None, 0):
                    self._try_rows(rows.batch([row] * self.job.batch.micro_rows))
        elif isinstance(self.model, nn.parallel.DistributedDataParallel):
            for _ in range(2):
                self._try_rows(rows.batch([None]))

    def _try_rows(self, batch: Batch) -> None:
        """Run a backward pass of rows without their targets, and clear the gradients."""
        with self.forward_inputs(batch | {"labels": torch.full_like(batch["labels"], IGNORE_INDEX)}, True) as inputs:
            self.model(**inputs).backward()
        self.step_and_zero(skip=True)

    def local_shards(self) -> list[TensorShard]:
        """Return the shards that this rank writes to a checkpoint. Every rank must call it."""
        return sharded_state.local_shards(self.unwrapped, self.optimizer, self.world)


def unwrap(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model as it was before `prepare`."""
    return model.module if isinstance(model, Pipeline) else cast(nn.Module, accelerator.unwrap_model(model))


def precision(gear: Gear) -> str:
    """Return the precision as Accelerate names it: "no" (fp32) or "bf16". CPUs run fp32; most lack bf16 units."""
    return "no" if runs_on_cpu() else gear.precision


def attends_by_document(gear: Gear) -> bool:
    """Return True if attention can be computed by document: by the CPU's kernel, or by the GPU's in bf16."""
    return runs_on_cpu() or (precision(gear) == "bf16" and torch.cuda.get_device_capability() >= (8, 0))


def create_accelerator(job: Job, has_unreached: bool = False) -> Accelerator:
    """Return the Accelerator of the job's gear. Call it after `join_process_group`.

    `has_unreached` is True if some parameters get no gradient. DDP would wait for them forever, unless it looks.
    """
    gear = job.gear
    options: dict[str, Any] = {"mixed_precision": precision(gear)}
    # Micro-batches come as lists, not from a data loader, so only their number decides when gradients are reduced.
    # FSDP2 must reduce after each: else every rank keeps the full fp32 gradient, 30 GB for a 7B model.
    options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
        num_steps=job.batch.accumulation_steps, sync_with_dataloader=False, sync_each_batch=gear.engine == "fsdp"
    )
    # This variable would override the plugin; compatibility.conflicts has already reported it.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    if gear.engine == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            mixed_precision_policy=_fsdp_policy(gear), cpu_offload=_fsdp_offload(gear)
        )
        # Only the policy decides: with mixed_precision accelerate would upcast bf16 masters and add autocast.
        options["mixed_precision"] = "no"
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    if gear.engine == "zero":
        from accelerate.utils import DeepSpeedPlugin

        settings = gear.filled_json(job.recipe, job.batch, precision(gear))
        # zero.Init cannot partition 4-bit weights while they load; the engine partitions them afterwards.
        init = gear.zero_stage == 3 and job.recipe.model.quantize is None
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=init)
    options["parallelism_config"] = _parallelism_config(gear)
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # the launcher's copy lacks some degrees
    if gear.engine == "ddp":
        from accelerate.utils import DistributedDataParallelKwargs

        options["kwargs_handlers"] = [
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=has_unreached)
        ]
    accelerator = Accelerator(**options)
    # Accelerate would prepare layers for torch's ring attention, which needs plain causal attention and one document.
    accelerator._prepare_cp = lambda *prepared: prepared
    return accelerator


def _fsdp_policy(gear: Gear) -> MixedPrecisionPolicy:
    """Return a policy that computes in the gear's precision and reduces in fp32; accelerate would reduce in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def _fsdp_offload(gear: Gear) -> CPUOffloadPolicy | OffloadPolicy:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    # Pinning memory fails without a GPU.
    return CPUOffloadPolicy(pin_memory=not runs_on_cpu()) if gear.offload else OffloadPolicy()


def _parallelism_config(gear: Gear) -> ParallelismConfig | None:
    """Return the degrees that accelerate must know. Degrees that the file omits follow from the number of ranks."""
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


def reading_own_shard(gear: Gear, accelerator: Accelerator, recipe: Recipe) -> AbstractContextManager[None]:
    """Let from_pretrained keep only this rank's shard of each weight, if the engine shards them and the method can.

    DoRA needs the norm of each full row of a matrix, and 4-bit weights are sharded after their quantization.
    """
    needs_all = recipe.model.quantize is not None or recipe.adapter.method == "dora"
    rows = None if needs_all else fsdp_loading.row_range(accelerator, gear.degree("ep"))
    return fsdp_loading.reading(rows, whole_ends=bool(recipe.model.add_tokens))


def loading_options(gear: Gear, accelerator: Accelerator, recipe: Recipe) -> dict[str, Any]:
    """Return options for `from_pretrained` that place the weights where the engine needs them.

    Engines that keep full weights on a GPU load them there, tensor by tensor. ZeRO in bf16 rounds them anyway.
    """
    if gear.degree("tp") > 1:
        return tensor_parallel.from_pretrained_kwargs(gear)
    shards = gear.engine == "fsdp" or gear.zero_stage == 3
    if accelerator.device.type == "cpu" or shards or recipe.model.quantize is not None:
        return {}
    dtype = {"dtype": torch.bfloat16} if gear.engine == "zero" and precision(gear) == "bf16" else {}
    return {"device_map": {"": accelerator.device}, **dtype}


def prepare(
    gear: Gear, accelerator: Accelerator, model: PreTrainedModel, optimizer: Optimizer, perf: Perf
) -> tuple[nn.Module, Optimizer]:
    """Return model and optimizer as the engine runs them."""
    if gear.degree("sp") > 1:
        accelerator.parallelism_config.sp_handler.sp_attn_implementation = model.config._attn_implementation
    if gear.engine == "pp":
        return _make_pipeline(gear, accelerator, model), accelerator.prepare(optimizer)
    if gear.degree("tp") > 1:
        fix_sharded_layers(model)
    if gear.engine == "tp":
        # Place the model as under DDP but without the DDP wrapper: the ranks share one model.
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(optimizer)
    elif gear.degree("tp") > 1:
        # accelerate 1.15's prepare() would first import a name that transformers 5.23 no longer has.
        with fsdp_loading.wrapping(model, accelerator, gear.degree("ep")):
            model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
    elif gear.engine == "fsdp":
        with fsdp_loading.wrapping(model, accelerator, gear.degree("ep")):
            model, optimizer = accelerator.prepare(model, optimizer)
    else:
        if gear.engine == "zero":
            fill_sizes_by_width(accelerator, model)
        try:
            model, optimizer = accelerator.prepare(model, optimizer)
        except ValueError as error:
            if gear.degree("sp") == 1:
                raise
            # Accelerate refuses layers that carry a state along the row.
            raise UserError(f"{gear.path}: {one_line(error, 300)}; use accelerate_configs/fsdp.yaml") from None
    if gear.degree("tp") > 1:
        model.config.distributed_config = None  # else transformers' save_pretrained waits for all ranks
    if gear.has_several_meshes:
        split_groups_by_mesh(unwrap_optimizer(optimizer))
    if type(unwrap_optimizer(optimizer)).__module__.startswith("bitsandbytes"):
        step_on_local_shards(unwrap_optimizer(optimizer))
    if gear.engine == "fsdp":
        gather_ahead(blocks_of(without_adapter(unwrap(accelerator, model))), perf.prefetch)
    if gear.engine == "ddp" and perf.ddp_compression == "bf16":
        model.register_comm_hook(None, lambda state, bucket: _average_in_bf16(bucket))
    return model, optimizer


def _average_in_bf16(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP in bf16. DDP refuses torch's own function by name on gloo, which can run it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(cast(dist.ProcessGroup, dist.group.WORLD), bucket)


def stage_of_rank(gear: Gear, rank: int) -> Stage | None:
    """Return the pipeline stage of a rank, or None without a pipeline."""
    count = gear.degree("pp")
    return Stage(rank // gear.data_parallel, count) if count > 1 else None


def _make_pipeline(gear: Gear, accelerator: Accelerator, model: torch.nn.Module) -> Pipeline:
    mesh = dist.device_mesh.init_device_mesh(
        accelerator.device.type, (gear.degree("pp"), gear.data_parallel), mesh_dim_names=("pp", "dp")
    )
    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    # Place the model as under DDP but without the DDP wrapper: on its device and in autocast.
    placed = accelerator.prepare_model(model, evaluation_mode=True)
    return Pipeline(placed, mesh["pp"].get_group(), mesh["dp"].get_group(), gear.schedule, compute)
