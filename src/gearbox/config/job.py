"""Combine a recipe and a gear into a job, shorten it for a rehearsal, and find keys that have no effect in it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gearbox import processes
from gearbox.config.compatibility import conflicts, has_flash_attention
from gearbox.config.gear import EngineName, Gear
from gearbox.config.loader import is_local, matches
from gearbox.config.recipe import BUILTIN, BUILTIN_PREFERENCES, BUILTIN_TASKS, ONE_OF, Recipe
from gearbox.config.recipe_values import listed
from gearbox.errors import UserError

STAND_INS = {"runs/tiny-forms/model": "recipes/tiny"}
"""The folder of the same architecture, for a model that a run makes."""
REHEARSED_ROWS, REHEARSED_TOKENS, REHEARSED_STEPS = 8, 256, 20


@dataclass(frozen=True)
class BatchPlan:
    """A division of a step's rows: every data-parallel rank runs the same number of micro-batches."""

    rows: int
    """Rows of one optimizer step, over all ranks."""
    data_parallel: int
    """Number of ranks that take different rows."""
    micro_rows: int
    """Rows per rank in one forward pass."""
    accumulation_steps: int
    """Micro-batches per rank in one optimizer step."""

    @classmethod
    def divide(cls, rows: int, data_parallel: int, micro_rows: int) -> BatchPlan:
        """Divide `rows` into micro-batches of at most `micro_rows`. The last micro-batches may contain empty rows."""
        micro_rows = min(micro_rows, -(-rows // data_parallel))
        return cls(rows, data_parallel, micro_rows, -(-rows // (data_parallel * micro_rows)))

    @property
    def num_padded_rows(self) -> int:
        """Rows of one step, including the empty rows that fill the last micro-batches."""
        return self.data_parallel * self.accumulation_steps * self.micro_rows

    @property
    def num_empty_rows(self) -> int:
        """Rows without targets that fill the last micro-batches."""
        return self.num_padded_rows - self.rows


@dataclass(frozen=True)
class Job:
    """A recipe, the gear to run it under, and the division of a step's rows."""

    recipe_path: Path
    recipe: Recipe
    gear: Gear
    batch: BatchPlan
    hints: tuple[str, ...] = ()
    """Changes to suggest to the user, such as replacing an old key or removing an unused one."""
    full_size: Recipe | None = None
    """The recipe that a rehearsal stands for; None for any other run."""

    @classmethod
    def of(cls, recipe_path: Path, recipe: Recipe, gear: Gear, hints: Sequence[str] = ()) -> Job:
        """Combine a recipe and a gear. Raise UserError with every reason why they cannot be combined."""
        job = cls.unchecked(recipe_path, recipe, gear, hints)
        if problems := conflicts(job.gear, job.recipe, recipe_path, job.batch):
            raise UserError("\n".join(problems))
        return job

    @classmethod
    def unchecked(cls, recipe_path: Path, recipe: Recipe, gear: Gear, hints: Sequence[str] = ()) -> Job:
        """Combine a recipe and a gear, which `gearbox.checks` compares."""
        full_size = recipe if recipe.run.rehearse else None
        if full_size is not None:
            recipe = rehearsed(recipe, gear.data_parallel)
        batch = BatchPlan.divide(recipe.batch.rows, gear.data_parallel, recipe.batch.micro_rows)
        return cls(recipe_path, recipe, gear, batch, tuple(hints), full_size)

    @property
    def run_name(self) -> str:
        """The name of the run folder."""
        return self.recipe.run.name or f"{self.recipe_path.stem}-{self.gear.name}"


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
        lambda recipe: not recipe.eval.holds_out and not recipe.eval.prompts,
        "no document is held out",
    ),
    Unused(
        "eval.samples",
        lambda recipe: not recipe.eval.holds_out and bool(recipe.eval.prompts),
        "no document is held out",
    ),
    Unused("perf.pass_tokens", lambda recipe: not recipe.data.packing, "data.packing is false"),
    Unused("schedule.decay", lambda recipe: recipe.schedule.name != "wsd", "schedule.name is not wsd"),
    Unused(
        "eval.sample_tokens",
        lambda recipe: not (recipe.eval.num_questions or recipe.eval.prompts),
        "eval.samples is 0",
    ),
    Unused(
        "preference.beta preference.sft_weight",
        lambda recipe: not recipe.compares,
        "train.objective compares no answers",
    ),
    Unused(
        "preference.label_smoothing preference.margin",
        lambda recipe: recipe.train.objective not in ("dpo", "simpo"),
        "train.objective is neither dpo nor simpo",
    ),
    Unused(
        "preference.desirable_weight preference.undesirable_weight",
        lambda recipe: recipe.train.objective != "kto",
        "train.objective is not kto",
    ),
    Unused("eval.metric_documents", lambda recipe: recipe.eval.metric is None, "eval.metric is null"),
]
"""Keys whose effect depends only on the recipe and on which files exist."""
BY_GEAR: list[tuple[str, tuple[EngineName, ...], str]] = [
    ("perf.prefetch", ("fsdp",), "it sets how far FSDP2 gathers ahead"),
    ("perf.ddp_compression", ("ddp",), "only DDP sends whole gradients"),
    ("perf.pass_tokens", ("single", "ddp"), "this gear computes complete rows"),
]
"""Keys that have an effect under some engines."""
OF_CHATS = Unused("data.chat_template data.supervise data.roles", lambda _: True, "all documents are plain text")


def unused_keys(recipe: Recipe, gear: Gear) -> list[str]:
    """Return a line for each group of keys that are set and have no effect, apart from the data's content."""
    by_gear = [Unused(key, lambda _: True, why) for key, engines, why in BY_GEAR if gear.engine not in engines]
    return [*_lines(recipe, [*BY_RECIPE, *by_gear])]


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
    return path not in BUILTIN and any(
        found.suffix.lower() == ".txt" or (found.is_dir() and any(found.rglob("*.[tT][xX][tT]")))
        for found in matches(path)
    )


def rehearsed(recipe: Recipe, data_parallel: int = 1) -> Recipe:
    """Return the recipe for a rehearsal on this many data-parallel ranks.

    Random weights replace saved ones, and built-in data replace Hub data. A saved adapter's weights become random too.
    Steps and rows become few, with at least two accumulation rounds. Rows become short if the data are built in, so
    that no document of yours is cut. What the command line gives stays. Flash attention, Liger and torchao need their
    packages and a GPU.
    """
    model: dict[str, Any] = {"init": "random"}
    if not Path(recipe.model.name).exists():
        model["name"] = STAND_INS.get(recipe.model.name, recipe.model.name)
    has_gpu = processes.num_visible_gpus() > 0
    if recipe.model.attention == "flash_attention_2" and not (has_gpu and has_flash_attention()):
        model["attention"] = "auto"
    perf: dict[str, Any] = {}
    if recipe.perf.kernels == "liger" and not (has_gpu and importlib.util.find_spec("liger_kernel")):
        perf["kernels"] = "auto"
    if not (has_gpu and importlib.util.find_spec("torchao")):
        perf["float8"] = False
    changes: dict[str, Any] = {"model": recipe.model.model_copy(update=model)}
    changes["perf"] = recipe.perf.model_copy(update=perf)
    changes["adapter"] = recipe.adapter.model_copy(update={"path": None})  # its weights fit only the full-size model
    are_local = all(is_local(source.path) for source in recipe.data.sources)
    if not are_local:
        built_in = BUILTIN_PREFERENCES if recipe.compares else BUILTIN_TASKS
        changes["data"] = recipe.data.model_copy(update={"path": built_in, "form": "auto", "fields": {}})
    evaluated = listed(recipe.eval.path or [])
    if evaluated and not (are_local and all(is_local(source.path) for source in evaluated)):
        changes["eval"] = recipe.eval.model_copy(update={"path": None})
    return _shortened(recipe.model_copy(update=changes), data_parallel)


def _shortened(recipe: Recipe, data_parallel: int) -> Recipe:
    """Return the recipe with few steps and few rows, apart from what the command line gives."""
    batch, train, given = recipe.batch, recipe.train, recipe.given
    sizes: dict[str, int] = {}
    rows = max(REHEARSED_ROWS, 2 * data_parallel)
    if batch.rows > rows and "batch.rows" not in given:
        sizes = {"rows": rows, "micro_rows": min(batch.micro_rows, rows // (2 * data_parallel))}
    if all(source.path in BUILTIN for source in recipe.data.sources):
        sizes["row_tokens"] = min(batch.row_tokens, REHEARSED_TOKENS)
    sizes = {key: size for key, size in sizes.items() if f"batch.{key}" not in given}
    if given.isdisjoint(ONE_OF):
        train = train.model_copy(update={"steps": min(train.steps or REHEARSED_STEPS, REHEARSED_STEPS), "epochs": None})
    schedule = recipe.schedule
    if train.steps is not None and isinstance(schedule.warmup, int) and schedule.warmup >= train.steps:
        schedule = schedule.model_copy(update={"warmup": train.steps // 4})
    if train.steps is not None and isinstance(schedule.decay, int):
        schedule = schedule.model_copy(update={"decay": min(schedule.decay, train.steps // 4)})
    changes = {"batch": batch.model_copy(update=sizes), "train": train, "schedule": schedule}
    return recipe.model_copy(update=changes)
