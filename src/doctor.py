"""Check whether this machine or cluster is ready to train. Print green, yellow and red lines, each with advice.

Usage: accelerate launch --config_file accelerate_configs/GEAR.yaml src/doctor.py [--json] [--timeout SECONDS]
       python src/doctor.py --machine [--json]

    --machine          check only this machine, in a few seconds, without ranks
    --json             print one JSON object instead of lines
    --timeout SECONDS  time to wait for a rank (default: 60)

Exit codes: 0 no line is red; 1 some line is red; 2 a user error. Under `accelerate launch`, any
code but 0 means that a line is red, or that no check was possible.

Examples:
    python src/doctor.py --machine
    accelerate launch --config_file accelerate_configs/fsdp.yaml src/doctor.py
"""

from __future__ import annotations

import gearbox.launch.lifeline  # noqa: F401  isort: skip  first, so that this process ends with its launcher

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from gearbox.config.gear import Gear
from gearbox.config.recipe import Run
from gearbox.doctor import finding, gpus, host
from gearbox.doctor.report import DoctorReport
from gearbox.errors import UserError
from gearbox.launch import cli, topology
from gearbox.launch.environment import LaunchEnvironment
from gearbox.launch.launched_gear import find_gear

if TYPE_CHECKING:
    import torch

    from gearbox.doctor.rank_registry import RankRegistry

RUNS = Path(Run().dir)
BLOCKING = {"address", "driver", "gpus"}  # while one of these is red, every collective fails with less helpful errors


def main(arguments: list[str], gear: Gear | None = None) -> int:
    """Inspect this machine or, under a launcher, all machines and ranks. Return the exit code."""
    began = time.monotonic()
    options = parse(arguments)
    report = DoctorReport(options.json, began)
    if options.machine:
        report.start(speaks=True)
        report.add(*host.inspect_host(None, RUNS, num_local_ranks=1, world_size=1, num_machines=1))
        return report.end()
    gear = gear or find_gear()

    # torch is imported from here on. Its C++ log would print far more about lost ranks than our one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    from gearbox.doctor.rank_registry import RankRegistry

    registry = RankRegistry(options.timeout, report.ranks_lost)
    report.start(speaks=registry.rank == 0)
    try:
        # Every rank computes the same findings, so that any rank can print them if rank 0 dies.
        device, rank_devices = check_machines(registry, report, gear)
        blocked = {found.name for found in report.findings if found.colour == "red"} & BLOCKING
        if blocked:
            report.print(f"{'':<19} rank checks skipped; fix first: {', '.join(sorted(blocked))}")
        else:
            check_ranks(registry, report, device, rank_devices)
    except UserError:  # raised on all ranks
        registry.leave()
        raise
    except RuntimeError as error:  # from a collective or the store
        registry.fail(error)
    registry.leave()
    return report.end(registry.local_rank)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return machine, json and timeout. Raise UserError for any other argument."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--machine", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--timeout", type=float, default=60)
    return parser.parse_args(arguments)


def check_machines(
    registry: RankRegistry, report: DoctorReport, gear: Gear
) -> tuple[torch.device, list[topology.RankDevice]]:
    """Report each machine's state and each rank's device. Return this rank's device, and all ranks' devices."""
    num_machines = LaunchEnvironment.read().num_launchers
    inspected = None
    if registry.local_rank == 0:
        found = host.inspect_host(gear, RUNS, registry.local_size, registry.size, num_machines)
        inspected = {"findings": finding.as_json(found), "versions": host.installed()}
    registry.check_in()
    device = gpus.take_device(registry.local_rank)
    names = registry.gather("the rank table", gpus.device_name(device))
    rank_devices = [topology.RankDevice(registry.hosts[rank], name) for rank, name in enumerate(names)]
    topology.check_single_world(rank_devices)
    report.add_ranks(gear, rank_devices)
    machines = registry.gather("what the machines have", inspected)
    report.add_machines({registry.hosts[rank]: machine for rank, machine in enumerate(machines) if machine})
    if num_machines > 1:
        report.add(host.check_shared_folder(registry, RUNS))
    return device, rank_devices


def check_ranks(
    registry: RankRegistry, report: DoctorReport, device: torch.device, rank_devices: list[topology.RankDevice]
) -> None:
    """Check communication between the ranks, and measure how fast each rank computes."""
    from gearbox.doctor import comm_benchmark, comm_verdicts, replica_sync

    hosts, devices = [one.host for one in rank_devices], [one.device for one in rank_devices]
    enter_stage = registry.enter_stage
    if registry.size > 1:
        registry.join_process_group(device)
        collectives = registry.gather(
            "the collectives' figures", comm_benchmark.measure_collectives(device, enter_stage)
        )
        report.add(comm_verdicts.judge_values(collectives))
        report.add_bandwidths(comm_verdicts.bandwidths(collectives))
        parts = registry.gather("the links' figures", comm_benchmark.measure_links(hosts, device, enter_stage))
        links = comm_benchmark.join_links(parts)
        report.add(*comm_verdicts.judge_links(links, hosts, comm_verdicts.SLOW_LINK[device.type]))
        report.add_links(links, registry.size)
        enter_stage("gradients")
        report.add(*replica_sync.check_small_model(device, registry.rank))
    num_turns = max(hosts.count(name) for name in hosts)
    speed = comm_benchmark.measure_speed(device, registry.local_rank, num_turns, enter_stage)
    rates = registry.gather("the speeds", speed)
    report.add(comm_verdicts.judge_speeds(rates, hosts, devices, comm_verdicts.SLOW_RANK[device.type]))


if __name__ == "__main__":
    cli.run(main)
