"""Read the doctor's JSON report, and plant a fault on one forked rank."""

import os

from gearbox import ROOT

HOST = os.uname().nodename
DDP = ROOT / "accelerate_configs" / "ddp.yaml"


def of_colour(report: dict, colour: str) -> dict[str, str]:
    """Return name and text of the findings of a colour."""
    return {finding["name"]: finding["text"] for finding in report["findings"] if finding["colour"] == colour}


def on_rank_1(fault):
    """Return a function of the rank that calls `fault` on rank 1."""
    return lambda rank: fault() if rank == 1 else None
