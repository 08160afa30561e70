"""This machine among those of a job: where its launcher meets the others, which rank sits where. No torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import psutil

from gearbox.errors import UserError

# accelerate's flags, and the names in the environment that stand for them: torchrun's, which Kubeflow Trainer sets and
# our Slurm script too, then what Slurm and an indexed job of Kubernetes call a machine's number.
NODE_FLAGS = {
    "num_machines": ("PET_NNODES",),
    "machine_rank": ("PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"),
    "main_process_ip": ("PET_MASTER_ADDR",),
    "main_process_port": ("PET_MASTER_PORT",),
}
RANKS_PER_NODE = "PET_NPROC_PER_NODE"

# What says in each machine's environment how many of them the job has: Slurm's step, torchrun's own name, which
# Kubeflow Trainer sets too.
NUM_NODES_VARIABLES = ("SLURM_STEP_NUM_NODES", "PET_NNODES")


@dataclass(frozen=True)
class Node:
    """One of several machines, each with a launcher of its own."""

    num_machines: int
    rank: int
    address: str
    """Of the first machine: a name or an IP address by which all reach it."""
    port: int

    def flags(self, join_seconds: float) -> list[str]:
        """What accelerate's launcher is told. The rendezvous is kept by the first machine."""
        conf = f"is_host={str(self.rank == 0).lower()},join_timeout={int(join_seconds)}"
        return [
            f"--num_machines={self.num_machines}", f"--machine_rank={self.rank}", "--rdzv_backend=c10d",
            f"--main_process_ip={self.address}", f"--main_process_port={self.port}", f"--rdzv_conf={conf}",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """What torch would else guess from this machine's hostname, which may lead to its own loopback.

        c10d numbers machines by the order of their addresses, and uses that of the first one alone: so the others'
        need only be in order.
        """
        found = {"PET_LOCAL_ADDR": self.address if self.rank == 0 else f"~{self.rank:06d}"}
        if (interface := self._interface()) is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            found["GLOO_SOCKET_IFNAME"] = interface
        return found

    def is_reachable(self) -> bool:
        """Whether the first machine listens."""
        if self.rank == 0:
            return True
        with suppress(OSError), socket.create_connection((self.address, self.port), timeout=5):
            return True
        return False

    def _interface(self) -> str | None:
        """The network interface through which the first machine is reached."""
        try:
            family, kind, protocol, _, there = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(there)  # sends nothing
                here = probe.getsockname()[0]
        except OSError:
            return None
        found = psutil.net_if_addrs().items()
        return next((name for name, all_of in found if any(one.address == here for one in all_of)), None)


def node_from_flags(flags: dict[str, str]) -> tuple[dict[str, str], Node | None]:
    """The launcher's flags with the number of ranks, and where this machine stands if it is one of several.

    What the flags leave out is taken from the environment. Raises UserError where it is not enough.
    """
    found = {flag: next((os.environ[n] for n in names if n in os.environ), None) for flag, names in NODE_FLAGS.items()}
    found |= {flag: flags[flag] for flag in NODE_FLAGS if flag in flags}
    rest = {flag: value for flag, value in flags.items() if flag not in NODE_FLAGS}
    num_machines = _number(found["num_machines"] or "1", "num_machines", least=1)
    if "num_processes" not in rest and RANKS_PER_NODE in os.environ:
        ranks = _number(os.environ[RANKS_PER_NODE], RANKS_PER_NODE, least=1, names=())
        rest["num_processes"] = str(ranks * num_machines)
    if num_machines == 1:
        return rest | ({"main_process_port": flags["main_process_port"]} if "main_process_port" in flags else {}), None
    for flag in NODE_FLAGS:
        if found[flag] is None:
            raise UserError(
                f"--num_machines={num_machines}: give --{flag}=... too, or set {NODE_FLAGS[flag][0]}; see docs/cluster.md"
            )
    rank = _number(found["machine_rank"], "machine_rank")
    if rank >= num_machines:
        raise UserError(f"--machine_rank={rank}: {num_machines} machines are numbered 0 to {num_machines - 1}")
    port = _number(found["main_process_port"], "main_process_port", least=1)
    return rest, Node(num_machines, rank, str(found["main_process_ip"]), port)


def _number(value: str | None, flag: str, least: int = 0, names: tuple[str, ...] | None = None) -> int:
    if value is None or not value.isdigit() or int(value) < least:
        known = NODE_FLAGS[flag] if names is None else names
        told = "".join(f" ({name})" for name in known[:1])
        elastic = "; torchrun --nnodes=1:4 is elastic, this is not" if value and ":" in value else ""
        raise UserError(f"{flag}{told}: must be a whole number from {least}, found {value!r}{elastic}")
    return int(value)


@dataclass(frozen=True)
class RankDevice:
    """Where a rank runs."""

    host: str
    device: str
    """Such as `cuda:1 NVIDIA H100 80GB HBM3`, or `cpu`."""


def format_rank_table(seats: list[RankDevice]) -> list[str]:
    """Rank, host and device of all ranks: a line for each run of ranks with the same host and kind of device."""
    lines = []
    for (host, kind), found in groupby(enumerate(seats), key=lambda seat: (seat[1].host, _kind(seat[1].device))):
        ranks, placed = zip(*found, strict=True)
        devices = [seat.device.removesuffix(kind).strip() for seat in placed]
        named = f"{_span(list(map(str, ranks)))}  {host}  {_span(devices)} {kind}".rstrip()
        lines.append(f"rank {named}")
    return lines


def _kind(device: str) -> str:
    return device.partition(" ")[2]


def _span(names: list[str]) -> str:
    """0-3 of 0, 1, 2, 3; cuda:0-3 of cuda:0, ..., cuda:3; cpu of cpu, cpu."""
    first, last = names[0], names[-1]
    return first if first == last else f"{first}-{last.rpartition(':')[2]}"


def check_single_world(seats: list[RankDevice]) -> None:
    """Raise UserError where the machines of a job have not met, and each would train alone."""
    hosts = {seat.host for seat in seats}
    met = max(len(hosts), int(os.environ.get("GROUP_WORLD_SIZE", "1")))  # launchers in this world; two can share a host
    for name in NUM_NODES_VARIABLES:
        asked = os.environ.get(name, "1").partition(":")[0]  # of 1:4 the fewest
        if asked.isdigit() and int(asked) > met:
            raise UserError(
                f"{name}={asked}, but the {len(seats)} ranks of this world are all on {', '.join(sorted(hosts))}: each "
                f"machine would train alone; start all with --num_machines={asked}, --machine_rank, --main_process_ip "
                "and --main_process_port, as cluster/slurm/train.sbatch does"
            )


def num_idle_nodes(seats: list[RankDevice]) -> int:
    """Machines of this Slurm job without a rank."""
    return max(0, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) - len({seat.host for seat in seats}))
