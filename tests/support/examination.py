"""What the doctor found on forked ranks, and how a fault is planted on one of them."""

import os

from gearbox import ROOT

HOST = os.uname().nodename
DDP = ROOT / "accelerate_configs" / "ddp.yaml"


def of_colour(told: dict, colour: str) -> dict[str, str]:
    return {finding["name"]: finding["text"] for finding in told["findings"] if finding["colour"] == colour}


def on_rank_1(fault):
    return lambda rank: fault() if rank == 1 else None
