"""The screen of the rank that speaks; bytes and rates for people."""

from __future__ import annotations

from rich.console import Console


def make_console(speaks: bool) -> Console:
    """Return the screen: of the rank that speaks, or a quiet one, so that no caller asks for its rank."""
    return Console(quiet=not speaks, highlight=False, soft_wrap=True)


def format_message_bytes(size: float) -> str:
    """Such as 64 KiB, 1 MiB, 1.5 GiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{size / 2**10:,.0f} KiB"


def format_figure(number: float) -> str:
    """Two digits of what is small, whole numbers from 10 on."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def format_bytes(num_bytes: float) -> str:
    """Return MiB or GiB, such as 12.4 MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
