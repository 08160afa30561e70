"""This machine among those of a job: where its launcher meets the others, and which rank runs on which device."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import psutil

from gearbox.errors import UserError
from gearbox.launch.environment import LaunchEnvironment

# accelerate's flags, and the environment variables that replace them: torchrun's, which Kubeflow Trainer and our Slurm
# script set, then those in which Slurm and an indexed job of Kubernetes number machines.
NODE_FLAGS = {
    "num_machines": ("PET_NNODES",),
    "machine_rank": ("PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"),
    "main_process_ip": ("PET_MASTER_ADDR",),
    "main_process_port": ("PET_MASTER_PORT",),
}
RANKS_PER_NODE = "PET_NPROC_PER_NODE"

# The environment variables with the job's number of machines: Slurm's step's, and torchrun's, which Kubeflow Trainer
# sets too.
NUM_NODES_VARIABLES = ("SLURM_STEP_NUM_NODES", "PET_NNODES")


@dataclass(frozen=True)
class Node:
    """One of several machines, each with its own launcher."""

    num_machines: int
    rank: int
    address: str
    """The first machine's name or IP address, by which all machines reach it."""
    port: int

    def flags(self, join_seconds: float) -> list[str]:
        """Return the flags of accelerate's launcher. The first machine keeps the rendezvous."""
        conf = f"is_host={str(self.rank == 0).lower()},join_timeout={int(join_seconds)}"
        return [
            f"--num_machines={self.num_machines}", f"--machine_rank={self.rank}", "--rdzv_backend=c10d",
            f"--main_process_ip={self.address}", f"--main_process_port={self.port}", f"--rdzv_conf={conf}",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the variables that torch would guess from this machine's hostname, which may be its loopback.

        c10d numbers machines by the order of their addresses, but connects only to the first one's: so the others'
        need only be in order.
        """
        variables = {"PET_LOCAL_ADDR": self.address if self.rank == 0 else f"~{self.rank:06d}"}
        if (interface := self._interface()) is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables

    def is_reachable(self) -> bool:
        """Return whether the first machine listens."""
        if self.rank == 0:
            return True
        with suppress(OSError), socket.create_connection((self.address, self.port), timeout=5):
            return True
        return False

    def _interface(self) -> str | None:
        """Return the network interface through which this machine reaches the first one."""
        try:
            found = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, first_machine = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(first_machine)  # sends nothing
                own_address = probe.getsockname()[0]
        except OSError:
            return None
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address == own_address for address in addresses):
                return name
        return None


def node_from_flags(flags: dict[str, str]) -> tuple[dict[str, str], Node | None]:
    """Return the launcher's flags with the number of ranks, and this machine as a node if it is one of several.

    The environment completes the flags. Raise UserError where both are not enough.
    """
    given = {flag: next((os.environ[n] for n in names if n in os.environ), None) for flag, names in NODE_FLAGS.items()}
    given |= {flag: flags[flag] for flag in NODE_FLAGS if flag in flags}
    rest = {flag: value for flag, value in flags.items() if flag not in NODE_FLAGS}
    num_machines = _number(given["num_machines"] or "1", "num_machines", least=1)
    if "num_processes" not in rest and RANKS_PER_NODE in os.environ:
        ranks = _number(os.environ[RANKS_PER_NODE], RANKS_PER_NODE, least=1, names=())
        rest["num_processes"] = str(ranks * num_machines)
    if num_machines == 1:
        return rest | ({"main_process_port": flags["main_process_port"]} if "main_process_port" in flags else {}), None
    for flag in NODE_FLAGS:
        if given[flag] is None:
            raise UserError(
                f"--num_machines={num_machines}: give --{flag}=... too, or set {NODE_FLAGS[flag][0]}; "
                "see docs/cluster.md"
            )
    rank = _number(given["machine_rank"], "machine_rank")
    if rank >= num_machines:
        raise UserError(f"--machine_rank={rank}: {num_machines} machines are numbered 0 to {num_machines - 1}")
    port = _number(given["main_process_port"], "main_process_port", least=1)
    return rest, Node(num_machines, rank, str(given["main_process_ip"]), port)


def _number(value: str | None, flag: str, least: int = 0, names: tuple[str, ...] | None = None) -> int:
    if value is None or not value.isdigit() or int(value) < least:
        variables = NODE_FLAGS[flag] if names is None else names
        variable = "".join(f" ({name})" for name in variables[:1])
        elastic = "; torchrun --nnodes=1:4 is elastic, this is not" if value and ":" in value else ""
        raise UserError(f"{flag}{variable}: must be a whole number from {least}, found {value!r}{elastic}")
    return int(value)


@dataclass(frozen=True)
class RankDevice:
    """Where a rank runs."""

    host: str
    device: str
    """`cuda:1 NVIDIA H100 80GB HBM3`, for example, or `cpu`."""


def format_rank_table(rank_devices: list[RankDevice]) -> list[str]:
    """Return a line for each range of ranks with the same host and kind of device."""
    lines = []
    ranks = enumerate(rank_devices)
    for (host, kind), group in groupby(ranks, key=lambda rank: (rank[1].host, _kind(rank[1].device))):
        numbers, members = zip(*group, strict=True)
        devices = [member.device.removesuffix(kind).strip() for member in members]
        lines.append(f"rank {_span(list(map(str, numbers)))}  {host}  {_span(devices)} {kind}".rstrip())
    return lines


def _kind(device: str) -> str:
    return device.partition(" ")[2]


def _span(names: list[str]) -> str:
    """Shorten 0, 1, 2, 3 to 0-3; cuda:0, ..., cuda:3 to cuda:0-3; cpu, cpu to cpu."""
    first, last = names[0], names[-1]
    return first if first == last else f"{first}-{last.rpartition(':')[2]}"


def check_single_world(rank_devices: list[RankDevice]) -> None:
    """Raise UserError where the machines of a job have not met, and each would train alone."""
    hosts = {rank_device.host for rank_device in rank_devices}
    num_met = max(len(hosts), LaunchEnvironment.read().num_launchers)
    for name in NUM_NODES_VARIABLES:
        expected = os.environ.get(name, "1").partition(":")[0]  # 1:4 is a range, of 1 at least
        if expected.isdigit() and int(expected) > num_met:
            raise UserError(
                f"{name}={expected}, but the {len(rank_devices)} ranks of this world are all on "
                f"{', '.join(sorted(hosts))}: each machine would train alone; start all with "
                f"--num_machines={expected}, --machine_rank, --main_process_ip and --main_process_port, as "
                "cluster/slurm/train.sbatch does"
            )


def num_idle_nodes(rank_devices: list[RankDevice]) -> int:
    """Return the number of machines of this Slurm job without a rank."""
    num_hosts = len({rank_device.host for rank_device in rank_devices})
    return max(0, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) - num_hosts)
