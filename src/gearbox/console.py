"""Print from one rank, show what takes time, and format bytes and rates for people.

Strings are printed as they are, because they contain names from files. `styled` adds colours, never markup.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Literal, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.console import ConsoleDimensions as Dimensions
from rich.text import Text

REPEAT_SECONDS = 30.0  # between two lines about the same work, where a screen is not a terminal
REDRAW_SECONDS = 0.2  # between two states of a terminal's last line
PATIENCE_SECONDS = 1.0  # for another thread's line
BAR_CELLS = 16
KEPT = "\n\u00a0\u2002\u2003\u2009\u200a\u200c\u200d\u202f\u3000"

_lock = threading.RLock()
_live = ""
"""What the last line of the terminal shows now, until a line replaces it."""
_is_brief = False
_streams: tuple[TextIO, TextIO] | None = None
"""The streams of this program's own lines, once libraries print elsewhere (see launch/chatter.py)."""


def use_streams(out: TextIO, err: TextIO) -> None:
    """Print to these streams from now on instead of sys.stdout and sys.stderr."""
    global _streams
    _streams = (out, err)


def screen_stream(stderr: bool = False) -> TextIO:
    """Return the stream to the screen for this program's own lines."""
    return (sys.stdout, sys.stderr)[stderr] if _streams is None else _streams[stderr]


def _after_fork() -> None:
    """Forget the parent's lock, which another of its threads may have held."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class Screen(Console):
    """A console that finds no markup, emoji or terminal command in a string."""

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401  rich's options
        """Return a string as rich prints it."""
        return super().render_str(printable(text), **options)

    @property
    def file(self) -> IO[str]:
        """The stream that leads to the screen now."""
        return self._file or screen_stream(self.stderr)

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    @property
    def size(self) -> Dimensions:
        """The size of the terminal that this screen writes to, which another descriptor may not be."""
        if self._width is None and self._file is None and self.is_terminal:
            with suppress(OSError, ValueError):
                columns, lines = os.get_terminal_size(self.file.fileno())
                if columns > 0:
                    return Dimensions(columns, lines)
        return super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    @property
    def is_live(self) -> bool:
        """True if a line can be replaced: on a terminal, unless only what matters is printed.

        FORCE_COLOR makes rich take a file for a terminal.
        """
        is_terminal = self._force_terminal or (self.is_terminal and self.file.isatty())
        return is_terminal and not (self.quiet or _is_brief)

    def on_broken_pipe(self) -> None:
        """Send what comes next to nowhere, because nobody reads it. Rich would end the process."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401  rich's options
        """Print, unless only what matters is printed."""
        if not _is_brief:
            self.print_always(*objects, **options)

    def print_always(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401  rich's options
        """Print a warning, a refusal or the last line of a command."""
        if self.quiet:
            return
        with _alone():
            shown = _live
            self.show("")
            with suppress(OSError):  # the disk of a log may be full, and that stops no training
                super().print(*objects, **options)
            self._buffer.clear()  # of lines that could not be written
            self.show(shown)

    def show(self, text: str) -> None:
        """Let a terminal's last line show a text, cut off to its width; an empty text removes the line.

        Spaces overwrite the old text, so no command is sent to the terminal, and the cursor stays visible: a rank may
        end at any moment.
        """
        global _live
        if not self.is_live or (not text and not _live):
            return
        with _alone():
            text, cells = printable(text).replace("\n", " "), self.width - 1
            text = set_cell_size(text, min(cell_len(text), cells))
            blank = " " * (min(cell_len(_live), cells) - cell_len(text))
            with suppress(OSError):
                self.file.write(f"\r{text}{blank}" + ("" if text else "\r"))
                self.file.flush()
            _live = text


@contextmanager
def _alone() -> Iterator[None]:
    """Keep other threads from printing, but wait for none that is stuck in a terminal."""
    lock = _lock
    is_taken = lock.acquire(timeout=PATIENCE_SECONDS)
    try:
        yield
    finally:
        if is_taken:
            lock.release()


def be_brief() -> None:
    """Print only warnings, refusals and last lines from now on."""
    global _is_brief
    _is_brief = True


def make_console(speaks: bool, stderr: bool = False) -> Screen:
    """Return a console that prints only if `speaks` is True, so that callers need not check their rank."""
    # Without a colour system rich writes no codes at all.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Screen(
        quiet=not speaks,
        stderr=stderr,
        color_system=colours,
        highlight=False,
        soft_wrap=True,
        markup=False,
        emoji=False,
    )


def report(line: str, over_line_of_rank: bool = False) -> None:
    """Print a line of this program to stderr, from any rank and thread.

    `over_line_of_rank` is True if a rank that has ended may have left its last line on the terminal.
    """
    screen = Screen(stderr=True)
    with _alone():
        screen.show("")
        with suppress(OSError):  # of a full disk or a closed pipe
            if over_line_of_rank and screen.is_live:
                screen.file.write("\r" + " " * (screen.width - 1) + "\r")
            print(line, file=screen.file, flush=True)


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that a file's name cannot send commands to a terminal.

    Spaces of other scripts and joiners, which emoji have, stay.
    """
    return "".join(letter if letter.isprintable() or letter in KEPT else repr(letter)[1:-1] for letter in text)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return a line of strings and of (string, style) pairs."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in pairs))


class Work:
    """Work that takes time, of which a screen shows how much is done."""

    def __init__(self, text: str, unit: str = "", tell: Callable[[str], object] | None = None) -> None:
        """Store what is done, and in what unit. `tell` gets a line every REPEAT_SECONDS, if it is given."""
        self.text, self.unit, self.tell = text, unit, tell
        self.done = self.total = 0.0
        self.began = self.told = time.monotonic()

    def at(self, done: float, total: float = 0.0) -> None:
        """Set how much is done of how much, 0 if that is not known. It is cheap."""
        self.done, self.total = done, total
        now = time.monotonic()
        if self.tell is not None and now - self.told > REPEAT_SECONDS:
            self.told = now
            self.tell(self.line())

    def line(self) -> str:
        """Return the work in a line: what is done, how fast, and the time left."""
        seconds = time.monotonic() - self.began
        parts = [self.text]
        if self.total:
            share = min(1.0, self.done / self.total)
            full = round(share * BAR_CELLS)
            parts.append(f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {share:.0%}")
        if self.done and self.unit == "bytes":
            parts.append(f"{format_bytes(self.done)}  {format_bytes(self.done / max(seconds, 1e-3))}/s")
        elif self.done and self.unit:
            parts.append(f"{self.done:,.0f} {self.unit}  {format_figure(self.done / max(seconds, 1e-3))}/s")
        if self.done and self.total:
            parts.append(f"{format_time(seconds / self.done * max(0.0, self.total - self.done))} left")
        else:
            parts.append(format_time(seconds))
        return "  ".join(parts)


@contextmanager
def status(screen: Console, text: str, unit: str = "") -> Iterator[Work]:
    """Show what takes time: a line in a log, or on a terminal a last line with the time that it has taken.

    The yielded `Work` shows a bar as well, once it knows how much is done. A thread draws it, so that drawing costs the
    work nothing.
    """
    if not isinstance(screen, Screen) or not screen.is_live:
        screen.print(text)
        yield Work(text, unit, screen.print)
        return
    work, ended = Work(text, unit), threading.Event()

    def draw() -> None:
        while not ended.wait(REDRAW_SECONDS):
            screen.show(work.line())

    screen.show(text)
    drawing = threading.Thread(target=draw, name="status", daemon=True)
    drawing.start()
    try:
        yield work
    finally:
        ended.set()
        drawing.join(PATIENCE_SECONDS)
        screen.show("")


def format_time(seconds: float) -> str:
    """Return a time in few letters, such as 9 s, 12:34 or 2 d 03:00:00."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


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
