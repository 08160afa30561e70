"""How a command starts and ends: the user's mistakes in one line with exit code 2, ours with a traceback."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from gearbox.config import DEFAULT_RECIPE, ROOT, UserError
from gearbox.gear import launcher_process

EXIT_USER_ERROR = 2


def split_arguments(arguments: list[str]) -> tuple[Path, list[str]]:
    """[RECIPE] [key.sub=value ...] to the recipe's path and the overrides."""
    overrides = [argument for argument in arguments if "=" in argument]
    paths = [argument for argument in arguments if "=" not in argument]
    if len(paths) > 1 or any(path.startswith("-") for path in paths):
        raise UserError(f"{' '.join(paths)}: the arguments are [RECIPE] [key.sub=value ...], such as optim.lr=1e-5")
    default = DEFAULT_RECIPE if DEFAULT_RECIPE.exists() else ROOT / DEFAULT_RECIPE
    return Path(paths[0]) if paths else default, overrides


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call main with the command line and exit. Only rank 0 says what was wrong."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        rank = os.environ.get("RANK")
        if rank is not None:
            print(f"gearbox: rank {rank} failed:", file=sys.stderr, flush=True)
        raise


def _refuse(text: str) -> NoReturn:
    if int(os.environ.get("RANK", "0")) > 0:
        # Rank 0 says it. Waiting for the launcher's signal keeps this rank out of torchrun's summary.
        time.sleep(20)
        os._exit(EXIT_USER_ERROR)
    text = "\n".join(f"gearbox: {line}" for line in text.splitlines())
    launcher = launcher_process()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = {"message": text, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": message}), encoding="utf-8")
    if launcher is None:
        print(text, file=sys.stderr, flush=True)
    else:
        _print_after(launcher, text)
    sys.stdout.flush()
    os._exit(EXIT_USER_ERROR)


def _print_after(launcher: psutil.Process, text: str) -> None:
    """`accelerate launch` prints a traceback of its own after a rank has failed; say ours once that has ended."""
    if os.fork() == 0:
        os.setsid()
        psutil.wait_procs([launcher], timeout=60)
        print(text, file=sys.stderr, flush=True)
        os._exit(0)
