"""Train a recipe under a gear: in a launched process, or on ranks forked from this one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gearbox.config.gear import Gear
from gearbox.launch import outcome, supervisor
from gearbox.proving.settings import label

LARGE = ("checkpoints", "model", "base")  # subfolders of a run, deleted after the comparison


class Ended(NamedTuple):
    """The end of a run."""

    problem: str = ""
    """Reason why the run has no result, or an empty text."""
    is_refusal: bool = False
    """True if the run ended before training, with a message for the user."""


def launch(gear: Gear, folder: Path, arguments: list[str], name: str = "") -> Ended:
    """Train under a gear in folder/<name>, with the gear's label as default. Raise KeyboardInterrupt on a stop signal.

    The output is in folder/<name>.log.
    """
    flags = [f"--config_file={gear.path}", f"--num_processes={gear.num_processes}"]
    name = name or label(gear)
    path = folder / f"{name}.log"
    with path.open("a", encoding="utf-8", buffering=1) as log:
        code = supervisor.supervise(flags, [*arguments, f"run.dir={folder}", f"run.name={name}"], output=log)
    if code in (outcome.EXIT_INTERRUPTED, outcome.EXIT_SAVED):
        raise KeyboardInterrupt
    return ended([code], path.read_text(encoding="utf-8"), path)


def ended(codes: Sequence[int], output: str, log: Path) -> Ended:
    """Return the end of a run from the exit codes of its processes, its output and the place of that output."""
    if not any(codes):
        return Ended()
    is_refusal = outcome.EXIT_USER_ERROR in codes
    lines = output.splitlines()
    messages = [line.removeprefix("gearbox: ") for line in lines if line.startswith("gearbox: ")]
    errors = [line for line in lines if re.match(r"\w+(\.\w+)*(Error|Exception|Interrupt): ", line)]
    # Rank 0 speaks first. Other ranks may refuse because it has ended.
    found = messages[:1] if is_refusal else [*errors, *messages]
    code = next(code for code in codes if code)
    return Ended(found[-1] if found else f"exited with code {code}; see {log}", is_refusal)


def delete_large(run: Path) -> None:
    """Delete the large subfolders of a run."""
    for name in LARGE:
        shutil.rmtree(run / name, ignore_errors=True)
