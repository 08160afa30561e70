"""The screen of the rank that prints; bytes and rates for people."""

from __future__ import annotations

from rich.console import Console


def make_console(speaks: bool) -> Console:
    """Return the screen: of the rank that prints, or a quiet one, so that no caller asks for its rank."""
    return Console(quiet=not speaks, highlight=False, soft_wrap=True)


def format_bytes(num_bytes: float) -> str:
    """Return MiB or GiB with a fixed number of digits, for measured sizes: 12.4 MiB, 1.00 GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def format_bytes_short(num_bytes: float) -> str:
    """Return KiB, MiB or GiB without needless digits, for limits and message sizes: 64 KiB, 1 MiB, 1.5 GiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes / 2**10:,.0f} KiB"


def format_figure(number: float) -> str:
    """Return whole numbers from 10 on, and two digits of what is less."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
