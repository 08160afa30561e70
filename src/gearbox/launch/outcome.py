"""Record how a run ended: status.json for people, an outcome file for src/launch.py, exit codes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from gearbox import console, filesystem
from gearbox.launch.environment import LaunchEnvironment
from gearbox.processes import launcher_process
from gearbox.redact import redacted

EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
EXIT_SAVED = 85  # run the same command to resume
EXIT_INTERRUPTED = 130  # ended at once by SIGINT
EXIT_FAILED = 93  # the same command would fail again
EXIT_CODES = {"done": 0, "refused": EXIT_USER_ERROR, "saved": EXIT_SAVED, "failed": EXIT_FAILED}
OUTCOME_FILE = "GEARBOX_OUTCOME_FILE"
RUN_FOLDER = "GEARBOX_RUN"
TYPES = {
    "step": int,
    "saved_step": int,
    "model_step": int,
    "pid": int,
}  # of facts in status.json; others are texts


def outcome_file() -> Path | None:
    """Return the file in which src/launch.py expects this process's outcome, or None without src/launch.py."""
    path = os.environ.get(OUTCOME_FILE)
    return None if path is None else Path(path)


def requested_run_folder() -> str | None:
    """Return the run folder that a restart by src/launch.py must resume, or None at the first start."""
    return os.environ.get(RUN_FOLDER)


def write_outcome(outcome: str, text: str, folder: Path | None = None, **facts: object) -> None:
    """Write an outcome (running, done, saved, failed, refused) to status.json and to src/launch.py's file."""
    status = {"outcome": outcome, "text": text, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}
    status_file = folder / "status.json" if folder is not None and folder.is_dir() else None
    # Write src/launch.py's file first: once status.json shows a step, a reader may rely on a restart.
    for path in filter(None, (outcome_file(), status_file)):
        try:
            filesystem.atomic_write(path, json.dumps(redacted(status)) + "\n")
        except OSError as error:  # a full disk must not stop training
            console.report(f"gearbox: {path} cannot be written: {error.strerror}")


def read_outcome(path: Path) -> dict[str, Any]:
    """Return the facts that `write_outcome` wrote, without those of another type; {} if the file cannot be read."""
    try:
        found = filesystem.read_json_object(path, filesystem.MAX_SMALL_BYTES)
    except ValueError:
        return {}
    return {key: value for key, value in found.items() if type(value) is TYPES.get(key, str)}


def exit_code(outcome: str) -> int:
    """Return this process's exit code for an outcome.

    Launchers treat every code except 0 as a crash. Under a launcher the code is therefore 0, and the outcome file
    carries the outcome.
    """
    return 0 if LaunchEnvironment.read().is_rank or launcher_process() is not None else EXIT_CODES[outcome]
