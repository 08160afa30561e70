"""Start and end a command: user errors print one line and exit with code 2, and bugs print a traceback.

A run writes its outcome to status.json in its folder, and to the file that src/launch.py names. From that file
src/launch.py derives the exit code. `accelerate launch` has none but 0, 1, and those of a launcher that a rank ended.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from gearbox import ROOT, console
from gearbox.config.job import Job
from gearbox.config.loader import DEFAULT_RECIPE, keys_meant, recipe_keys
from gearbox.errors import UserError
from gearbox.launch import chatter, lifeline
from gearbox.launch.environment import LaunchEnvironment
from gearbox.launch.outcome import (
    EXIT_CRASHED,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    outcome_file,
    read_outcome,
    write_outcome,
)
from gearbox.redact import guard_streams

RANK_0_SPEAKS_SECONDS = 20
OUT_OF_MEMORY = (
    "out of GPU memory: lower batch.micro_rows (same result), set perf.checkpointing=full, train an "
    "adapter, or use the fsdp or zero3 gear"
)


def split_arguments(arguments: list[str]) -> tuple[Path, list[str]]:
    """Split [RECIPE] [key.sub=value ...] into the recipe path and the overrides."""
    overrides = [argument for argument in arguments if "=" in argument]
    paths = [argument for argument in arguments if "=" not in argument]
    if meant := _override_meant(arguments):
        raise UserError(meant)
    if len(paths) > 1 or any(argument.startswith("-") for argument in arguments):
        raise UserError(f"{' '.join(arguments)}: expected [RECIPE] [key.sub=value ...], such as optim.lr=1e-5")
    default = DEFAULT_RECIPE if DEFAULT_RECIPE.exists() else ROOT / DEFAULT_RECIPE
    return Path(paths[0]) if paths else default, overrides


def _override_meant(arguments: list[str]) -> str:
    """Return what to write instead of the first override that has dashes or spaces, or an empty string."""
    for number, word in enumerate(arguments):
        name, _, value = word.partition("=")
        following = [
            after
            for after in arguments[number + 1 : number + 3]
            if not after.endswith((".yaml", ".yml")) and "=" not in after[1:]
        ]
        if not value:  # `key value`, `key= value`, `key = value` or `key =value`
            value = next((after.lstrip("=") for after in following if after != "="), "VALUE")
        bare = name.lstrip("-")
        meant = keys_meant(bare)
        if meant and name.startswith("-"):
            return f"{word}: write {meant[0]}={value}, without dashes"
        if meant and (word == bare or (word == f"{bare}=" and following)) and (following or bare in recipe_keys()):
            return f"{word}: write {meant[0]}={value}, as one word"
    return ""


def usage(help_text: str) -> str:
    """Return the first usage line of a script's docstring."""
    return help_text.partition("Usage: ")[2].partition("\n")[0]


class Parser(argparse.ArgumentParser):
    """A parser of command-line flags that reports mistakes as a one-line UserError. The docstring is the help."""

    def __init__(self, help_text: str) -> None:
        """Take the script's docstring. Accept no abbreviations."""
        super().__init__(usage=usage(help_text), add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the usage line."""
        raise UserError(f"usage: {self.usage}: {message}")


def without_quiet(arguments: list[str]) -> list[str]:
    """Return the arguments without --quiet. If it is there, print only what matters from now on."""
    if "--quiet" in arguments:
        console.be_brief()
    return [word for word in arguments if word != "--quiet"]


def show_job(job: Job) -> None:
    """Print what starts, before the imports of torch."""
    _screen().print(console.styled(("Gearbox", "bold"), f"  recipe {job.recipe_path}  gear {job.gear.name}"))


def status(text: str) -> AbstractContextManager[console.Work]:
    """Return a context that shows what takes time (see `console.status`)."""
    return console.status(_screen(), text)


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Show that a library is being imported, and collect no garbage until then: that takes a quarter of the time.

    What was imported is never garbage, so later collections do not visit it either.
    """
    with status(f"importing {name}"):
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()


def _screen() -> Console:
    return console.make_console(speaks=LaunchEnvironment.read().rank == 0)


def run(main: Callable[[list[str]], int | None], diverts: bool = False) -> NoReturn:
    """Call `main` with the command-line arguments and exit. Only rank 0 prints a user error.

    For -h and --help print the script's docstring, before anything is imported or checked. `diverts` sends what
    libraries print to a file (launch/chatter.py).
    """
    _open_closed_streams()
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        if LaunchEnvironment.read().rank == 0:
            with suppress(BrokenPipeError):  # the reader, such as head, has closed the pipe
                os.write(1, f"{inspect.getdoc(sys.modules[main.__module__])}\n".encode())
        sys.exit(0)
    guard_streams()
    if diverts:
        chatter.divert()
    try:
        code = main(sys.argv[1:])
        launched = LaunchEnvironment.read()
        if launched.local_rank == 0 and (code or lifeline.interrupted):
            lifeline.end_launcher()
        if launched.is_rank:
            # A rank exits without destroying its process group. Gloo's destructor can deadlock: it holds the GIL and
            # waits for a thread that needs the GIL. This hang is rare; it occurred with torch 2.13.
            _exit(code or 0)
        sys.exit(code)
    except UserError as error:
        _refuse("\n".join(f"gearbox: {line}" for line in console.printable(str(error)).splitlines()))
    except KeyboardInterrupt:
        _exit(EXIT_INTERRUPTED)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's error class, without importing torch
            _refuse(f"gearbox: {OUT_OF_MEMORY}")
        if (launched := LaunchEnvironment.read()).is_rank:
            console.report(f"gearbox: rank {launched.rank} failed:")
        console.report("\n".join(filter(None, (traceback.format_exc().rstrip(), chatter.crash_notes()))))
        _exit(EXIT_CRASHED)


def _refuse(text: str) -> NoReturn:
    """Print a user error at once, or hand it to src/launch.py, and exit."""
    launched, outcome_path = LaunchEnvironment.read(), outcome_file()
    if (launched.rank if outcome_path is None else launched.local_rank) > 0:
        # Rank 0 prints the same error, and then its launcher ends this rank. If it does not, only this rank failed.
        # For src/launch.py, which waits on each machine, the first rank of each machine writes the outcome.
        time.sleep(RANK_0_SPEAKS_SECONDS)
    if outcome_path is None:
        console.report(text)
    elif read_outcome(outcome_path).get("outcome") != "failed":  # otherwise the run has already written this
        write_outcome("refused", text)
    lifeline.end_launcher()
    _exit(EXIT_USER_ERROR)  # without teardown, since other ranks may wait in a collective


def _open_closed_streams() -> None:
    """Lead the streams that this process was started without, as by `>&-`, to nowhere.

    Otherwise other files would get their numbers.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
