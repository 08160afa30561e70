"""Read the variables that torch's launcher sets for a rank, which no other module reads. Set those of the allocator."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gearbox import ROOT

# Prefixes of the variables that the launchers of torch, Accelerate and Gearbox set.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC"),
    *("OMP_", "ACCELERATE", "FSDP_", "GEARBOX_"),
)
CALLER_RELOADS = "GEARBOX_CALLER_RELOADS"
"""Set by a process that starts many short runs and reloads their models itself."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of this process among its launcher's ranks. Without a launcher, the defaults apply."""

    rank: int = 0
    size: int = 1
    """Number of ranks in the run."""
    local_rank: int = 0
    local_size: int = 1
    """Number of ranks on this machine."""
    num_launchers: int = 1
    """Number of launchers that have met, one per machine. Two launchers can share a host."""
    restart_count: int = 0
    """Number of times that torch's launcher has restarted the ranks."""
    is_rank: bool = False
    """True if a launcher started this process, even as the only rank."""
    is_elastic: bool = False
    """True if that launcher is torch's elastic agent, as Accelerate's and torchrun's are."""
    is_launched: bool = False
    """True if torch's or Accelerate's launcher started this process. Accelerate sets no RANK for a single process."""
    store_host: str = "127.0.0.1"
    """Host of the store where the ranks meet."""
    store_port: int = 0
    """Port of that store; 0 if it is not a number. Kubernetes sets the same variable for a service named `master`."""
    agent_has_store: bool = False
    """True if the first machine's launcher already serves that store."""

    num_threads: int = 0
    """Number of CPU threads of this rank. Both launchers set 1 unless the user sets a number; 0 if nobody did."""

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Return the current environment of this process."""

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        port, threads = os.environ.get("MASTER_PORT", ""), os.environ.get("OMP_NUM_THREADS", "")
        return cls(
            rank=number("RANK", 0),
            size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_size=number("LOCAL_WORLD_SIZE", 1),
            num_launchers=number("GROUP_WORLD_SIZE", 1),
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
            is_rank="RANK" in os.environ,
            is_elastic="TORCHELASTIC_RUN_ID" in os.environ,
            is_launched="TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_DYNAMO_MODE" in os.environ,
            store_host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            store_port=int(port) if port.isdecimal() else 0,
            num_threads=int(threads) if threads.isdecimal() else 0,
            agent_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def of_first_rank(size: int) -> dict[str, str]:
    """Return the variables of rank 0 of `size` ranks on one machine."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def without_launcher() -> dict[str, str]:
    """Return this process's environment without a launcher's variables, for a child that is not a rank."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}


def python_path() -> str:
    """Return PYTHONPATH for a child: this package, and then what it is here, such as the modules of a cluster."""
    return os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


def variables_of_rank(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torch's launcher sets for a rank on one machine, whose store has this port; nothing for one rank."""
    if size == 1:
        return {}
    number, ranks = str(rank), str(size)
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return place | store | {"TORCHELASTIC_RESTART_COUNT": "0"}


def part_of_slurm_array() -> tuple[int, int] | None:
    """Return the place of this task in its Slurm array, from 0, and the number of its tasks. None outside an array."""
    names = ("ID", "MIN", "STEP", "COUNT")
    task, first, step, count = (os.environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in names)
    if not all(text.isdecimal() for text in (task, first, step, count)):
        return None
    return (int(task) - int(first)) // max(1, int(step)), int(count)


def let_segments_grow() -> None:
    """Let torch's allocator for GPUs grow its segments, which wastes less memory on rows of many lengths.

    Call this before torch is imported. A variable that the user has set decides instead.
    """
    if not any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
