"""Commands as a user gives them, in a shell."""

import os
import subprocess
import sys
from pathlib import Path

from gearbox import ROOT

BIN = os.path.dirname(sys.executable)  # noqa: PTH120  a symlinked interpreter must stay in its environment
# Without what the tests set for themselves.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "DS_", "CUDA_"))}


def shell(line: str) -> subprocess.CompletedProcess:
    """Run a command line in the repository, with this environment's programs first on the PATH."""
    path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        line, shell=True, cwd=ROOT, env=ENVIRONMENT | path, text=True, capture_output=True, check=False
    )


def small(folder: Path, chats: Path) -> str:
    """The overrides of two short steps, in a folder's runs/."""
    return (
        f"run.dir={folder}/runs data.path={chats} batch.rows=4 batch.row_tokens=128 train.steps=2 "
        "schedule.warmup=1 eval.every=0 eval.sample_tokens=4"
    )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
