"""What the doctor found: a line each, green, yellow or red, with what to do. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

Colour = Literal["green", "yellow", "red"]


@dataclass(frozen=True)
class Finding:
    """Green: as it should be. Yellow: training runs, slower or not for long. Red: it fails, or trains otherwise."""

    colour: Colour
    name: str
    """One word; the same in docs/doctor.md."""
    text: str
    advice: str = ""
    """What to do. Empty where it is green."""
    hosts: tuple[str, ...] = ()
    """The machines it was found on; empty where it is about all of them."""


def merged(of_machines: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """The findings of several machines (host, what was found there): what is the same on all of them once.

    Of green lines with other figures the first stands for all: a screen has no room for a hundred machines.
    """
    names = dict.fromkeys(finding.name for _, findings in of_machines for finding in findings)
    lines = []
    for name in names:
        by_text: dict[tuple[str, ...], list[str]] = {}
        for host, findings in of_machines:
            for finding in findings:
                if finding.name == name:
                    by_text.setdefault((finding.colour, finding.text, finding.advice), []).append(host)
        greens = [hosts for (colour, *_), hosts in by_text.items() if colour == "green"]
        for (colour, text, advice), hosts in by_text.items():
            if colour == "green" and len(greens) > 1:
                if hosts is greens[0]:
                    text = f"{text} ({hosts[0]}; {sum(map(len, greens)) - 1} others are green too)"
                    lines.append(Finding("green", name, text))
                continue
            everywhere = len(hosts) == len(of_machines)
            lines.append(Finding(colour, name, text, advice, () if everywhere else tuple(hosts)))  # type: ignore[arg-type]
    return lines


def differing(versions: dict[str, dict[str, str]]) -> Finding | None:
    """Red where machines (host to package to version) do not have the same versions."""
    told = []
    for package in sorted({name for found in versions.values() for name in found}):
        by_version: dict[str, list[str]] = {}
        for host, found in versions.items():
            by_version.setdefault(found.get(package, "missing"), []).append(host)
        if len(by_version) > 1:
            told.append(f"{package} " + ", ".join(f"{v} on {named(hosts)}" for v, hosts in by_version.items()))
    if not told:
        return None
    return Finding("red", "machines", "; ".join(told), "start the same image, or the same environment, on all of them")


def named(hosts: Sequence[str], most: int = 4) -> str:
    """Some of a cluster's machines, the others as a count."""
    rest = len(hosts) - most
    return ", ".join(hosts[:most]) + (f" and {rest} more" if rest > 0 else "")


def show(screen: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        for line, style in zip(lines(finding), (finding.colour, "none"), strict=False):
            marked = f"[{style}]{line[:19]}[/]{escape(line[19:])}" if style != "none" else escape(line)
            screen.print(marked)


def lines(finding: Finding) -> list[str]:
    """As on the screen: what was found, and below it what to do."""
    where = f"{named(finding.hosts)}: " if finding.hosts else ""
    first = f"{finding.colour:<7} {finding.name:<11} {where}{finding.text}"
    return [first, f"{'':<19} -> {finding.advice}"] if finding.advice else [first]


def worst(findings: Sequence[Finding]) -> Colour:
    colours = {finding.colour for finding in findings}
    return "red" if "red" in colours else "yellow" if "yellow" in colours else "green"


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]
