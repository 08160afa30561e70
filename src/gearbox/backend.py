"""The engine: the only module (with `gear`, its file) that may name one.

Starts the process group and Accelerate as the gear asks, wraps model and optimizer, and proves that what was asked for
is what runs. On a machine without a GPU the same engine runs on gloo in fp32, with as many ranks: a rehearsal.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, set_seed
from torch.distributed.tensor import DTensor

from gearbox.config import Recipe, UserError
from gearbox.gear import Gear
from gearbox.tensors import WHOLE, bare_optimizer, bytes_held

LOADING_TIMEOUT = timedelta(hours=2)  # of a collective until the first step is done; then backend.limit_waiting
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def is_rehearsal() -> bool:
    return not torch.cuda.is_available()


def is_first() -> bool:
    """Whether this is rank 0 of the run; known before there is a process group."""
    return os.environ.get("RANK", "0") == "0"


def is_first_of_node() -> bool:
    """Whether this is the first rank on its machine, which does what need be done there once."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def num_idle_gpus() -> int:
    """GPUs of this machine that no rank of this run uses."""
    return torch.cuda.device_count() - int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def quiet_libraries() -> None:
    """Silence what the libraries say on every rank and at every step, and nobody can act on."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def precision(gear: Gear) -> str:
    """no (fp32) or bf16. Most CPUs have no bf16 units, so a rehearsal is in fp32."""
    return "no" if is_rehearsal() else gear.precision


def check_ranks(gear: Gear) -> None:
    """Raise UserError where the ranks are not those asked for, or this machine is not for them."""
    ranks, local_ranks = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks != gear.num_processes:
        raise UserError(
            f"{gear.path}: asks for {gear.num_processes} ranks, but {ranks} run; give --num_processes {ranks}"
        )
    if gear.engine == "single" and ranks > 1:
        raise UserError(f"{gear.path}: trains on one device, but {ranks} ranks run; use accelerate_configs/ddp.yaml")
    if not is_rehearsal():
        num_gpus = torch.cuda.device_count()
        if local_ranks > num_gpus:
            way_out = f"give --num_processes {num_gpus}" if num_gpus > 1 else "use accelerate_configs/single.yaml"
            raise UserError(f"{gear.path}: {local_ranks} ranks here, but {num_gpus} GPUs; {way_out}")
    elif NVIDIA_DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        raise UserError(
            f"{gear.path}: this machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU: look at "
            "nvidia-smi and the torch build; CUDA_VISIBLE_DEVICES= (empty) rehearses on the CPU"
        )


def start_processes(gear: Gear) -> PartialState:
    """Join the process group, after check_ranks."""
    quiet_libraries()
    if not is_rehearsal():
        return PartialState(timeout=LOADING_TIMEOUT)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed guesses the same, with a warning
    if gear.engine == "zero":
        # Without its own start DeepSpeed would find one process where there are several.
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each rank compiles it for 100 s
        deepspeed.init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, verbose=False, timeout=LOADING_TIMEOUT
        )
    state = PartialState(cpu=True, timeout=LOADING_TIMEOUT)
    if gear.engine in ("fsdp", "zero"):
        # accelerate turns FSDP and ZeRO into data parallelism for MULTI_CPU; as MULTI_GPU it takes them as they are,
        # and the device stays the CPU. The attribute is private: nowhere else is it touched.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return state


def place() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    return PartialState().process_index, PartialState().num_processes


def gather(found: Any) -> list[Any]:
    """The object of each rank, by rank, on every rank."""
    from accelerate.utils import gather_object

    return list(gather_object([found])) if PartialState().num_processes > 1 else [found]


def first_decides(work: Callable[[], Any]) -> Any:
    """What rank 0's call returns, on every rank; its UserError too."""
    result, refusal = None, None
    if is_first():
        try:
            result = work()
        except UserError as error:
            refusal = str(error)
    result, refusal = gather((result, refusal))[0]
    if refusal is not None:
        raise UserError(refusal)
    return result


def agree(numbers: list[int]) -> list[int]:
    """The sums over all ranks."""
    state = PartialState()
    if state.num_processes == 1:
        return [int(number) for number in numbers]
    counted = torch.tensor([int(number) for number in numbers], device=state.device)
    torch.distributed.all_reduce(counted)
    return counted.tolist()


def ranks_of_this_machine() -> dict[int, int]:
    """Rank to process id."""
    found = gather((socket.gethostname(), os.getpid()))
    return {rank: pid for rank, (host, pid) in enumerate(found) if host == socket.gethostname()}


def limit_waiting(seconds: float) -> None:
    """From here on a collective that takes longer fails. Loading takes long; a step does not."""
    if torch.distributed.is_initialized():
        from torch.distributed.distributed_c10d import _set_pg_timeout, _world

        for group in list(_world.pg_map):
            _set_pg_timeout(timedelta(seconds=seconds), group)


def check_same(what: str) -> None:
    """Raise UserError where ranks have read different data, such as machines with other copies of a file."""
    found = gather(what)
    if len({*found}) > 1:
        others = ", ".join(str(rank) for rank, read in enumerate(found) if read != found[0])
        raise UserError(
            f"data.path: the ranks {others} have read other data than rank 0; is it the same on every machine?"
        )


def start(gear: Gear, recipe: Recipe, accumulation: int, micro_rows: int) -> Accelerator:
    """The Accelerator of this gear, after start_processes."""
    options: dict[str, Any] = {"mixed_precision": precision(gear)}
    # Lists of micro batches, not a data loader: the count alone decides when gradients are reduced.
    # FSDP2 would keep the whole gradient in fp32 on each rank until the last of them: 30 GB for a 7B. It reduces each.
    options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
        num_steps=accumulation, sync_with_dataloader=False, sync_each_batch=gear.engine == "fsdp"
    )
    os.environ.pop(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None
    )  # checked by gear.check_against; it would beat the plugin
    if gear.engine == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=_fsdp_policy(gear))
        # The policy alone decides: with mixed_precision accelerate would upcast bf16 masters and add autocast on top.
        options["mixed_precision"] = "no"
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    if gear.engine == "zero":
        from accelerate.utils import DeepSpeedPlugin

        settings = gear.filled_json(recipe, accumulation, micro_rows, precision(gear))
        # zero.Init cannot partition 4-bit weights while they load; the engine partitions them afterwards.
        init = gear.zero_stage == 3 and recipe.model.quantize is None
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=init)
    if gear.engine == "ddp":
        from accelerate.utils import DistributedDataParallelKwargs

        options["kwargs_handlers"] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    return Accelerator(**options)


def _fsdp_policy(gear: Gear) -> Any:
    """Forward in the gear's precision, gradients always reduced in fp32 (accelerate's default would be bf16)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def prepare(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Model and optimizer as the engine runs them."""
    model, optimizer = accelerator.prepare(model, optimizer)
    if type(bare_optimizer(optimizer)).__module__.startswith("bitsandbytes"):
        step_on_local_shards(bare_optimizer(optimizer))
    return model, optimizer


def settle(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> None:
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
                setattr(local, WHOLE, parameter)  # by which its state is saved under its name
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


def clip_gradients(accelerator: Accelerator, model: Any, max_norm: float) -> float:
    """Clip the gradient of the whole step and return its norm before; not finite where the step must be skipped.

    ZeRO has clipped already, and taken its step: none, if the norm was not finite.
    """
    if getattr(getattr(model, "optimizer", None), "overflow", False):
        return math.nan
    return float(accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf))


def draw_from(*numbers: int) -> None:
    """Let random numbers follow from these alone: with (seed, step, rank) a resumed run draws what it would have."""
    set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def verify(
    accelerator: Accelerator, model: Any, optimizer: Any, gear: Gear, recipe: Recipe, accumulation: int
) -> dict[str, str]:
    """Hold what runs against what was asked. Returns the facts for the log; raises UserError at any difference."""
    engine = _engine_running(model)
    if engine != _engine_asked(gear):  # the other facts are read off the engine
        raise _not_what_was_asked(gear, [f"engine: asked for {_engine_asked(gear)}, running {engine}"])
    facts: dict[str, tuple[Any, Any]] = {
        "ranks": (gear.num_processes, accelerator.num_processes),
        "engine": (engine, engine),
        "precision": (precision(gear), _precision_running(accelerator, model, gear)),
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
    held, whole = bytes_held(model.parameters())
    trained, _ = bytes_held(p for p in model.parameters() if p.requires_grad)
    if gear.engine == "fsdp" or gear.zero_stage == 3:
        share, ideal = held / whole, 1 / gear.num_processes
        # Shards are padded to whole rows: small models lie a little above 1/N, unsharded 4-bit weights far above.
        if share > ideal * 1.1 + 0.02:
            wrong.append(f"sharding: a rank should hold {ideal:.0%} of the parameters' bytes, but holds {share:.0%}")
    if gear.zero_stage in (1, 2):
        # The partitions that the optimizer updates, padded to whole buffers.
        kept = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if kept > trainable / gear.num_processes * 1.1 + 1000:
            wrong.append(f"sharding: the optimizer of a rank holds {kept:,} of {trainable:,} weights")
    if wrong:
        raise _not_what_was_asked(gear, wrong)
    shown = {name: _name(found) for name, (_, found) in facts.items()}
    parameters = f"{held / 2**20:,.1f} of {whole / 2**20:,.1f} MiB, {trained / 2**20:,.1f} MiB of it trained"
    return shown | {"parameters on this rank": parameters}


def _not_what_was_asked(gear: Gear, wrong: list[str]) -> UserError:
    return UserError(f"{gear.path}: what runs is not what was asked for: " + "; ".join(wrong))


def _name(value: Any) -> str:
    names = sorted(str(v).removeprefix("torch.") for v in (value if isinstance(value, set) else {value}))
    return ", ".join({"no": "fp32", "float32": "fp32", "bfloat16": "bf16"}.get(name, name) for name in names)


def _engine_asked(gear: Gear) -> str:
    return {"single": "one device", "ddp": "DDP", "fsdp": "FSDP2", "zero": f"ZeRO-{gear.zero_stage}"}[gear.engine]


def _engine_running(model: Any) -> str:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        return "DDP"
    if isinstance(model, FSDPModule):
        return "FSDP2"
    if hasattr(model, "zero_optimization_stage"):
        return f"ZeRO-{model.zero_optimization_stage()}"
    return "one device"


def _precision_running(accelerator: Accelerator, model: Any, gear: Gear) -> str:
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
