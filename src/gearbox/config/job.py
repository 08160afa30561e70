"""A job: what the user asked for, read from a recipe and a gear, and checked without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gearbox.config.compatibility import check_against
from gearbox.config.gear import Gear
from gearbox.config.loader import rehearsed
from gearbox.config.recipe import BatchPlan, Recipe


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
