"""How a run ended: status.json for people, an outcome file for src/launch.py, exit codes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from gearbox import filesystem
from gearbox.processes import launcher_process
from gearbox.redact import redacted

EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
EXIT_SAVED = 85  # go on with the same command
EXIT_FAILED = 93  # the same command would fail again
EXIT_CODES = {"done": 0, "refused": EXIT_USER_ERROR, "saved": EXIT_SAVED, "failed": EXIT_FAILED}
OUTCOME_FILE = "GEARBOX_OUTCOME_FILE"  # set by src/launch.py: where the outcome is left for it
RUN_FOLDER = "GEARBOX_RUN"  # set by src/launch.py at a restart: the folder to go on in


def write_outcome(outcome: str, text: str, folder: Path | None = None, **facts: Any) -> None:
    """Write an outcome (running, done, saved, failed, refused) where people and src/launch.py look for it."""
    status = {"outcome": outcome, "text": text, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}
    places = [folder / "status.json"] if folder is not None and folder.is_dir() else []
    if OUTCOME_FILE in os.environ:
        places.append(Path(os.environ[OUTCOME_FILE]))
    for place in places:
        try:
            filesystem.atomic_write(place, json.dumps(redacted(status)) + "\n")
        except OSError as error:  # a full disk is no reason to stop
            print(f"gearbox: {place} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def requested_run_folder() -> str | None:
    """Return the folder that a restart is to resume in, None at the first try."""
    return os.environ.get(RUN_FOLDER)


def read_outcome(path: Path) -> dict[str, Any]:
    """What `conclude` wrote, or {}."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def exit_code(outcome: str) -> int:
    """Of this process. Under a launcher only 0 does not look like a failure: there the outcome file speaks."""
    return 0 if "RANK" in os.environ or launcher_process() is not None else EXIT_CODES[outcome]


def exit_without_saving(why: str) -> NoReturn:
    """End at once where there is nothing to save, from any thread. The code is a failure's: the other ranks end too.

    It writes no outcome: torch's launcher sends SIGTERM as well when another rank has failed.
    """
    direct = "RANK" not in os.environ and launcher_process() is None
    if os.environ.get("RANK", "0") == "0":
        print(f"gearbox: {why}: there is nothing to save", file=sys.stderr, flush=True)
    os._exit(130 if why == "SIGINT" else EXIT_SAVED if direct else EXIT_CRASHED)
