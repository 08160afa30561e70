"""Recognise and mend what a power cut, a damaged disk or another program has left in a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from gearbox import filesystem
from gearbox.config.loader import YAML_ERRORS
from gearbox.errors import UserError

FILES = (
    *("resolved.yaml", "status.json", "metrics.jsonl", "metrics.jsonl.bad", "dropped.jsonl", "answers.jsonl"),
    *("run.json", "run.log", "trackers.json", "report.html", "loss.png"),
)
FOLDERS = ("base", "model", "hang", "tensorboard", "trackers", "profile")
BEFORE_TRAINING = ("lock", "resolved.yaml", "status.json", "run.json", "run.log")
MODEL_FILES = (".json", ".safetensors")  # a saved model has such files, and none is empty
ASIDE = "*.tmp-*"  # names of `filesystem.aside_of`


def check_kinds(folder: Path) -> None:
    """Raise UserError if the run's lock is not a file, or its checkpoints are not in a folder."""
    for name, kind in (("lock", "file"), ("checkpoints", "folder")):
        if _is_of_another_kind(path := folder / name, kind):
            raise UserError(f"{path}: is not a {kind}{_target(path)}; move it away, or choose another run.name")


def mend(folder: Path, tell: Callable[[str], None]) -> None:
    """Rename files that must be folders, and the reverse; delete what was not completed. Only the lock's holder calls.

    Raise OSError if that fails.
    """
    for name in (*FILES, *FOLDERS):
        kind = "file" if name in FILES else "folder"
        if _is_of_another_kind(path := folder / name, kind):
            number = 1
            while (aside := path.with_name(f"{name}.moved-{number}")).exists() or aside.is_symlink():
                number += 1
            target = _target(path)
            filesystem.rename(path, aside)
            tell(f"{path}: is not a {kind}{target}; renamed to {aside.name}")
    for name in (*FILES, *FOLDERS, "probe"):
        for leftover in folder.glob(f"{name}{ASIDE.removeprefix('*')}"):
            filesystem.remove(leftover)
    if is_model_damaged(folder):
        tell(f"{folder / 'model'}: is empty or has empty files; it is written again at the end")


def is_untouched(folder: Path) -> bool:
    """Return True if the folder has nothing but what a start writes before its first step."""
    return all(path.name in BEFORE_TRAINING or path.match(ASIDE) for path in folder.iterdir())


def is_model_damaged(folder: Path) -> bool:
    """Return True if the saved model has no files or an empty one: it was not on disk when the power failed."""
    model = folder / "model"
    files = [path for path in model.iterdir() if path.suffix in MODEL_FILES] if model.is_dir() else []
    return model.is_dir() and (not files or not all(path.stat().st_size for path in files if path.is_file()))


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the groups of a resolved.yaml, or {} if it is missing or damaged."""
    try:
        found = dict(yaml.safe_load(filesystem.read_limited(path, filesystem.MAX_SMALL_BYTES).decode()))
    except (OSError, TypeError, *YAML_ERRORS):
        return {}
    return found if all(isinstance(group, dict) for group in found.values()) else {}


def _is_of_another_kind(path: Path, kind: str) -> bool:
    """Return True if a path exists and is not a file (or a folder), or is a link that leads nowhere."""
    is_right = path.is_file() if kind == "file" else path.is_dir()
    return not is_right and (path.exists() or path.is_symlink())


def _target(path: Path) -> str:
    return f" (it links to {path.readlink()})" if path.is_symlink() else ""
