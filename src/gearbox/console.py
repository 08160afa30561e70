"""Print from one rank, and format bytes and rates for people.

Strings are printed as they are, because they contain names from files. `styled` adds colours, never markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

KEPT = "\n\u00a0\u2002\u2003\u2009\u200a\u200c\u200d\u202f\u3000"


class Screen(Console):
    """A console that finds no markup, emoji or terminal command in a string."""

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401  rich's options
        """Return a string as rich prints it."""
        return super().render_str(printable(text), **options)


def make_console(speaks: bool, stderr: bool = False) -> Screen:
    """Return a console that prints only if `speaks` is True, so that callers need not check their rank."""
    return Screen(quiet=not speaks, stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that a file's name cannot send commands to a terminal.

    Spaces of other scripts and joiners, which emoji have, stay.
    """
    return "".join(letter if letter.isprintable() or letter in KEPT else repr(letter)[1:-1] for letter in text)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return a line of strings and of (string, style) pairs."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in pairs))


@contextmanager
def status(screen: Console, text: str) -> Iterator[None]:
    """Show what takes time, in a few words: a line in a log, or on a terminal a line that the next one replaces.

    The cursor stays visible, unlike with rich's own status, because a rank may end at any moment.
    """
    is_transient = screen.is_terminal and not screen.is_dumb_terminal
    screen.print(text, end="\r" if is_transient else "\n")
    yield
    if is_transient:
        screen.control(Control((ControlType.ERASE_IN_LINE, 2)))


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
