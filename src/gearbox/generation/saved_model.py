"""Find the model that a user names, and the base that it was trained from, without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

from gearbox.config.loader import YAML_ERRORS
from gearbox.errors import UserError, nearest
from gearbox.filesystem import MAX_SMALL_BYTES, read_limited

CONFIGS = ("config.json", "adapter_config.json")
HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
CARD = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)


def find_model(name: str) -> str:
    """Return the folder or Hub id of the model that a folder, a run's folder or a Hub id names.

    Raise UserError if it is a run or a checkpoint without a saved model, or none of these.
    """
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


def base_of(model: str) -> str | None:
    """Return the folder or Hub id of the model from which a full fine-tune started, or None if it is not known.

    The run's own random weights come first, then model.name in its resolved.yaml, then base_model of the model card.
    """
    folder = Path(model)
    run = folder.parent
    if folder.name == "model" and (run / "base" / "config.json").is_file():
        return str(run / "base")
    groups = _mapping(run / "resolved.yaml") if folder.name == "model" else {}
    settings = groups.get("model")
    found = settings.get("name") if isinstance(settings, dict) else None
    if found is None:
        found = _mapping(folder / "README.md").get("base_model")
        found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, str) and found else None


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
