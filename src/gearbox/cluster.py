"""Which rank sits on which machine, and whether the machines of a job have met. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby

from gearbox.config import UserError

# What says in each machine's environment how many of them the job has: Slurm's step, torchrun's own name, which
# Kubeflow Trainer sets too.
NUM_MACHINES = ("SLURM_STEP_NUM_NODES", "PET_NNODES")


@dataclass(frozen=True)
class Seat:
    """Where a rank runs."""

    host: str
    device: str
    """Such as `cuda:1 NVIDIA H100 80GB HBM3`, or `cpu`."""


def table(seats: list[Seat]) -> list[str]:
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


def check_one_world(seats: list[Seat]) -> None:
    """Raise UserError where the machines of a job have not met, and each would train alone."""
    hosts = {seat.host for seat in seats}
    met = max(len(hosts), int(os.environ.get("GROUP_WORLD_SIZE", "1")))  # launchers in this world; two can share a host
    for name in NUM_MACHINES:
        asked = os.environ.get(name, "1").partition(":")[0]  # of 1:4 the fewest
        if asked.isdigit() and int(asked) > met:
            raise UserError(
                f"{name}={asked}, but the {len(seats)} ranks of this world are all on {', '.join(sorted(hosts))}: each "
                f"machine would train alone; start all with --num_machines={asked}, --machine_rank, --main_process_ip "
                "and --main_process_port, as cluster/slurm/train.sbatch does"
            )
