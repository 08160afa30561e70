"""Combine a recipe and a gear into a job, checked without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gearbox.config.compatibility import check_against
from gearbox.config.gear import Gear
from gearbox.config.loader import located, rehearsed
from gearbox.config.recipe import Recipe
from gearbox.config.unused_keys import unused_keys


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
        unused = [located(line, recipe, recipe_path) for line in unused_keys(recipe)]
        full_size = recipe if recipe.run.rehearse else None
        if full_size is not None:
            recipe = rehearsed(recipe, gear.data_parallel)
        batch = BatchPlan.divide(recipe.batch.rows, gear.data_parallel, recipe.batch.micro_rows)
        check_against(gear, recipe, recipe_path, batch)
        return cls(recipe_path, recipe, gear, batch, (*hints, *unused), full_size)

    @property
    def run_name(self) -> str:
        """The name of the run folder."""
        return self.recipe.run.name or f"{self.recipe_path.stem}-{self.gear.name}"
