"""Choose the run that a command continues, and compare its recipe. Nothing here imports torch or writes a file.

src/launch.py and src/train.py call `check_early`, which finds most mistakes within half a second. Later the ranks
decide again, under the run's lock (run_folder.py).
"""

from __future__ import annotations

import errno
import os
import reprlib
import socket
from pathlib import Path
from typing import Any

import psutil

from gearbox.checkpoint import folders
from gearbox.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest
from gearbox.config.job import Job
from gearbox.config.old_keys import renamed
from gearbox.config.recipe import RESUME, Recipe
from gearbox.errors import UserError
from gearbox.launch import outcome
from gearbox.launch.environment import LaunchEnvironment
from gearbox.redact import redacted
from gearbox.training import leftovers

MAY_CHANGE = (
    "train.steps", "train.epochs", "save.", "eval.", "run.", "perf.", "batch.micro_rows", "model.attention",
    "data.cache_gb",
)  # fmt: skip
MAY_NOT = {"run.rehearse": None, "perf.float8": False, "perf.ddp_compression": "none"}  # with the value if absent
# Absent from earlier checkpoints, or where they have no effect.
ADDED_LATER = ("model.dropout", "schedule.decay", "data.shuffle_shards")
SHOWN_DIFFERENCES = 10
MOST_EPOCHS = 10**9
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxlist, SHORT.maxdict, SHORT.maxstring, SHORT.maxlong, SHORT.maxother = 3, 20, 20, 200, 200, 200


def check_early(job: Job) -> None:
    """Raise UserError if the ranks would refuse run.dir or a changed recipe. If in doubt, leave it to them.

    A job on several machines, or a restarted one, continues the folder of its other launchers.
    """
    launched = LaunchEnvironment.read()
    is_first = launched.rank == 0 and launched.num_launchers == 1 and not launched.restart_count
    if not is_first or outcome.requested_run_folder() is not None:
        return
    recipe, parent = job.recipe, Path(job.recipe.run.dir)
    if recipe.adapter.path is not None and not Path(recipe.adapter.path).is_dir():
        return  # the settings of an adapter on the Hub are unknown until the ranks download it
    try:
        continued = folder_to_continue(recipe, job.run_name, is_restart=False)
        if continued is not None and _is_running(continued):
            return
        _check_writable(continued or parent, parent)
        if continued is None and recipe.run.resume in RESUME:
            return
        source = Path(recipe.run.resume) if continued is None else checkpoint_source(recipe, continued)
        found = [(folder, manifest) for folder in candidates(source) if (manifest := _manifest(folder)) is not None]
    except OSError:  # a slow or odd file system
        return
    # The ranks may skip a checkpoint that is damaged, so any that fits is enough.
    if found and all(differences(manifest.recipe, recipe) for _, manifest in found):
        check_recipe(*found[0], recipe)


def check_recipe(folder: Path, manifest: Manifest, recipe: Recipe) -> None:
    """Raise UserError if a checkpoint was made by another recipe."""
    if different := differences(manifest.recipe, recipe):
        more = len(different) - SHOWN_DIFFERENCES
        listed = "; ".join(different[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise UserError(
            f"{folder}: was made by another recipe: {listed}; undo the change, or add run.resume=never to the command "
            "to start a new run"
        )


def folder_to_continue(recipe: Recipe, name: str, is_restart: bool) -> Path | None:
    """Return the newest folder of the series of runs if this run continues it, else None.

    Raise UserError if run.resume requires a run to continue.
    """
    parent = Path(recipe.run.dir)
    existing = series(parent, name)
    if not existing and recipe.run.resume == "latest":
        raise UserError(f"run.resume: latest, but {parent} contains no run {name!r}")
    return existing[-1] if existing and is_to_continue(existing[-1], recipe, is_restart) else None


def series(parent: Path, name: str) -> list[Path]:
    """Return the existing folders among name, name-2, name-3, ..., sorted by number."""
    names = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    numbers = {found: found.removeprefix(f"{name}-") for found in names if found.startswith(f"{name}-")}
    siblings = sorted((int(number), found) for found, number in numbers.items() if number.isdecimal())
    return [*([parent / name] if name in names else []), *(parent / found for _, found in siblings)]


def is_to_continue(folder: Path, recipe: Recipe, is_restart: bool) -> bool:
    """Return True if this run continues the run in the folder.

    `auto` and a checkpoint's path continue the same run if it is unfinished. `latest` continues every run: raise
    UserError if it has ended without a checkpoint. `never` continues only its own run after a restart.
    """
    status, resume = outcome.read_outcome(folder / "status.json").get("outcome"), recipe.run.resume
    has_checkpoints = bool(folders.list_checkpoints(folder / "checkpoints"))
    is_done = status == "done" and not (has_checkpoints and leftovers.is_model_damaged(folder))
    if resume == "latest":
        if is_done and not has_checkpoints:
            raise UserError(
                f"run.resume: latest, but {folder} is done and has no checkpoint to resume from; use run.resume=never"
            )
        return True
    if (resume == "never" and not is_restart) or is_done:
        return False
    if status is None and not has_checkpoints:
        return leftovers.is_untouched(folder)  # a kill or a power cut ended its first start
    saved = _resolved(folder)
    if resume not in RESUME and _flat(saved).get("run.resume") != resume:
        return False
    return has_checkpoints or is_restart or (status != "failed" and not differences(saved, recipe))


def checkpoint_source(recipe: Recipe, folder: Path) -> Path:
    """Return the folder of checkpoints, or the one checkpoint, that the run in `folder` resumes from."""
    is_own = recipe.run.resume in RESUME or folders.list_checkpoints(folder / "checkpoints")
    return folder / "checkpoints" if is_own else Path(recipe.run.resume)


def candidates(source: Path) -> list[Path]:
    """Return `source` if it is a checkpoint, or else the checkpoints in it, newest first."""
    return [source] if (source / MANIFEST).is_file() else [path for _, path in folders.list_checkpoints(source)]


def differences(saved: dict[str, Any], recipe: Recipe) -> list[str]:
    """Return the changed keys, with both values, that make this a different run."""
    there, here = MAY_NOT | _flat(renamed(saved)[0]), _flat(redacted(recipe.model_dump(mode="json")))
    here = {key: value for key, value in here.items() if key in there or key not in ADDED_LATER}
    return [
        f"{key[:200]} changed from {SHORT.repr(there.get(key))} to {SHORT.repr(here.get(key))}"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key) and (key in MAY_NOT or not key.startswith(MAY_CHANGE))
    ]


def saved_epochs(manifest: Manifest) -> float | None:
    """Return the train.epochs that a checkpoint was made with, if it is a usable number."""
    epochs = manifest.recipe["train"].get("epochs")
    return float(epochs) if isinstance(epochs, int | float) and 0 < epochs < MOST_EPOCHS else None


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping from "group.key" to the value. A group that is not a mapping is a value."""
    return {
        f"{group}.{key}" if key else str(group): value
        for group, found in recipe.items()
        for key, value in (found if isinstance(found, dict) else {"": found}).items()
    }


def _resolved(folder: Path) -> dict[str, Any]:
    """Return the recipe of a run, from its newest manifest if resolved.yaml is missing or damaged."""
    manifests = (_manifest(path) for _, path in folders.list_checkpoints(folder / "checkpoints"))
    from_manifest = (manifest.recipe for manifest in manifests if manifest is not None)
    return leftovers.read_recipe(folder / "resolved.yaml") or next(from_manifest, {})


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CorruptCheckpoint:
        return None


def _is_running(folder: Path) -> bool:
    """Return whether a process may be in this run; its end would change what this command does."""
    status = outcome.read_outcome(folder / "status.json")
    host, pid = status.get("host"), status.get("pid")
    if host == socket.gethostname() and isinstance(pid, int) and 0 < pid < 2**31:
        return psutil.pid_exists(pid)
    return status.get("outcome") == "running"


def _check_writable(folder: Path, parent: Path) -> None:
    """Raise UserError if the run's folder, or the nearest folder above that exists, cannot be written."""
    while not os.path.lexists(folder):
        folder = folder.parent
    number = 0 if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES
    if not folder.is_dir():
        number = errno.ENOTDIR
    elif os.statvfs(folder).f_flag & os.ST_RDONLY:
        number = errno.EROFS
    if number:
        raise UserError(f"run.dir: {parent} cannot be written: {folder}: {os.strerror(number)}; choose another run.dir")
