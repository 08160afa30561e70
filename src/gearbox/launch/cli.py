"""How a command starts and ends: the user's mistakes in one line with exit code 2, ours with a traceback.

A run's outcome is written to status.json in its folder, and to the file that src/launch.py names, which turns it into
an exit code: `accelerate launch` itself can only say 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from gearbox import ROOT
from gearbox.config.loader import DEFAULT_RECIPE
from gearbox.errors import UserError
from gearbox.launch.outcome import EXIT_CRASHED, EXIT_USER_ERROR, OUTCOME_FILE, read_outcome, write_outcome
from gearbox.processes import launcher_process
from gearbox.redact import guard_streams

RANK_0_SPEAKS_SECONDS = 20
OUT_OF_MEMORY = (
    "out of GPU memory: lower batch.micro_rows (the result stays), set model.gradient_checkpointing=true, train an "
    "adapter, or take the gear fsdp or zero3"
)


def split_arguments(arguments: list[str]) -> tuple[Path, list[str]]:
    """[RECIPE] [key.sub=value ...] to the recipe's path and the overrides."""
    overrides = [argument for argument in arguments if "=" in argument]
    paths = [argument for argument in arguments if "=" not in argument]
    if len(paths) > 1 or any(argument.startswith("-") for argument in arguments):
        raise UserError(f"{' '.join(arguments)}: the arguments are [RECIPE] [key.sub=value ...], such as optim.lr=1e-5")
    default = DEFAULT_RECIPE if DEFAULT_RECIPE.exists() else ROOT / DEFAULT_RECIPE
    return Path(paths[0]) if paths else default, overrides


class Parser(argparse.ArgumentParser):
    """Of a command with flags; a mistake in them is one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"usage: {self.usage}: {message}")


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call main with the command line and exit. Only rank 0 says what was wrong."""
    guard_streams()
    try:
        code = main(sys.argv[1:])
        if "RANK" in os.environ:
            # A rank ends without tearing its process group down. Torn down, gloo's destructor can hold Python's lock
            # while it waits for a thread that waits for that lock: a rare hang, seen with torch 2.13.
            _exit(code or 0)
        sys.exit(code)
    except UserError as error:
        _refuse("\n".join(f"gearbox: {line}" for line in str(error).splitlines()))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            _refuse(f"gearbox: {OUT_OF_MEMORY}")
        if "RANK" in os.environ:
            print(f"gearbox: rank {os.environ['RANK']} failed:", file=sys.stderr, flush=True)
        traceback.print_exc()
        _exit(EXIT_CRASHED)


def _refuse(text: str) -> NoReturn:
    if int(os.environ.get("LOCAL_RANK" if OUTCOME_FILE in os.environ else "RANK", "0")) > 0:
        # Rank 0 has the same to say, and then the launcher ends this rank. If it does not, the mistake is ours alone.
        # Where src/launch.py listens, one on each machine, the first rank of each speaks to it.
        time.sleep(RANK_0_SPEAKS_SECONDS)
    launcher = launcher_process()
    if OUTCOME_FILE in os.environ:
        if read_outcome(Path(os.environ[OUTCOME_FILE])).get("outcome") != "failed":  # a run that had begun said it
            write_outcome("refused", text)
    elif launcher is not None and launcher.pid != 1:  # a container ends with its process 1, and nothing speaks after it
        print_after(launcher, text)
    else:
        print(text, file=sys.stderr)
    _exit(EXIT_USER_ERROR)  # without teardown: the other ranks may be waiting inside a collective


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_after(launcher: psutil.Process, text: str) -> None:
    """`accelerate launch` ends with a traceback of its own when a rank fails; say ours after it."""
    if os.fork() == 0:
        os.setsid()
        psutil.wait_procs([launcher], timeout=60)
        print(text, file=sys.stderr, flush=True)
        os._exit(0)
