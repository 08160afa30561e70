"""Define what a proof records of each gear, and keep it in a file from which a killed command resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gearbox import filesystem
from gearbox.errors import UserError

MAX_BYTES = 2**24


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Compared(_Record):
    """The largest differences between two runs, by quantity (see pages/run_comparison.py)."""

    origin: str
    """The other run: its gear's label."""
    largest: dict[str, float]
    is_exact: bool = False
    """True if no bit of them differs, nor of any other tensor of the optimizer."""


class Exported(_Record):
    """The tensors of an exported model, compared with those of the first gear."""

    num_tensors: int
    num_equal: int
    """Tensors without any differing byte."""
    largest: float
    """Largest absolute difference of a weight."""


class GearResult(_Record):
    """The result of a recipe under a gear."""

    name: str
    """The gear's label, such as ddp-4."""
    gear: str
    num_ranks: int
    outcome: Literal["ran", "refused", "failed"] = "ran"
    problems: list[str] = []
    """The reasons of a refusal or of a failure."""
    losses: list[float] = []
    parity: Compared | None = None
    """None for the first gear that ran, with which the others are compared."""
    resumed: Compared | None = None
    """Resumed under the same gear, compared with the run that was not interrupted."""
    moved: Compared | None = None
    """Resumed from a checkpoint of another gear, compared with the first gear."""
    exported: Exported | None = None
    logits: float | None = None
    """Difference of the reloaded model's logits from those of the first gear, divided by their largest."""

    def fail(self, problem: str) -> None:
        """Record a problem that makes the gear fail."""
        if problem:
            self.outcome = "failed"
            self.problems.append(problem)


class Facts(_Record):
    """The model, the tokenizer and the data of a proof."""

    family: str
    architecture: str
    model: str
    config: str
    """Where its config was read, and what the rehearsal keeps of it."""
    tokenizer: str
    template: str
    data: str
    shown: str
    """The first training document, with marks around the trained tokens."""
    place: str
    """Where that document is."""
    tokens: list[int]
    """Its first tokens, on which reloaded models are compared."""


class Proof(_Record):
    """The results of a recipe under several gears."""

    key: str
    """Identifies the recipe, the gears and the code. A proof with another key starts over."""
    recipe: str
    method: str
    changes: list[tuple[str, str, str]] = []
    """Keys that the proof sets, each with its value and the reason."""
    made: str = ""
    """Date, machine and versions."""
    steps: int
    precision: str = "no"
    facts: Facts | None = None
    gears: list[GearResult] = []
    is_reloaded: bool = False
    """True once the exported models have been reloaded."""
    is_complete: bool = False

    @property
    def reference(self) -> GearResult | None:
        """The first gear that ran, with which the others are compared."""
        return next((one for one in self.gears if one.losses and one.parity is None), None)

    def of(self, outcome: str) -> list[GearResult]:
        """Return the gears with this outcome."""
        return [one for one in self.gears if one.outcome == outcome]

    def write(self, path: Path) -> None:
        """Replace the file."""
        filesystem.atomic_write(path, self.model_dump_json(indent=1) + "\n")


def read_proof(path: Path) -> Proof | None:
    """Return the proof in a file; None if there is none, or if it is damaged."""
    try:
        return Proof.model_validate_json(filesystem.read_limited(path, MAX_BYTES))
    except (OSError, ValueError, ValidationError, UserError):
        return None


def all_finite(numbers: list[float]) -> bool:
    """Return True if there are numbers, and all are finite."""
    return bool(numbers) and all(map(math.isfinite, numbers))
