"""Print from one rank, and format bytes and rates for people.

Strings are printed as they are, because they contain names from files. `styled` adds colours, never markup.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from gearbox.errors import printable


class Screen(Console):
    """A console that finds no markup, emoji or terminal command in a string."""

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401  rich's options
        """Return a string as rich prints it."""
        return super().render_str(printable(text), **options)


def make_console(speaks: bool, stderr: bool = False) -> Screen:
    """Return a console that prints only if `speaks` is True, so that callers need not check their rank."""
    return Screen(quiet=not speaks, stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return a line of strings and of (string, style) pairs."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in pairs))


def format_bytes(num_bytes: float) -> str:
    """Return a measured size with a fixed number of digits, such as 12.4 MiB or 1.00 GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def format_bytes_short(num_bytes: float) -> str:
    """Return a limit or message size without needless digits, such as 64 KiB, 1 MiB or 1.5 GiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes / 2**10:,.0f} KiB"


def format_figure(number: float) -> str:
    """Return an integer if the number is at least 10, or two significant digits otherwise."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
