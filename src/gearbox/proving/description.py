"""Describe what a proof ran on: the model's family, what was real and what was not, and one document with its marks."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from gearbox import ROOT
from gearbox.config.job import rehearsed
from gearbox.config.loader import is_local
from gearbox.config.recipe import BUILTIN_TASKS, Recipe
from gearbox.console import make_console
from gearbox.data.corpus import Builder
from gearbox.model import loading
from gearbox.model.pretrained import Pretrained
from gearbox.processes import num_visible_gpus
from gearbox.proving.record import Facts
from gearbox.reporting import preview
from gearbox.rows import stream

LIBRARIES = "torch accelerate deepspeed transformers peft bitsandbytes".split()
SHOWN_CHARACTERS = 1200  # of the document on the page
COMPARED_TOKENS = 64  # on which reloaded models are compared


def made() -> str:
    """Return when and where something was made, with the versions of the libraries."""
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    gpus = num_visible_gpus()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {f'{gpus} GPUs' if gpus else 'no GPU'}"
    return f"{datetime.now(UTC):%Y-%m-%d}: {machine}; Python {platform.python_version()};\n{versions}"


def describe(user_recipe: Recipe) -> Facts:
    """Return the facts of a rehearsal of the recipe. Raise UserError if its model or data cannot be read."""
    recipe = rehearsed(user_recipe)
    model, name = recipe.model, short(recipe.model.name)
    config = loading.load_config(model, rehearse=True)
    tokenizer = loading.load_tokenizer(model, recipe.data.chat_template, rehearse=True)
    is_own = Path(tokenizer.name_or_path) != loading.TINY or Path(model.name).resolve() == loading.TINY
    _, _, rows = stream.load_data(recipe, tokenizer, Builder(tell=make_console(speaks=True).print))
    _, tokens, _ = next(iter(rows.training.first_chunks(1)))
    place, runs, _ = preview.first_documents(rows.training, tokenizer, 1)[0]
    return Facts(
        family=config.model_type,
        architecture=", ".join(config.architectures or []) or type(config).__name__,
        model=name,
        config=_config_source(recipe),
        tokenizer=f"of {name}" if is_own else "of recipes/tiny (bytes), because the model's is not here",
        template=_template(recipe, is_own),
        data=_data(user_recipe, recipe),
        shown=preview.marked(runs, False, SHOWN_CHARACTERS).plain,
        place=short(place),
        tokens=tokens[:COMPARED_TOKENS].tolist(),
    )


def _config_source(recipe: Recipe) -> str:
    """Return where the config was read."""
    origin = Pretrained.of(recipe.model, is_offline=True)
    if origin.folder is not None:
        return f"config.json in {short(str(origin.folder))}"
    shipped = loading.ARCHITECTURES / f"{recipe.model.name.replace('/', '--')}.json"
    return short(str(shipped)) if shipped.is_file() else "config.json in the cache of the Hub"


def _template(recipe: Recipe, is_own: bool) -> str:
    if recipe.data.chat_template is not None:
        return short(recipe.data.chat_template)
    return f"of {short(recipe.model.name)}" if is_own else "of recipes/tiny"


def _data(user_recipe: Recipe, recipe: Recipe) -> str:
    names = ", ".join(short(source.path) for source in recipe.data.sources)
    if all(is_local(source.path) for source in user_recipe.data.sources):
        return names
    return f"{BUILTIN_TASKS}, because {', '.join(source.path for source in user_recipe.data.sources)} is on the Hub"


def short(text: str) -> str:
    """Return the text with paths relative to this repository, and without the home folder."""
    home = os.path.expanduser("~")  # noqa: PTH111  Path.home() raises without a home
    return text.replace(f"{ROOT}/", "").replace(f"{home}/", "~/")
