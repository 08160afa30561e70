"""How a run ended: status.json for people, an outcome file for src/launch.py, exit codes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from gearbox import filesystem
from gearbox.launch.environment import LaunchEnvironment
from gearbox.processes import launcher_process
from gearbox.redact import redacted

EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
EXIT_SAVED = 85  # the same command resumes
EXIT_INTERRUPTED = 130  # by SIGINT, at once
EXIT_FAILED = 93  # the same command would fail again
EXIT_CODES = {"done": 0, "refused": EXIT_USER_ERROR, "saved": EXIT_SAVED, "failed": EXIT_FAILED}
OUTCOME_FILE = "GEARBOX_OUTCOME_FILE"
RUN_FOLDER = "GEARBOX_RUN"


def outcome_file() -> Path | None:
    """Return where src/launch.py waits for this process's outcome, None without it."""
    path = os.environ.get(OUTCOME_FILE)
    return None if path is None else Path(path)


def requested_run_folder() -> str | None:
    """Return the run's folder in which src/launch.py wants a restart to resume, None at a first start."""
    return os.environ.get(RUN_FOLDER)


def write_outcome(outcome: str, text: str, folder: Path | None = None, **facts: object) -> None:
    """Write an outcome (running, done, saved, failed, refused) where people and src/launch.py look for it."""
    status = {"outcome": outcome, "text": text, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}
    status_file = folder / "status.json" if folder is not None and folder.is_dir() else None
    # src/launch.py's first: whoever sees a step in status.json may rely on a restart.
    for path in filter(None, (outcome_file(), status_file)):
        try:
            filesystem.atomic_write(path, json.dumps(redacted(status)) + "\n")
        except OSError as error:  # a full disk is no reason to stop
            print(f"gearbox: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def read_outcome(path: Path) -> dict[str, Any]:
    """Return the JSON object that `write_outcome` wrote, {} where there is none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def exit_code(outcome: str) -> int:
    """Return this process's exit code for an outcome.

    A launcher takes every code but 0 for a crash, so under one it is 0: the outcome file has the outcome.
    """
    return 0 if LaunchEnvironment.read().is_rank or launcher_process() is not None else EXIT_CODES[outcome]


def exit_without_saving(why: str) -> NoReturn:
    """Exit at once where there is nothing to save, from any thread. The exit code is a failure's: all ranks end.

    It writes no outcome: torch's launcher sends SIGTERM as well when another rank has failed.
    """
    launched = LaunchEnvironment.read()
    has_launcher = launched.is_rank or launcher_process() is not None
    if launched.rank == 0:
        print(f"gearbox: {why}: there is nothing to save", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED if why == "SIGINT" else EXIT_CRASHED if has_launcher else EXIT_SAVED)
