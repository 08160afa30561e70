"""Send what libraries print and log to a file, so that a screen shows only this program's own lines.

Libraries write to the file descriptors 1 and 2, also from C code. `divert` points both at a file, and gives copies of
the old ones to `console`. Nothing runs between a library and the file, so a killed process loses no line.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from gearbox import console
from gearbox.launch.environment import LaunchEnvironment
from gearbox.redact import guarded, redact

LOG = "run.log"
TAIL_BYTES = 4000  # of the log, shown after a crash whose run folder is gone
MAX_EARLY_BYTES = 2**20  # of what libraries print before the run has a folder


@dataclass
class _Diverted:
    """The files that libraries print to since `divert`."""

    early: IO[bytes]
    """A file without a name, for what they print before the run has a folder."""
    log: Path | None = None


_diverted: _Diverted | None = None


class _Lines:
    """A stream that writes complete lines to a file descriptor. It never raises, as when the disk is full."""

    def __init__(self, stream: TextIO, number: int, head: str) -> None:
        self._stream, self._number, self._head, self._begun = stream, number, head, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete now."""
        lines, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._send(lines + newline)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several lines."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write what has been printed of an incomplete line."""
        begun, self._begun = self._begun, ""
        if begun:
            self._send(begun)

    def isatty(self) -> bool:
        """Return False, so that libraries draw nothing."""
        return False

    def _send(self, text: str) -> None:
        lines = "".join(self._head + line for line in redact(text).splitlines(keepends=True))
        with suppress(OSError):
            os.write(self._number, lines.encode(errors="backslashreplace"))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def divert() -> None:
    """Divert what libraries print to a file without a name, until `keep_in` names one.

    What a library logs as an error is shown on the screen too, and so is the stack of a fatal signal.
    """
    global _diverted
    sys.stdout.flush()
    sys.stderr.flush()
    rank = LaunchEnvironment.read().rank
    out, err = _copy_of(sys.stdout, 1), _copy_of(sys.stderr, 2)
    console.use_streams(guarded(out), guarded(err))
    faulthandler.enable(err)
    _diverted = _Diverted(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  open as long as the process
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(_diverted.early.fileno(), number)
        setattr(sys, name, _Lines(getattr(sys, name), number, f"[rank {rank}] " if rank else ""))
    sys.breakpointhook = _breakpoint
    if rank == 0:
        _show_errors()


def keep_in(folder: Path) -> str:
    """Append what libraries have printed and will print to the run's log. Return why that fails, or an empty string.

    All ranks of a machine share a file, and no two machines do: appending is atomic on one machine only.
    """
    launched = LaunchEnvironment.read()
    machine = (launched.rank - launched.local_rank) // max(1, launched.local_size)
    path = folder / (f"run-machine{machine}.log" if machine else LOG)
    if _diverted is None or _diverted.log == path:
        return ""
    try:
        found = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):  # the disk may be full
        early = os.pread(_diverted.early.fileno(), MAX_EARLY_BYTES, 0)
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        os.write(found, f"--- {now}  rank {launched.rank}, process {os.getpid()}\n".encode() + early)
    for number in (1, 2):
        os.dup2(found, number)
    os.close(found)
    _diverted.log = path
    return ""


def crash_notes() -> str:
    """Return where the log is, or its last lines if it has no name or went with the run's folder."""
    if _diverted is None:
        return ""
    if _diverted.log is not None and _diverted.log.exists():
        return f"gearbox: what libraries printed is in {_diverted.log}"
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError), Path("/proc/self/fd/2").open("rb") as log:
        log.seek(max(0, os.fstat(2).st_size - TAIL_BYTES))
        text = redact(log.read().decode(errors="replace").strip())
        return f"gearbox: libraries printed before:\n{text}" if text else ""
    return ""


def _copy_of(stream: TextIO, number: int) -> TextIO:
    """Return a stream to a copy of a file descriptor, which stays when the descriptor is diverted."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return os.fdopen(os.dup(number), "w", buffering=1, encoding=encoding, errors="backslashreplace")


def _show_errors() -> None:
    """Show each error that a library logs, in addition to where its handlers write it."""
    usual = logging.getLogRecordFactory()

    def make(*arguments: object, **options: object) -> logging.LogRecord:
        record = usual(*arguments, **options)
        if record.levelno >= logging.ERROR:
            with suppress(Exception):  # its arguments may not fit its text
                console.report(f"gearbox: error of {record.name}: {console.printable(record.getMessage())}")
        return record

    logging.setLogRecordFactory(make)


def _breakpoint(*_: object, **__: object) -> None:
    """Open the debugger on the screen, where `breakpoint()` was called."""
    import pdb

    pdb.Pdb(stdout=console.screen_stream()).set_trace(sys._getframe().f_back)
