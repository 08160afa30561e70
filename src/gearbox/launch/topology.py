"""Locate this machine in a job: where its launcher meets the others, and which rank runs on which device."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import psutil

from gearbox.errors import UserError
from gearbox.launch.environment import LaunchEnvironment

# Accelerate's flags, and the environment variables that replace them. torchrun's variables come first; Kubeflow Trainer
# and our Slurm script set them. Then come the machine numbers of Slurm and of an indexed Kubernetes job.
NODE_FLAGS = {
    "num_machines": ("PET_NNODES",),
    "machine_rank": ("PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"),
    "main_process_ip": ("PET_MASTER_ADDR",),
    "main_process_port": ("PET_MASTER_PORT",),
}
RANKS_PER_NODE = "PET_NPROC_PER_NODE"

# Variables with the job's number of machines: of a Slurm step, and torchrun's, which Kubeflow Trainer also sets.
NUM_NODES_VARIABLES = ("SLURM_STEP_NUM_NODES", "PET_NNODES")


@dataclass(frozen=True)
class Node:
    """A machine of a job on several machines, each with its own launcher."""

    num_machines: int
    rank: int
    address: str
    """Name or IP address of the first machine, reachable from all machines."""
    port: int

    def flags(self, join_seconds: float) -> list[str]:
        """Return the flags for Accelerate's launcher. The first machine hosts the rendezvous."""
        conf = f"is_host={str(self.rank == 0).lower()},join_timeout={int(join_seconds)}"
        return [
            f"--num_machines={self.num_machines}", f"--machine_rank={self.rank}", "--rdzv_backend=c10d",
            f"--main_process_ip={self.address}", f"--main_process_port={self.port}", f"--rdzv_conf={conf}",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the variables that torch would otherwise derive from the hostname, which may be a loopback address.

        c10d numbers machines in the order of their addresses, but connects only to the first address. The other
        addresses only need the right order.
        """
        variables = {"PET_LOCAL_ADDR": self.address if self.rank == 0 else f"~{self.rank:06d}"}
        if (interface := self._interface()) is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables

    def is_reachable(self) -> bool:
        """Return whether the first machine is listening."""
        if self.rank == 0:
            return True
        with suppress(OSError), socket.create_connection((self.address, self.port), timeout=5):
            return True
        return False

    def _interface(self) -> str | None:
        """Return the network interface that leads from this machine to the first one."""
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
    """Return the launcher's flags with the number of ranks, and the node if the job has several machines.

    The environment completes the flags. Raise UserError if something is still missing.
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
                f"--num_machines={num_machines}: also give --{flag}=..., or set {NODE_FLAGS[flag][0]}; "
                "see docs/cluster.md"
            )
    rank = _number(given["machine_rank"], "machine_rank")
    if rank >= num_machines:
        raise UserError(f"--machine_rank={rank}: must be 0 to {num_machines - 1} for {num_machines} machines")
    if names := [name for name in ("rdzv_backend", "rdzv_conf", "same_network") if name in rest]:
        raise UserError(f"--{names[0]}: this command sets how several machines meet; remove it")
    port = _number(given["main_process_port"], "main_process_port", least=1)
    return rest, Node(num_machines, rank, str(given["main_process_ip"]), port)


def _number(value: str | None, flag: str, least: int = 0, names: tuple[str, ...] | None = None) -> int:
    if value is None or not value.isdigit() or int(value) < least:
        variables = NODE_FLAGS[flag] if names is None else names
        variable = "".join(f" ({name})" for name in variables[:1])
        elastic = "; elastic ranges, as in torchrun --nnodes=1:4, are not supported" if value and ":" in value else ""
        raise UserError(f"{flag}{variable}: must be an integer >= {least}, found {value!r}{elastic}")
    return int(value)


@dataclass(frozen=True)
class RankDevice:
    """The host and device of a rank."""

    host: str
    device: str
    """Device and its name, such as `cuda:1 NVIDIA H100 80GB HBM3`, or `cpu`."""


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
    """Raise UserError if the machines of a job have not met, because each would train a separate model."""
    hosts = {rank_device.host for rank_device in rank_devices}
    num_met = max(len(hosts), LaunchEnvironment.read().num_launchers)
    for name in NUM_NODES_VARIABLES:
        expected = os.environ.get(name, "1").partition(":")[0]  # 1:4 is a range with a minimum of 1
        if expected.isdigit() and int(expected) > num_met:
            raise UserError(
                f"{name}={expected}, but the {len(rank_devices)} ranks of this job are all on "
                f"{', '.join(sorted(hosts))}: each machine would train a separate model. Start each with "
                f"--num_machines={expected}, --machine_rank, --main_process_ip and --main_process_port, as in "
                "cluster/slurm/train.sbatch"
            )


def num_idle_nodes(rank_devices: list[RankDevice]) -> int:
    """Return the number of machines in this Slurm job that have no rank."""
    num_hosts = len({rank_device.host for rank_device in rank_devices})
    return max(0, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) - num_hosts)
