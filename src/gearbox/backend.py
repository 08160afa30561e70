"""The engine. With `gear` (its file), `tensors` and `verification`, no other module may name one.

Starts the process group and Accelerate as the gear asks, and wraps model and optimizer; `verification` proves that
what was asked for is what runs. On a machine without a GPU the same engine runs on gloo in fp32, with as many ranks: a
rehearsal.
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

from gearbox import sequences
from gearbox.cluster import Seat
from gearbox.config import Recipe, UserError
from gearbox.gear import Gear
from gearbox.pipeline import Part, Pipeline
from gearbox.tensors import WHOLE, bare_optimizer

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
    warnings.filterwarnings("ignore", message="Slicing a flattened dim")  # accelerate's, of HSDP's mesh
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # a slow way, once, to save
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
    if gear.degree("cp") > 1 and is_rehearsal():
        raise UserError(
            f"{gear.path}: ring attention runs on GPUs only, torch has none for the CPU; rehearse a sequence over "
            "several ranks with accelerate_configs/ulysses.yaml"
        )
    if gear.engine == "single" and ranks > 1:
        raise UserError(f"{gear.path}: trains on one device, but {ranks} ranks run; use accelerate_configs/ddp.yaml")
    if gear.offload == "nvme":
        _check_disk(gear)
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


def _check_disk(gear: Gear) -> None:
    """Raise UserError unless DeepSpeed can move tensors to the disk that the gear names."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            f"{gear.path}: DeepSpeed's disk operations need libaio and a compiler: apt-get install libaio-dev g++ "
            "ninja-build (they are built once, for minutes), or use accelerate_configs/zero3_offload.yaml"
        )
    assert gear.zero_json is not None
    for part in ("offload_optimizer", "offload_param"):
        path = gear.zero_json["zero_optimization"].get(part, {}).get("nvme_path")
        if path is not None and not os.access(
            next(p for p in [Path(path), *Path(path).parents] if p.exists()), os.W_OK
        ):
            raise UserError(f"{gear.zero_path}: {part}.nvme_path: {path} cannot be written; name a local disk")


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


def seats() -> list[Seat]:
    """Host and device of each rank, on every rank."""
    device = PartialState().device
    named = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
    return gather(Seat(socket.gethostname(), named))


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
    options["parallelism_config"] = _degrees(gear)
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
    return CPUOffloadPolicy(pin_memory=not is_rehearsal()) if gear.offload else OffloadPolicy()


def _degrees(gear: Gear) -> Any:
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


def loading(gear: Gear) -> dict[str, Any]:
    """What `from_pretrained` must be told: under tensor parallelism each rank reads only its part of each matrix."""
    if gear.degree("tp") == 1:
        return {}
    from transformers.distributed import DistributedConfig

    class TensorParallel(DistributedConfig):
        """transformers lays out the mesh of all ranks, and cuts over tp alone: FSDP comes after adapters, here."""

        dp_size = 1

    if gear.engine == "tp":
        _sum_new_gradients_alone()
    tp = gear.degree("tp")
    return {"distributed_config": TensorParallel(tp_size=tp, fsdp_size=gear.num_processes // tp)}


def _sum_new_gradients_alone() -> None:
    """Mend how transformers 5.23 adds the gradients of norms of single heads (Qwen3) over the ranks that share heads.

    It adds what has accumulated, with each micro batch once more: the first one's is then counted many times.
    """
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    def install_forward(self: Any, module: Any, mesh: Any) -> Any:
        usual, hooked = module.forward, set()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient, group=mesh.get_group())
            return gradient

        def forward(*inputs: Any, **options: Any) -> Any:
            for parameter in module.parameters(recurse=False):  # loading puts other ones in place of the first
                if torch.is_grad_enabled() and parameter.requires_grad and parameter not in hooked:
                    hooked.add(parameter)
                    parameter.register_hook(summed)
            return usual(*inputs, **options)

        module.forward = forward
        return module

    ReplicatedWithGradAllReduce.install_forward = install_forward


def prepare(
    gear: Gear, accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Model and optimizer as the engine runs them."""
    if gear.degree("sp") > 1:
        sequences.isolate_documents(model)
        accelerator.parallelism_config.sp_handler.sp_attn_implementation = model.config._attn_implementation
    if gear.engine == "pp":
        return _pipeline(gear, accelerator, model), accelerator.prepare(optimizer)
    if gear.degree("tp") > 1:
        _mend_parts(model)
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
        _one_mesh_a_group(bare_optimizer(optimizer))
    if type(bare_optimizer(optimizer)).__module__.startswith("bitsandbytes"):
        step_on_local_shards(bare_optimizer(optimizer))
    return model, optimizer


def _mend_parts(model: torch.nn.Module) -> None:
    """What transformers and PEFT leave amiss of matrices that are cut over ranks."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and isinstance(module.weight, DTensor):
            # The whole layer's, which transformers' hooks ask for; PEFT 0.21 notes an adapter's part.
            module.out_features, module.in_features = module.weight.shape
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > local.nbytes:  # on a CPU a view keeps the whole in memory
                parameter._local_tensor = local.clone()


def part(gear: Gear) -> Part | None:
    """Which stage of a pipeline this rank has, None without one."""
    count = gear.degree("pp")
    return Part(PartialState().process_index // gear.data_parallel, count) if count > 1 else None


def _pipeline(gear: Gear, accelerator: Accelerator, model: torch.nn.Module) -> Pipeline:
    mesh = torch.distributed.device_mesh.init_device_mesh(
        accelerator.device.type, (gear.degree("pp"), gear.data_parallel), mesh_dim_names=("pp", "dp")
    )
    compute = torch.bfloat16 if precision(gear) == "bf16" else torch.float32
    # As DDP's, without its wrapper: on its device, and in autocast.
    placed = accelerator.prepare_model(model, evaluation_mode=True)
    return Pipeline(placed, mesh["pp"].get_group(), mesh["dp"].get_group(), gear.schedule, compute)


def bare(accelerator: Accelerator, model: Any) -> Any:
    """The model as it was before `prepare`."""
    return model.module if isinstance(model, Pipeline) else accelerator.unwrap_model(model)


def settle(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Let DDP order its buckets before step 1, by a backward pass of a batch without targets.

    The first pass decides it, and with it which rank's gradients are added first: from 3 ranks on a resumed run would
    otherwise differ in the last bit from one that was never interrupted.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        inputs = {name: tensor.to(accelerator.device) for name, tensor in batch.items() if name != "document_ids"}
        model(**inputs).backward()
        model.zero_grad()


def _one_mesh_a_group(optimizer: torch.optim.Optimizer) -> None:
    """Part the optimizer's groups by the mesh of their tensors, which one multi-tensor operation cannot mix."""
    groups = []
    for group in optimizer.param_groups:
        by_mesh: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [group | {"params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = groups


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
        norm = _norm_of_parts(gradients)
        if max_norm and norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm
    return float(accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf))


def _norm_of_parts(gradients: list[torch.Tensor]) -> float:
    """The norm of gradients of which some are cut over one mesh, some over another and some not at all."""
    sums: dict[tuple[Any, ...], torch.Tensor] = {}  # of squares, by the groups of ranks over which they must be added
    for gradient in gradients:
        local = gradient
        groups: tuple[Any, ...] = ()
        if isinstance(gradient, DTensor):
            local, mesh = gradient.to_local(), gradient.device_mesh
            cut = [i for i, placement in enumerate(gradient.placements) if getattr(placement, "dim", None) is not None]
            groups = tuple(mesh.get_group(i) for i in cut)
        sums[groups] = sums.get(groups, 0) + local.float().square().sum()
    for groups, squares in sums.items():
        for group in groups:
            torch.distributed.all_reduce(squares, group=group)
    return float(sum(sums.values())) ** 0.5


def draw_from(*numbers: int) -> None:
    """Let random numbers follow from these alone: with (seed, step, rank) a resumed run draws what it would have."""
    set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
