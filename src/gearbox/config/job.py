"""A job: what the user asked for, read from a recipe and a gear, and checked without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gearbox.config.compatibility import check_against
from gearbox.config.gear import Gear
from gearbox.config.loader import rehearsed
from gearbox.config.recipe import Recipe


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of a step are divided: every data-parallel rank runs the same number of micro batches."""

    rows: int
    """Rows of one optimizer step, over all ranks."""
    data_parallel: int
    """Ranks with rows of their own."""
    micro_rows: int
    """Rows of one rank in one forward pass."""
    accumulation_steps: int
    """Micro batches of one rank in one optimizer step."""

    @classmethod
    def divide(cls, rows: int, data_parallel: int, micro_rows: int) -> BatchPlan:
        """Divide `rows` into micro batches of at most `micro_rows`; the last ones may hold empty rows."""
        micro_rows = min(micro_rows, -(-rows // data_parallel))
        return cls(rows, data_parallel, micro_rows, -(-rows // (data_parallel * micro_rows)))

    @property
    def num_padded_rows(self) -> int:
        """Rows of one step with the empty ones that fill the last micro batches."""
        return self.data_parallel * self.accumulation_steps * self.micro_rows

    @property
    def num_empty_rows(self) -> int:
        """Rows without targets that fill the last micro batches."""
        return self.num_padded_rows - self.rows


@dataclass(frozen=True)
class Job:
    """What to train, under which gear, and how the rows of a step are divided."""

    recipe_path: Path
    recipe: Recipe
    gear: Gear
    batch: BatchPlan
    hints: tuple[str, ...] = ()
    """What the user should change some day, such as an old key."""

    @classmethod
    def of(cls, recipe_path: Path, recipe: Recipe, gear: Gear, hints: Sequence[str] = ()) -> Job:
        """Join a recipe and a gear. Raises UserError with every reason why they cannot be joined."""
        if recipe.run.rehearse:
            recipe = rehearsed(recipe)
        batch = BatchPlan.divide(recipe.batch.rows, gear.data_parallel, recipe.batch.micro_rows)
        check_against(gear, recipe, recipe_path, batch)
        return cls(recipe_path, recipe, gear, batch, tuple(hints))

    @property
    def run_name(self) -> str:
        """The name of the run's folder."""
        return self.recipe.run.name or f"{self.recipe_path.stem}-{self.gear.name}"
