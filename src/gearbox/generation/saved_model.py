"""Find the model that a user names, and the base that it was trained from, without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

from gearbox.config.loader import YAML_ERRORS
from gearbox.errors import UserError, nearest
from gearbox.filesystem import MAX_SMALL_BYTES, read_limited

EXPORT_MANIFEST = "gearbox_export.json"  # in a folder that src/export.py wrote
CONFIGS = ("config.json", "adapter_config.json")
HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
CARD = re.compile(r"---\r?\n(.*?\n)---\r?\n", re.DOTALL)


def find_model(name: str) -> str:
    """Return the folder or Hub id of the model that a folder, a run's folder or a Hub id names.

    Raise UserError if it is a run or a checkpoint without a saved model, or none of these.
    """
    try:
        return _find_model(name)
    except PermissionError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from None


def _find_model(name: str) -> str:
    if not os.path.exists(name):  # noqa: PTH110  Path raises for a long name
        if HUB_ID.fullmatch(name) and not os.path.isdir(name.partition("/")[0]):  # noqa: PTH112
            return name
        raise UserError(f"{name}: contains no model; a run saves its model to runs/<name>/model{_similar(name)}")
    folder = Path(name)
    for path in (folder, folder / "model"):
        if any((path / config).is_file() for config in CONFIGS):
            return str(path)
    if (folder / "manifest.json").is_file():
        raise UserError(f"{name}: is a checkpoint; write its model to a folder with: python src/export.py {name}")
    if (folder / "checkpoints").is_dir():
        text = "the run has not saved its model yet; write that of a checkpoint to a folder with: python src/export.py"
        raise UserError(f"{name}: {text} {name}")
    raise UserError(f"{name}: contains no model; a run saves its model to runs/<name>/model")


def _similar(name: str) -> str:
    """Return a suggestion from the folder that the name is in."""
    parent = os.path.dirname(name) or "."  # noqa: PTH120  Path raises for a long name
    try:
        return nearest(os.path.basename(name), os.listdir(parent))  # noqa: PTH119, PTH208
    except (OSError, ValueError):
        return ""


def base_of(model: str) -> tuple[str, str | None] | None:
    """Return the model from which a full fine-tune started: its folder or Hub id, and its revision if one is known.

    The run's own random weights come first, then the model of its resolved.yaml, then base_model of the model card.
    An export's manifest has its revision. Return None if it is not known.
    """
    # Path.exists and Path.is_file raise for another user's folder.
    folder = Path(model).resolve() if os.path.exists(model) else Path(model)  # noqa: PTH110
    run = folder.parent
    if folder.name == "model" and os.path.isfile(run / "base" / "config.json"):  # noqa: PTH113
        return str(run / "base"), None
    groups = _mapping(run / "resolved.yaml") if folder.name == "model" else {}
    settings = groups.get("model")
    found, revision = (settings.get("name"), settings.get("revision")) if isinstance(settings, dict) else (None, None)
    if found is None:
        found = _mapping(folder / "README.md").get("base_model")
        found = found[0] if isinstance(found, list) and found else found
        manifest = _mapping(folder / EXPORT_MANIFEST)
        revision = manifest.get("base_revision") if manifest.get("base") == found else None
    if not isinstance(found, str) or not found:
        return None
    return found, revision if isinstance(revision, str) else None


def _mapping(path: Path) -> dict[object, object]:
    """Return the YAML of a file, or of the head of a model card. Return {} if it is missing or damaged."""
    try:
        text = read_limited(path, MAX_SMALL_BYTES).decode()
        if path.suffix == ".md":
            head = CARD.match(text)
            text = head[1] if head else ""
        found = yaml.safe_load(text)
    except (OSError, *YAML_ERRORS):
        return {}
    return found if isinstance(found, dict) else {}
