"""Find keys of a recipe that have no effect, so that a run can name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gearbox.config.loader import is_local, matches
from gearbox.config.recipe import BUILTIN_TASKS, Recipe


class Unused(NamedTuple):
    """Keys that have no effect if `applies` is true."""

    keys: str
    applies: Callable[[Recipe], bool]
    reason: str


BY_RECIPE = [
    Unused(
        "adapter.r adapter.alpha adapter.rslora adapter.dropout adapter.targets",
        lambda recipe: recipe.adapter.method == "none",
        "adapter.method is none",
    ),
    Unused("model.revision", lambda recipe: Path(recipe.model.name).is_dir(), "model.name is a folder"),
    Unused("data.split", lambda recipe: not any(map(_has_splits, _paths(recipe))), "data.path has no splits"),
    Unused("data.text_unit", lambda recipe: not any(map(_may_be_text, _paths(recipe))), "data.path has no .txt file"),
    Unused("eval.fraction", lambda recipe: recipe.eval.path is not None, "eval.path gives the documents"),
    Unused(
        "eval.every eval.samples eval.sample_tokens",
        lambda recipe: recipe.eval.path is None and recipe.eval.fraction == 0,
        "no document is held out",
    ),
    Unused("schedule.decay", lambda recipe: recipe.schedule.name != "wsd", "schedule.name is not wsd"),
    Unused("eval.sample_tokens", lambda recipe: recipe.eval.samples == 0, "eval.samples is 0"),
]
"""Keys whose effect depends only on the recipe and on which files exist."""
OF_CHATS = Unused("data.chat_template data.supervise data.roles", lambda _: True, "all documents are plain text")


def unused_keys(recipe: Recipe) -> list[str]:
    """Return a line for each group of keys that are set and have no effect, apart from the data's content."""
    return [*_lines(recipe, BY_RECIPE)]


def unused_keys_of_data(recipe: Recipe, forms: Iterable[str]) -> list[str]:
    """Return the same for documents in these forms, which are known once the data has been read."""
    return [*_lines(recipe, [OF_CHATS])] if set(forms) == {"text"} else []


def _lines(recipe: Recipe, table: list[Unused]) -> Iterator[str]:
    for unused in table:
        keys = [key for key in unused.keys.split() if _is_changed(recipe, key)]
        if keys and unused.applies(recipe):
            yield f"{', '.join(keys)}: no effect, because {unused.reason}"


def _is_changed(recipe: Recipe, key: str) -> bool:
    """Return True if the recipe gives the key a value that is neither its default nor 0."""
    group, name = key.split(".")
    settings = getattr(recipe, group)
    value = getattr(settings, name)
    return bool(value) and name in settings.model_fields_set and value != type(settings).model_fields[name].default


def _paths(recipe: Recipe) -> list[str]:
    """Return the path of each source."""
    return [source.path for source in recipe.data.sources]


def _has_splits(path: str) -> bool:
    """Return True for a Hub dataset, and for a saved dataset with several splits."""
    return not is_local(path) or any((found / "dataset_dict.json").is_file() for found in matches(path))


def _may_be_text(path: str) -> bool:
    """Return True for a .txt file and for a folder of files, which may contain one."""
    return path != BUILTIN_TASKS and any(
        found.suffix.lower() == ".txt" or (found.is_dir() and any(found.rglob("*.[tT][xX][tT]")))
        for found in matches(path)
    )
