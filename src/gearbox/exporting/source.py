"""Find what the user wants to export: a checkpoint, a run's saved model, or any saved model or adapter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import ValidationError

from gearbox import filesystem
from gearbox.checkpoint import folders
from gearbox.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest, verify_shards
from gearbox.config.adapter_settings import read_adapter_config
from gearbox.config.loader import YAML_ERRORS
from gearbox.config.old_keys import renamed
from gearbox.config.recipe import Recipe
from gearbox.console import Screen
from gearbox.data.row_formats import Turn
from gearbox.errors import UserError, one_line
from gearbox.launch.outcome import read_outcome

Raw = Turn  # parsed JSON or YAML, or options of a library: any values
MODEL, ADAPTER = "config.json", "adapter_config.json"


@dataclass(frozen=True)
class Source:
    """A folder to export, and what is known about its training."""

    folder: Path
    """A checkpoint, or a folder that `from_pretrained` loads."""
    run: Path | None = None
    """The run's folder, with metrics.jsonl and loss.png."""
    recipe: Recipe | None = None
    """The resolved recipe; None for a model or adapter without its run."""
    manifest: Manifest | None = None
    """The manifest of a checkpoint, else None."""
    base: str | None = None
    """Folder or Hub id of the model that was trained, if it is known."""
    revision: str | None = None
    """Revision of a base on the Hub."""

    @property
    def is_adapter(self) -> bool:
        """True if only an adapter was trained."""
        if self.manifest is not None and self.recipe is not None:
            return self.recipe.adapter.method != "none"
        return (self.folder / ADAPTER).exists()

    @property
    def is_quantized(self) -> bool:
        """True if the base was quantized while the adapter was trained."""
        return self.is_adapter and self.recipe is not None and self.recipe.model.quantize is not None

    @property
    def step(self) -> int | None:
        """The step of a checkpoint, or that of the saved model of a run, if it is known."""
        if self.manifest is not None:
            return self.manifest.step
        status = {} if self.run is None else read_outcome(self.run / "status.json")
        step = status.get("model_step", status.get("step"))
        return step if isinstance(step, int) else None


def find(path: Path, base: str | None, screen: Screen) -> Source:
    """Return what to export. `base` replaces the base that was recorded. Raise UserError if nothing is found there.

    Of a run, this is `model/` if the run is done, else its newest checkpoint that is not damaged.
    """
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"SOURCE: {one_line(error, 100)}; give the folder of a run or of a checkpoint") from None
    if not is_folder:
        raise UserError(f"SOURCE: {path} is not a folder; give a run such as runs/first, or one of its checkpoints")
    if (path / MANIFEST).exists():
        try:
            source = _of_checkpoint(path)
        except CorruptCheckpoint as error:
            raise UserError(f"{path}: {error}; export another checkpoint") from None
    elif (path / MODEL).exists() or (path / ADAPTER).exists():
        source = _of_saved(path)
    else:
        source = _of_run(path, screen)
    return source if base in (None, source.base) else replace(source, base=base, revision=None)


def _of_run(run: Path, screen: Screen) -> Source:
    saved = run / "model"
    if read_outcome(run / "status.json").get("outcome") == "done" and any(
        (saved / name).is_file() for name in (MODEL, ADAPTER)
    ):
        return _of_saved(saved)
    for _, folder in folders.list_checkpoints(run / "checkpoints"):
        try:
            return _of_checkpoint(folder)
        except CorruptCheckpoint as error:
            screen.print(f"skipping {folder}: {error}")
    raise UserError(f"SOURCE: {run} has neither a saved model nor a checkpoint; give the folder of a run with one")


def _of_checkpoint(folder: Path) -> Source:
    """Return a checkpoint whose every byte was verified. Raise CorruptCheckpoint if it is damaged."""
    manifest = read_manifest(folder)
    verify_shards(folder, manifest.files)
    run = folder.resolve().parent.parent
    recipe = _recipe(manifest.recipe, folder / MANIFEST)
    return Source(
        folder, run if (run / "checkpoints").is_dir() else None, recipe, manifest, *_trained_from(recipe, run)
    )


def _trained_from(recipe: Recipe, run: Path) -> tuple[str, str | None]:
    """Return the folder or Hub id of the model that a run trained, and its revision."""
    if recipe.model.init == "random" or recipe.run.rehearse:
        return str(run / "base"), None
    return recipe.model.name, recipe.model.revision


def _of_saved(folder: Path) -> Source:
    """Return a saved model or adapter, with its recipe if it is in the folder of its run."""
    run = folder.resolve().parent
    resolved, recipe = run / "resolved.yaml", None
    if folder.resolve().name == "model" and resolved.is_file():
        try:
            content = yaml.safe_load(filesystem.read_limited(resolved, filesystem.MAX_SMALL_BYTES).decode())
        except (OSError, *YAML_ERRORS) as error:
            raise UserError(f"{resolved}: cannot be read: {one_line(error)}; export a checkpoint instead") from None
        recipe = _recipe(content, resolved)
    found = Source(folder, None) if recipe is None else Source(folder, run, recipe, None, *_trained_from(recipe, run))
    if not (folder / ADAPTER).exists():
        return found
    try:
        settings = read_adapter_config(folder)
    except ValueError as error:
        raise UserError(f"SOURCE: {str(folder)!r} {error}") from None
    return replace(found, base=settings.base_model_name_or_path, revision=settings.revision)


def _recipe(content: Raw, path: Path) -> Recipe:
    try:
        return Recipe.model_validate(renamed(dict(content))[0])
    except (ValidationError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is not the recipe of this version: {one_line(error, 200)}") from None
