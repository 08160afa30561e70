"""Report findings: lines and tables as they appear, or one JSON object at the end, and the exit code."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from gearbox import console
from gearbox.config.gear import Gear
from gearbox.doctor import finding
from gearbox.doctor.finding import Finding
from gearbox.launch import outcome
from gearbox.launch.topology import RankDevice, format_rank_table

INDENT = " " * 19  # width of a finding's colour and name


class DoctorReport:
    """A rank's report. All ranks collect findings, and only one prints them."""

    def __init__(self, as_json: bool, began: float) -> None:
        """Print nothing before `start`. `began` is the time.monotonic() at the start of the doctor."""
        self.as_json, self.began = as_json, began
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {}
        """Figures for the JSON object."""
        self.screen = console.make_console(speaks=False)
        self.speaks = False

    def start(self, speaks: bool) -> None:
        """Set whether this rank prints."""
        self.speaks = speaks
        self.screen = console.make_console(speaks and not self.as_json)

    def print(self, shown: RenderableType) -> None:
        """Print a line or a table."""
        self.screen.print(shown)
        sys.stdout.flush()  # a log shows progress too

    def add(self, *findings: Finding) -> None:
        """Record and print findings."""
        self.findings += findings
        finding.show(self.screen, findings)
        sys.stdout.flush()

    def add_ranks(self, gear: Gear, rank_devices: list[RankDevice]) -> None:
        """Print the gear, and the host and device of each rank."""
        self.facts |= {"gear": gear.name, "ranks": [{"host": one.host, "device": one.device} for one in rank_devices]}
        num_ranks = len(rank_devices)
        ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
        self.print(console.styled(("Gearbox doctor", "bold"), f"  gear {gear.name}  {ranks}"))
        for line in format_rank_table(rank_devices):
            self.print(line)

    def add_machines(self, inspected: dict[str, dict[str, Any]]) -> None:
        """Print the findings of each machine. `inspected` maps a host to its `findings` and `versions`, as JSON."""
        self.facts["machines"] = inspected
        by_host = [(host, finding.from_json(machine["findings"])) for host, machine in inspected.items()]
        differing = finding.differing({host: machine["versions"] for host, machine in inspected.items()})
        self.add(*([differing] if differing else []), *finding.merged(by_host))

    def add_bandwidths(self, rates: dict[str, list[tuple[int, float, float]]]) -> None:
        """Print a table of collectives. `rates` holds (bytes, seconds, bytes per second) for each message size."""
        self.facts["bandwidths"] = {
            name: [{"bytes": size, "seconds": seconds, "bytes_per_second": rate} for size, seconds, rate in row]
            for name, row in rates.items()
        }
        sizes = [console.format_bytes_short(size) for size, _, _ in next(iter(rates.values()))]
        table = _table(f"{INDENT} GB/s by message size", *sizes)
        for name, row in rates.items():
            table.add_row(f"{INDENT} {name}", *(console.format_figure(rate / 1e9) for _, _, rate in row))
        self.print(table)

    def add_links(self, links: dict[tuple[int, int], tuple[float, float]], num_ranks: int) -> None:
        """Print a table of links. `links` maps a pair of ranks to the delay in seconds and the bytes per second."""
        self.facts["links"] = [
            {"ranks": [*pair], "seconds": delay, "bytes_per_second": rate} for pair, (delay, rate) in links.items()
        ]
        if not 2 < num_ranks <= 16:  # the finding shows a single link; larger tables do not fit a screen
            return
        table = _table(f"{INDENT} us \\ GB/s", *map(str, range(num_ranks)))
        for a in range(num_ranks):
            row = ["-"] * num_ranks
            for b in {*range(num_ranks)} - {a}:
                delay, rate = links[min(a, b), max(a, b)]
                row[b] = console.format_figure(rate / 1e9 if b > a else delay * 1e6)
            table.add_row(f"{INDENT} rank {a}", *row)
        self.print(table)

    def ranks_lost(self, line: str, speaks: bool) -> None:
        """Report missing ranks. The registry calls this before it ends this rank."""
        advice = "check that rank's output and machine (dmesg: out of memory, Xid), then run the doctor again"
        self.start(speaks)
        self.add(Finding("red", "ranks", line, advice))
        self.end()

    def end(self, local_rank: int = 0) -> int:
        """Print the verdict or the JSON object, and return the exit code.

        The first rank of a machine writes the outcome for src/launch.py. The other ranks return 0.
        """
        colour, seconds = finding.worst(self.findings), time.monotonic() - self.began
        if self.speaks and self.as_json:
            findings = finding.as_json(self.findings)
            print(json.dumps({"verdict": colour, "seconds": seconds, **self.facts, "findings": findings}), flush=True)
        verdict = {"green": "ready", "yellow": "ready, with warnings (yellow lines)", "red": "not ready"}[colour]
        self.print(console.styled((verdict, f"bold {colour}"), f"  {seconds:.1f} s"))
        if colour != "red" or local_rank != 0:
            return 0
        red = "\n".join(line for found in self.findings if found.colour == "red" for line in finding.lines(found))
        outcome.write_outcome("failed", red)
        return 1


def _table(*heads: str) -> Table:
    return Table(*heads, box=None, padding=(0, 1, 0, 0), header_style="none")
