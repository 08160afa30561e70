"""Join the process group, exchange small objects between ranks, and limit how long collectives may take."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from gearbox.config.gear import Gear
from gearbox.console import make_console
from gearbox.console import report as report_line
from gearbox.errors import UserError, one_line
from gearbox.launch import outcome
from gearbox.launch.environment import LaunchEnvironment
from gearbox.launch.topology import RankDevice
from gearbox.world import World

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

T = TypeVar("T")

LOADING_TIMEOUT = timedelta(hours=2)  # for joining, and for each collective until the first step is done
WAITING_SECONDS = 60.0  # between lines about ranks that have not joined, which may still read their data
FIRST_SECONDS = 180.0  # for the first all-reduce, which connects the ranks; it takes seconds
LOOKUP_SECONDS = 10.0
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def runs_on_cpu() -> bool:
    """Return True if torch sees no GPU."""
    return not torch.cuda.is_available()


def is_first_rank() -> bool:
    """Return True on rank 0 of the run. It works before the process group exists."""
    return LaunchEnvironment.read().rank == 0


def is_first_rank_of_node() -> bool:
    """Return True on the first rank of each machine, which does the work needed once per machine."""
    return LaunchEnvironment.read().local_rank == 0


def num_idle_gpus() -> int:
    """Return the number of GPUs on this machine that no rank of this run uses."""
    return int(torch.cuda.device_count()) - LaunchEnvironment.read().local_size


def quiet_libraries() -> None:
    """Silence library warnings that repeat on every rank or step and that nobody can act on."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Accelerate triggers this warning with HSDP's mesh.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim")
    # Saving takes a slow path once.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def unwrap_without_deepspeed() -> None:
    """Let accelerate unwrap a model without importing DeepSpeed, if nothing else has imported it.

    It asks for DeepSpeed's wrapper wherever the package is installed: half a second and 425 modules on every rank.
    """
    accelerate.utils.other.is_deepspeed_available = lambda: "deepspeed" in sys.modules


def check_ranks(gear: Gear) -> None:
    """Raise UserError if the running ranks do not fit the gear or this machine."""
    launched = LaunchEnvironment.read()
    ranks, local_ranks = launched.size, launched.local_size
    if ranks != gear.num_processes:
        raise UserError(f"{gear.path}: needs {gear.num_processes} ranks, found {ranks}; pass --num_processes {ranks}")
    if gear.shares_rows and not runs_on_cpu():
        _check_kernel(gear)
    if gear.engine == "single" and ranks > 1:
        raise UserError(
            f"{gear.path}: trains on one device, but {ranks} ranks are running; use accelerate_configs/ddp.yaml"
        )
    if gear.offload == "nvme":
        _check_disk(gear)
    if not runs_on_cpu():
        if os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("false", "0"):  # from use_cpu or --cpu
            raise UserError(f"{gear.path}: use_cpu: this machine has GPUs; set CUDA_VISIBLE_DEVICES= (empty) instead")
        num_gpus = torch.cuda.device_count()
        if local_ranks > num_gpus:
            way_out = f"pass --num_processes {num_gpus}" if num_gpus > 1 else "use accelerate_configs/single.yaml"
            gpus = f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
            raise UserError(f"{gear.path}: {local_ranks} ranks on this machine, but {gpus}; {way_out}")
    elif NVIDIA_DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        raise UserError(
            f"{gear.path}: this machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU; check "
            "nvidia-smi and the torch build. To run on the CPU, set CUDA_VISIBLE_DEVICES= (empty)"
        )


def _check_kernel(gear: Gear) -> None:
    """Raise UserError unless GPUs that share rows can compute attention by document."""
    if gear.precision != "bf16":
        raise UserError(
            f"{gear.zero_path or gear.path}: the attention of GPUs that share rows needs bf16, found "
            f"{'fp32' if gear.precision == 'no' else gear.precision}; set bf16, or use accelerate_configs/fsdp.yaml"
        )
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        raise UserError(
            f"{gear.path}: the attention of GPUs that share rows needs compute capability 8.0 (A100 or newer), found "
            f"{capability[0]}.{capability[1]}; use accelerate_configs/fsdp.yaml"
        )


def _check_disk(gear: Gear) -> None:
    """Raise UserError unless DeepSpeed can offload tensors to the disk that the gear names."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            f"{gear.path}: DeepSpeed's disk operations need libaio and a compiler; run apt-get install libaio-dev g++ "
            "ninja-build (their one build takes minutes), or use accelerate_configs/zero3_offload.yaml"
        )
    assert gear.zero_json is not None
    for part in ("offload_optimizer", "offload_param"):
        path = gear.zero_json["zero_optimization"].get(part, {}).get("nvme_path")
        if path is not None and not os.access(
            next(p for p in [Path(path), *Path(path).parents] if p.exists()), os.W_OK
        ):
            raise UserError(f"{gear.zero_path}: {part}.nvme_path: {path} is not writable; use a local disk")


def join_process_group(gear: Gear) -> ProcessGroup:
    """Join the process group. Call it after `check_ranks`. Raise UserError if ranks do not join, or cannot connect."""
    quiet_libraries()
    unwrap_without_deepspeed()
    with _naming_missing_ranks():
        group = _init_process_group(gear)
    group.check_connections()
    return group


@contextmanager
def _naming_missing_ranks() -> Iterator[None]:
    """Print each minute which ranks have not joined, and name them in a UserError if joining fails.

    They are known where the launcher serves the store in which ranks meet, as torchrun's and Accelerate's do.
    """
    launched = LaunchEnvironment.read()
    if launched.size == 1 or not launched.agent_has_store:
        yield
        return
    server = TCPStore(launched.store_host, launched.store_port, is_master=False, wait_for_workers=False)
    store = PrefixStore(f"gearbox/{launched.restart_count}", server)
    store.set(str(launched.rank), "")
    has_joined = threading.Event()

    def missing() -> list[int]:
        return [rank for rank in range(launched.size) if not store.check([str(rank)])]

    def report() -> None:
        while not has_joined.wait(WAITING_SECONDS):
            late = missing()
            if late and launched.rank == min({*range(launched.size)} - {*late}):
                line = f"gearbox: waiting for {_named(late)} of {launched.size} to join; see the output of each machine"
                report_line(line)

    threading.Thread(target=report, name="waiting for ranks", daemon=True).start()
    try:
        yield
    except RuntimeError as error:  # includes torch's errors of the network and of the store
        late = missing()
        who = f"{_named(late)} did not join" if late else "the ranks cannot connect"
        raise _failure(f"{who} ({launched.size} ranks): {one_line(error, 200)}; {_advice()}") from None
    finally:
        has_joined.set()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _advice() -> str:
    variable = "GLOO_SOCKET_IFNAME" if runs_on_cpu() else "NCCL_SOCKET_IFNAME"
    return f"run src/doctor.py, and set {variable} to the network interface that connects the machines"


def _failure(text: str) -> Exception:
    """Return the error that ends this process: for good at the first start, but src/launch.py may restart it again."""
    return UserError(text) if outcome.requested_run_folder() is None else RuntimeError(text)


def _init_process_group(gear: Gear) -> ProcessGroup:
    if not runs_on_cpu():
        PartialState(timeout=LOADING_TIMEOUT)
        use_host_cores(gear)
        return ProcessGroup()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would choose it too, with a warning
    if gear.engine == "zero":
        # Unless it is initialized here, DeepSpeed finds one process instead of several.
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each rank compiles it for 100 s
        deepspeed.init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, verbose=False, timeout=LOADING_TIMEOUT
        )
    PartialState(cpu=True, timeout=LOADING_TIMEOUT)
    if gear.engine in ("fsdp", "zero"):
        # With MULTI_CPU, accelerate replaces FSDP and ZeRO by data parallelism. With MULTI_GPU it keeps them, and the
        # device stays the CPU. The attribute is private; no other code touches it.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return ProcessGroup()


def use_host_cores(gear: Gear) -> None:
    """Let the optimizer of an offload gear, which steps in host memory, use this rank's share of the machine's cores.

    The launchers give each rank one thread; any other number is the user's own. Without a GPU the forward pass would
    use the threads too, and its sums would differ from those of other gears in the last bits.
    """
    launched = LaunchEnvironment.read()
    if gear.offload is not None and launched.num_threads == 1 and sys.platform == "linux":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launched.local_size))


def fill_sizes_by_width(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Fill the sizes that a ZeRO JSON leaves to the model's width, as Accelerate does, for families that it refuses.

    Parameters up to the threshold, such as norms, stay gathered on every rank.
    """
    if not (width := getattr(model.config.get_text_config(), "hidden_size", 0)):
        return  # Accelerate then names the sizes that it cannot fill
    by_width = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": width * width * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }
    settings = accelerator.deepspeed_plugin.hf_ds_config.config["zero_optimization"]
    settings |= {key: size for key, size in by_width.items() if settings.get(key) == "auto"}


def _started(work: Callable[[], None]) -> threading.Thread:
    """Return a thread that does this work. It ends with the process, even if it hangs."""
    thread = threading.Thread(target=work, name="first all-reduce", daemon=True)
    thread.start()
    return thread


class ProcessGroup:
    """A `World` of all ranks in the process group."""

    def __init__(self) -> None:
        self._state = PartialState()
        self.rank: int = self._state.process_index
        self.size: int = self._state.num_processes
        self.device: torch.device = self._state.device
        self.screen = make_console(speaks=self.rank == 0)

    def gather(self, value: T) -> list[T]:
        """Return the objects of all ranks in rank order, on every rank."""
        from accelerate.utils import gather_object

        return list(gather_object([value])) if self.size > 1 else [value]

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum of each number over all ranks, on every rank."""
        counts = [int(number) for number in numbers]
        if self.size == 1:
            return counts
        counted = torch.tensor(counts, device=self.device)
        dist.all_reduce(counted)
        return [int(count) for count in counted.tolist()]

    def decide(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 and return its result on every rank, or raise its UserError on every rank."""
        result, refusal = None, None
        if self.rank == 0:
            try:
                result = work()
            except UserError as error:
                refusal = str(error)
        result, refusal = self.gather((result, refusal))[0]
        if refusal is not None:
            raise UserError(refusal)
        return cast(T, result)

    def check_connections(self) -> None:
        """Raise UserError, which names the ranks, unless a first all-reduce of all ranks ends within minutes.

        It runs in a thread: NCCL connects within the call, which never returns if a rank does not answer.
        """
        if self.size == 1:
            return
        store = PrefixStore("first all-reduce", cast(Any, dist.distributed_c10d._get_default_store()).clone())
        device = str(self.device) if self.device.type == "cuda" else self.device.type
        store.set(f"place {self.rank}", f"{socket.gethostname()}, {device}")
        failures: list[Exception] = []

        def reduce() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                store.set(f"began {self.rank}", "")
                work = dist.all_reduce(torch.ones(1, device=self.device), async_op=True)
                while not work.is_completed():  # `wait` would only queue on a GPU
                    time.sleep(0.005)
                work.wait()
            except Exception as error:
                failures.append(error)

        reducing = _started(reduce)
        reducing.join(FIRST_SECONDS)
        if reducing.is_alive() or failures:
            why = one_line(failures[0], 200) if failures else f"it has not ended within {FIRST_SECONDS:g} s"
            raise _failure(f"{self._who_did_not_begin(store)}: {why}; {_advice()}")

    def _who_did_not_begin(self, store: Store) -> str:
        """Return which ranks have not begun the first all-reduce, with their hosts and devices."""
        found: list[str] = []

        def look() -> None:
            ranks = range(self.size)
            missing = [rank for rank in ranks if not store.check([f"began {rank}"])]
            places = {rank: key for rank in ranks if store.check([key := f"place {rank}"])}
            named = [f"rank {rank} ({store.get(places[rank]).decode() if rank in places else '?'})" for rank in missing]
            hosts = sorted({store.get(key).decode().partition(",")[0] for key in places.values()})
            found.append(
                f"{', '.join(named)} did not begin the first all-reduce"
                if missing
                else f"all {self.size} ranks ({', '.join(hosts)}) began the first all-reduce"
            )

        _started(look).join(LOOKUP_SECONDS)
        return found[0] if found else "the store of rank 0 does not answer during the first all-reduce"

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._state.wait_for_everyone()

    def set_collective_timeout(self, seconds: float) -> None:
        """Make every later collective fail after this many seconds. Loading takes longer than a step."""
        if dist.is_initialized():
            from torch.distributed.distributed_c10d import _set_pg_timeout, _world

            for group in list(_world.pg_map):
                _set_pg_timeout(timedelta(seconds=seconds), group)

    def rank_devices(self) -> list[RankDevice]:
        """Return the host and the device of each rank, on every rank."""
        device = self.device
        named = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
        return self.gather(RankDevice(socket.gethostname(), named))

    def pids_of_node(self) -> dict[int, int]:
        """Return the process id of each rank on this machine."""
        found = self.gather((socket.gethostname(), os.getpid()))
        return {rank: pid for rank, (host, pid) in enumerate(found) if host == socket.gethostname()}


def check_same_data(world: World, key: str) -> None:
    """Raise UserError if ranks have read different data, such as different copies of a file on two machines."""
    keys = world.gather(key)
    if others := [str(rank) for rank, read in enumerate(keys) if read != keys[0]]:
        named = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
        raise UserError(f"data.path: {named} read different data from rank 0; every machine needs the same files")
