"""Run commands in a shell, as a user does."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from gearbox import ROOT
from gearbox.processes import is_alive

BIN = os.path.dirname(sys.executable)  # noqa: PTH120  a symlinked interpreter must stay in its environment
# Without the variables that the tests set.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "DS_", "CUDA_"))}


def shell(line: str) -> subprocess.CompletedProcess:
    """Run a command line in the repository, with this environment's programs first on the PATH."""
    path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        line, shell=True, cwd=ROOT, env=ENVIRONMENT | path, text=True, capture_output=True, check=False
    )


def small(folder: Path, chats: Path) -> str:
    """Return overrides for two short steps that write to `folder`/runs."""
    return (
        f"run.dir={folder}/runs data.path={chats} batch.rows=4 batch.row_tokens=128 train.steps=2 "
        "schedule.warmup=1 eval.every=0 eval.sample_tokens=4"
    )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def survivors(processes: Iterable[psutil.Process], seconds: float = 20) -> list[psutil.Process]:
    """Return the processes that do not end in time. Process 1 need not have reaped those that do."""
    deadline = time.monotonic() + seconds
    while (left := [one for one in processes if is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
