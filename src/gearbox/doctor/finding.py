"""Define a finding: one green, yellow or red line of the doctor, with advice. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Console

from gearbox.console import styled

Colour = Literal["green", "yellow", "red"]


@dataclass(frozen=True)
class Finding:
    """A finding. Green: fine. Yellow: training runs, but slowly or not for long. Red: it fails or trains wrongly."""

    colour: Colour
    name: str
    """One word, as listed in docs/doctor.md."""
    text: str
    advice: str = ""
    """What to do; empty if green."""
    hosts: tuple[str, ...] = ()
    """The machines with this finding; empty if it applies to all machines."""


def merged(of_machines: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Merge the findings of several machines, given as (host, findings); list a finding that all share once.

    Green findings that differ only in their figures are reduced to the first: a hundred machines do not fit a screen.
    """
    names = dict.fromkeys(finding.name for _, findings in of_machines for finding in findings)
    lines = []
    for name in names:
        by_text: dict[Finding, list[str]] = {}
        for host, findings in of_machines:
            for finding in findings:
                if finding.name == name:
                    by_text.setdefault(finding, []).append(host)
        greens = [hosts for finding, hosts in by_text.items() if finding.colour == "green"]
        for finding, hosts in by_text.items():
            if finding.colour == "green" and len(greens) > 1:
                if hosts is greens[0]:
                    text = f"{finding.text} ({hosts[0]}; {sum(map(len, greens)) - 1} others are green too)"
                    lines.append(Finding("green", name, text))
                continue
            is_everywhere = len(hosts) == len(of_machines)
            lines.append(replace(finding, hosts=() if is_everywhere else tuple(hosts)))
    return lines


def differing(versions: dict[str, dict[str, str]]) -> Finding | None:
    """Return a red finding if machines have different versions (host -> package -> version), else None."""
    problems = []
    for package in sorted({name for found in versions.values() for name in found}):
        by_version: dict[str, list[str]] = {}
        for host, found in versions.items():
            by_version.setdefault(found.get(package, "missing"), []).append(host)
        if len(by_version) > 1:
            problems.append(f"{package} " + ", ".join(f"{v} on {shorten(hosts)}" for v, hosts in by_version.items()))
    if not problems:
        return None
    return Finding("red", "machines", "; ".join(problems), "use the same image or environment on all machines")


def shorten(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def show(screen: Console, findings: Sequence[Finding]) -> None:
    """Print findings with their colours."""
    for finding in findings:
        for line, style in zip(lines(finding), (finding.colour, "none"), strict=False):
            screen.print(styled((line[:19], style), line[19:]))


def lines(finding: Finding) -> list[str]:
    """Return the printed lines: the finding, and its advice below it."""
    where = f"{shorten(finding.hosts)}: " if finding.hosts else ""
    first = f"{finding.colour:<7} {finding.name:<11} {where}{finding.text}"
    return [first, f"{'':<19} -> {finding.advice}"] if finding.advice else [first]


def worst(findings: Sequence[Finding]) -> Colour:
    """Return the worst colour; green if there are no findings."""
    colours = {finding.colour for finding in findings}
    return "red" if "red" in colours else "yellow" if "yellow" in colours else "green"


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as JSON objects."""
    return [asdict(finding) for finding in findings]


def from_json(findings: Sequence[dict[str, Any]]) -> list[Finding]:
    """Return the findings that `as_json` converted."""
    return [Finding(**{**found, "hosts": tuple(found["hosts"])}) for found in findings]
