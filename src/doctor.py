"""Is this machine, or this cluster, ready to train? Green, yellow and red lines, and what to do about each.

accelerate launch --config_file accelerate_configs/GEAR.yaml src/doctor.py [--json] [--timeout SECONDS]
python src/doctor.py --machine

Exit codes: 0 nothing is red; 1 something is; 2 a mistake of yours.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from gearbox import console
from gearbox.config.gear import Gear
from gearbox.config.recipe import Run
from gearbox.doctor import finding, host
from gearbox.doctor.finding import Finding, as_json, lines, worst
from gearbox.errors import UserError
from gearbox.launch import cli, outcome, topology
from gearbox.launch.launched_gear import find_gear
from gearbox.processes import launcher_process

USAGE = "python src/doctor.py [--machine] [--json] [--timeout SECONDS]"
RUNS = Path(Run().dir)
FIRST = {"address", "driver", "gpus"}  # what makes every collective fail, in ways that say less
# Of the median. What a CPU does is as fast as its other work lets it be, and its ranks' links are its own memory.
SLOW_LINK = {"cuda": (0.5, 0.5), "cpu": (0.0, 0.2)}  # within machines, between machines
SLOW_RANK = {"cuda": 0.7, "cpu": 0.5}


def main(arguments: list[str], gear: Gear | None = None) -> int:
    began = time.monotonic()
    parser = cli.Parser(usage=USAGE, description="Is this machine, or this cluster, ready?", allow_abbrev=False)
    parser.add_argument("--machine", action="store_true", help="this machine alone, in a few seconds, without ranks")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="SECONDS", help="to wait for a rank (default: %(default)g)"
    )
    options = parser.parse_args(arguments)
    report = Report(options.json, began)
    if options.machine:
        report.start(speaks=True)
        report.add(*host.inspect_host(None, RUNS, num_local_ranks=1, world_size=1, num_machines=1))
        return report.end()
    gear = gear or find_gear()

    # torch is imported from here on; what C++ has to say of lost ranks is said here in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    from gearbox.doctor import rank_registry

    roll = rank_registry.RankRegistry(options.timeout, report.lost)
    report.start(speaks=roll.rank == 0)
    try:
        # Every rank comes to the same findings, so that any of them can speak should rank 0 be gone.
        num_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        looked = None
        if roll.local_rank == 0:
            found = host.inspect_host(gear, RUNS, roll.local_size, roll.size, num_machines)
            looked = {"findings": as_json(found), "versions": host.installed()}
        roll.check_in()
        device = take_device(roll.local_rank)
        seats = [
            topology.RankDevice(*seat) for seat in roll.gather("the rank table", [roll.hosts[roll.rank], named(device)])
        ]
        topology.check_single_world(seats)
        hosts, devices = [seat.host for seat in seats], [seat.device for seat in seats]
        report.ranks(gear, seats)
        report.machines(
            {hosts[rank]: one for rank, one in enumerate(roll.gather("what the machines have", looked)) if one}
        )
        if num_machines > 1:
            report.add(one_folder(roll))

        blocked = {finding.name for finding in report.found if finding.colour == "red"} & FIRST
        if blocked:
            report.print(f"{'':<19} the ranks are not tried before this is mended: {', '.join(sorted(blocked))}")
        else:
            try_ranks(roll, report, device, hosts, devices, options.timeout)
    except UserError:  # which all ranks have found
        roll.leave()
        raise
    except RuntimeError as error:  # of a collective, or of the store
        roll.fail(error)
    roll.leave()
    return report.end(roll.local_rank)


def try_ranks(roll: Any, report: Report, device: Any, hosts: list[str], devices: list[str], timeout: float) -> None:
    """What the ranks send each other, and what each of them computes."""
    import torch.distributed as dist

    from gearbox.doctor import comm_benchmark, comm_verdicts, rank_registry

    is_gpu = device.type == "cuda"
    if roll.size > 1:
        roll.enter_stage("the process group")
        dist.init_process_group(
            "nccl" if is_gpu else "gloo", store=dist.PrefixStore("group", roll.store), rank=roll.rank,
            world_size=roll.size, timeout=timedelta(seconds=timeout + rank_registry.GRACE_SECONDS),
            device_id=device if is_gpu else None,
        )  # fmt: skip
        sent = roll.gather("the collectives' figures", comm_benchmark.measure_collectives(device, roll.enter_stage))
        report.add(comm_verdicts.judge_values(sent))
        report.bandwidths(comm_verdicts.bandwidths(sent))
        parts = roll.gather("the links' figures", comm_benchmark.measure_links(hosts, device, roll.enter_stage))
        measured = {pair_of(name): figures for part in parts for name, figures in part.items()}
        report.add(*comm_verdicts.judge_links(measured, hosts, SLOW_LINK[device.type]))
        report.links(measured, len(hosts))
        roll.enter_stage("gradients")
        report.add(*in_step(device, roll.rank))
    turns = max(hosts.count(host) for host in hosts)
    speeds = roll.gather("the speeds", comm_benchmark.measure_speed(device, roll.local_rank, turns, roll.enter_stage))
    report.add(comm_verdicts.judge_speeds(speeds, hosts, devices, SLOW_RANK[device.type]))


def take_device(local_rank: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def named(device: Any) -> str:
    """cuda:1 NVIDIA H100 80GB HBM3, or cpu."""
    import torch

    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def pair_of(name: str) -> tuple[int, int]:
    a, b = name.split("-")
    return int(a), int(b)


def one_folder(roll: Any) -> Finding:
    """Whether all machines see the same folder of runs, as their checkpoints need."""
    mark = host.leave_mark(RUNS, f".doctor-{uuid.uuid4().hex[:8]}") if roll.rank == 0 else None
    name = roll.gather("a mark in the folder", mark.name if mark else None)[0]
    sees = roll.gather("the folder's mark", name is None or roll.local_rank != 0 or host.sees_mark(RUNS, name))
    if mark is not None:
        mark.unlink(missing_ok=True)
    blind = list(dict.fromkeys(roll.hosts[rank] for rank, seen in enumerate(sees) if not seen))
    if name is None or not blind:
        return Finding("green", "folder", f"{RUNS} is one folder on all machines" if name else f"{RUNS}: see disk")
    text = f"{RUNS} on {finding.named(blind)} is not the folder that it is on {roll.hosts[0]}"
    return Finding("red", "folder", text, "mount one folder on all machines, and name it in run.dir")


def in_step(device: Any, rank: int) -> list[Finding]:
    """A small model: the same on all ranks, one backward pass with other data on each, gradients averaged."""
    from gearbox.doctor import replica_sync

    model = replica_sync.small_model().to(device)
    other = replica_sync.check_parameters(model)
    replica_sync.small_loss(model, seed=rank).backward()
    checked = replica_sync.check_gradients(model.named_parameters())
    wrong = [f"{gradient.name}: {gradient.problem}" for gradient in checked if gradient.problem]
    where = "the ranks' own arithmetic or their all_reduce is at fault: run them through dcgmi diag -r 3"
    told = []
    if other:
        told.append(Finding("red", "parameters", f"the same seed gave other values: {other[0]}", where))
    if wrong:
        told.append(Finding("red", "gradients", "; ".join(wrong), where))
    else:
        norms = ", ".join(f"{norm:.3g}" for norm in checked[0].before[:4])
        averaged = (
            f"{checked[0].name} {norms}{', ...' if len(checked[0].before) > 4 else ''} -> {checked[0].after[0]:.3g}"
        )
        told.append(Finding("green", "gradients", f"equal on all ranks once averaged ({averaged})"))
    return told


class Report:
    """What is shown as it is found, or given as JSON at the end."""

    def __init__(self, as_json: bool, began: float) -> None:
        self.as_json, self.began = as_json, began
        self.found: list[Finding] = []
        self.facts: dict[str, Any] = {}
        self.screen = console.make_console(speaks=False)
        self.speaks = False

    def start(self, speaks: bool) -> None:
        self.speaks = speaks
        self.screen = console.make_console(speaks and not self.as_json)

    def print(self, shown: Any) -> None:
        self.screen.print(shown)
        sys.stdout.flush()  # what takes long shows how far it is, in a log too

    def add(self, *found: Finding) -> None:
        self.found += found
        finding.show(self.screen, found)
        sys.stdout.flush()

    def ranks(self, gear: Gear, seats: list[topology.RankDevice]) -> None:
        self.facts |= {"gear": gear.name, "ranks": [{"host": seat.host, "device": seat.device} for seat in seats]}
        self.print(f"[bold]Gearbox doctor[/]  gear {gear.name}  {len(seats)} rank{'s' * (len(seats) > 1)}")
        for line in topology.format_rank_table(seats):
            self.print(escape(line))

    def machines(self, looked: dict[str, dict[str, Any]]) -> None:
        self.facts["machines"] = looked
        told = [(host, [Finding(**{**f, "hosts": ()}) for f in one["findings"]]) for host, one in looked.items()]
        differing = finding.differing({host: one["versions"] for host, one in looked.items()})
        self.add(*([differing] if differing else []), *finding.merged(told))

    def bandwidths(self, rates: dict[str, list[tuple[int, float, float]]]) -> None:
        self.facts["bandwidths"] = {
            name: [{"bytes": size, "seconds": seconds, "bytes_per_second": rate} for size, seconds, rate in row]
            for name, row in rates.items()
        }
        sizes = [console.format_bytes_short(size) for size, _, _ in next(iter(rates.values()))]
        table = Table(f"{'':<19} GB/s, by message", *sizes, box=None, padding=(0, 1, 0, 0), header_style="none")
        for name, row in rates.items():
            table.add_row(f"{'':<19} {name}", *(console.format_figure(rate / 1e9) for _, _, rate in row))
        self.print(table)

    def links(self, measured: dict[tuple[int, int], tuple[float, float]], size: int) -> None:
        self.facts["links"] = [
            {"ranks": [*pair], "seconds": delay, "bytes_per_second": rate} for pair, (delay, rate) in measured.items()
        ]
        if not 2 < size <= 16:  # one link is told in its line; a table of more ranks fits no screen
            return
        heads = [f"{'':<19} us \\ GB/s", *map(str, range(size))]
        table = Table(*heads, box=None, padding=(0, 1, 0, 0), header_style="none")
        for a in range(size):
            row = ["-"] * size
            for b in {*range(size)} - {a}:
                delay, rate = measured[min(a, b), max(a, b)]
                row[b] = console.format_figure(rate / 1e9 if b > a else delay * 1e6)
            table.add_row(f"{'':<19} rank {a}", *row)
        self.print(table)

    def lost(self, line: str, speaks: bool) -> None:
        """Called by the roll call before this rank ends."""
        advice = "look at that rank's own output and machine (dmesg: out of memory, Xid); then run this again"
        self.start(speaks)
        self.add(Finding("red", "ranks", line, advice))
        self.end(0, first_of_machine=True)

    def end(self, local_rank: int = 0, first_of_machine: bool | None = None) -> int:
        """The last line, the outcome for src/launch.py, and the exit code: that of a machine's first rank counts."""
        colour = worst(self.found)
        red = [line for finding in self.found if finding.colour == "red" for line in lines(finding)]
        seconds = time.monotonic() - self.began
        if self.speaks and self.as_json:
            told = {"verdict": colour, "seconds": seconds, **self.facts, "findings": as_json(self.found)}
            print(json.dumps(told), flush=True)
        said = {"green": "ready", "yellow": "ready, but look at the yellow lines", "red": "not ready"}[colour]
        self.print(f"[bold {colour}]{said}[/]  {seconds:.1f} s")
        if colour != "red":
            return 0
        if local_rank == 0:
            outcome.write_outcome("failed", "\n".join(red))
            launcher = launcher_process()
            if self.speaks and not self.as_json and launcher is not None and outcome.OUTCOME_FILE not in os.environ:
                cli.print_after(launcher, "\n".join(red))
        return 1 if local_rank == 0 else 0


if __name__ == "__main__":
    cli.run(main)
