"""Two runs held against each other, step by step: loss, gradient norm, trained weights and AdamW's first moment.

The weights and moments are read from the runs' checkpoints, in which they lie by name under every gear, one parameter
at a time. Each difference is a number without a unit:

loss, gradient norm   relative to the reference's
weights               L2 distance of all weights, relative to the farthest that the learning rates so far let them go:
                      a step of AdamW moves a weight by about its learning rate. Relative to the weights themselves a
                      run that trains nothing would pass at lr 1e-5.
moments               of the parameter that differs most, its root mean square relative to that of all moments. The
                      moments are the gradients, averaged over steps: they show a factor in them, which AdamW does not
                      let through to the weights, and a small parameter that the sum over all weights would hide.
"""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from gearbox.checkpoint import manifest, shards
from gearbox.errors import UserError
from gearbox.reporting import html_report

QUANTITIES = ("loss", "gradient norm", "weights", "moments")
# By the precision in use. Largest differences that were seen in 20 steps on CPUs, of ddp, fsdp, zero2 and zero3 with
# full fine-tuning, LoRA and QLoRA at learning rates from 1e-5 to 1e-2, and those of a loss averaged per micro batch:
#   fp32  8e-7, 1e-5, 2e-5, 3e-5 against 6e-3, 4e-2, 2e-1, 6e-2
#   bf16  1e-3, 2e-2, 1e-1, 5e-2 against the same: coarse faults alone are found. AdamW's first steps have the size of
#         the learning rate and the sign of the gradient, also where that is nothing but rounding.
TOLERANCES = {
    "no": {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3, "moments": 1e-3},
    "bf16": {"loss": 5e-3, "gradient norm": 5e-2, "weights": 1.5e-1, "moments": 1e-1},
}
LEGEND = (__doc__ or "").partition("\n\n")[2].strip()
HEADINGS = ["gear", *QUANTITIES, "verdict"]
FIRST_MOMENTS = ("exp_avg", "state1")  # torch's name and bitsandbytes'


@dataclass(frozen=True)
class Difference:
    """Of two runs after a step."""

    step: int
    same_rows: bool
    """Whether both have trained the same rows so far."""
    values: dict[str, float]
    """Of each quantity; weights and moments only where both runs have a checkpoint."""
    worst: dict[str, str]
    """The parameter that has the largest share in the weights', or in the moments' difference."""

    def over(self, tolerances: dict[str, float]) -> list[str]:
        """The quantities that differ by more."""
        return [quantity for quantity, value in self.values.items() if not value <= tolerances[quantity]]


@dataclass
class Compared:
    """A run, and how it differs from the reference."""

    name: str
    folder: Path
    problem: str = ""
    """Why there is nothing to compare."""
    differences: list[Difference] = field(default_factory=list)

    def compare_with(self, reference: Compared) -> None:
        try:
            self.differences = [] if self.problem else compare(reference.folder, self.folder)
        except (UserError, manifest.CorruptCheckpoint) as error:
            self.problem = str(error)

    def first_excess(self, tolerances: dict[str, float]) -> Difference | None:
        """The first step that differs by more than the tolerances, or than the rows."""
        return next((found for found in self.differences if found.over(tolerances) or not found.same_rows), None)

    def verdict(self, tolerances: dict[str, float]) -> str:
        """reference, equal, parts at step N, or does not run."""
        if self.problem or not self.differences:
            return "does not run" if self.problem else "reference"
        parting = self.first_excess(tolerances)
        return f"parts at step {parting.step}" if parting else "equal"

    def explanation(self, tolerances: dict[str, float]) -> str:
        """Its problem, or by what it parts; else nothing."""
        if self.problem or not (parting := self.first_excess(tolerances)):
            return self.problem
        return "; ".join(
            ["other rows"] * (not parting.same_rows)
            + [
                f"{name} by {parting.values[name]:.1e}"
                + (f", most in {parting.worst[name]}" if name in parting.worst else "")
                for name in parting.over(tolerances)
            ]
        )

    def largest(self, quantity: str) -> tuple[float, int]:
        """Its largest difference, and the step of it."""
        return max((found.values[quantity], found.step) for found in self.differences if quantity in found.values)


def compare(reference: Path, other: Path) -> list[Difference]:
    """Of two runs' folders, for each step. Raises UserError or checkpoint.Damaged where they cannot be compared."""
    found, travelled = [], 0.0
    ours, theirs = read_steps(other), read_steps(reference)
    if len(ours) != len(theirs):
        raise UserError(f"{other}: has {len(ours)} steps, and {reference} {len(theirs)}")
    for mine, its in zip(ours, theirs, strict=True):
        step = int(its["step"])
        travelled += its["lr"]
        values = {"loss": _relative(mine["loss"], its["loss"])}
        values["gradient norm"] = _relative(mine["grad_norm"], its["grad_norm"])
        worst: dict[str, str] = {}
        name = f"checkpoints/step-{step}"
        if (reference / name).exists():
            of_tensors = _tensors(_open(reference / name), _open(other / name), travelled)
            values |= {quantity: value for quantity, (value, _) in of_tensors.items()}
            worst = {quantity: parameter for quantity, (_, parameter) in of_tensors.items()}
        found.append(Difference(step, mine["rows_hash"] == its["rows_hash"], values, worst))
    return found


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The line of each training step."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "rows_hash" in line]


def table(compared: list[Compared], tolerances: dict[str, float]) -> Table:
    """Of the largest differences, each with its step."""
    made = Table(box=box.SIMPLE)
    for heading in HEADINGS:
        made.add_column(heading, no_wrap=True)
    for row in _rows(compared, tolerances):
        made.add_row(*row)
    return made


def write(path: Path, title: str, compared: list[Compared], tolerances: dict[str, float]) -> None:
    """The same on a page, with the curves."""
    figures = []
    ran = [one for one in compared if not one.problem]
    for quantity, key in (("loss", "loss"), ("gradient norm", "grad_norm")) if ran else ():
        figures.append(html_report.figure(quantity, {one.name: _points(one.folder, key) for one in ran}, striped=True))
    for quantity in QUANTITIES if len(ran) > 1 else ():
        lines: html_report.Lines = {
            one.name: [(found.step, found.values[quantity]) for found in one.differences if quantity in found.values]
            for one in ran
        }
        figures.append(html_report.figure(f"difference of {quantity}", lines, limit=tolerances[quantity]))
    explained = [f"{one.name}: {text}" for one in compared if (text := one.explanation(tolerances))]
    parts = [
        html_report.table(_rows(compared, tolerances), HEADINGS),
        *(f"<p>{html.escape(text)}</p>" for text in explained),
        "<h2>Curves</h2>",
        f'<div class="curves">{"".join(figures)}</div>',
        f"<h2>What is compared</h2><pre>{html.escape(LEGEND)}</pre>",
    ]
    html_report.write_page(path, title, parts)


def _points(run: Path, key: str) -> list[tuple[float, float]]:
    return [(line["step"], math.nan if line[key] is None else line[key]) for line in read_steps(run)]


def _rows(compared: list[Compared], tolerances: dict[str, float]) -> list[list[str]]:
    """The largest difference of each run in each quantity, and its step."""
    rows = []
    for one in compared:
        largest = [one.largest(quantity) for quantity in QUANTITIES] if one.differences else []
        cells = [f"{value:.0e} @{step}" for value, step in largest] or [""] * len(QUANTITIES)
        rows.append([one.name, *cells, one.verdict(tolerances)])
    return [*rows, ["tolerance", *(f"{tolerances[quantity]:.0e}" for quantity in QUANTITIES), ""]]


def _relative(mine: float | None, its: float | None) -> float:
    """None is a number that was not finite."""
    if mine is None or its is None:
        return math.inf
    return abs(mine - its) / (abs(its) or 1.0)


def _open(folder: Path) -> shards.ShardReader:
    return shards.ShardReader(folder, manifest.read_manifest(folder))


def _tensors(
    reference: shards.ShardReader, other: shards.ShardReader, travelled: float
) -> dict[str, tuple[float, str]]:
    """The differences of weights and moments, each with its worst parameter."""
    if other.shapes != reference.shapes:
        raise UserError(f"{other.folder}: holds other parameters than {reference.folder}")
    sizes = {name: math.prod(shape) for name, shape in reference.shapes.items()}
    moved: dict[str, float] = {}  # name to the sum of squared differences
    turned: dict[str, float] = {}
    moments = 0.0
    for name in sizes:
        moved[name] = _squares(other.read("parameter", name).double() - reference.read("parameter", name))
        for kind in {*reference.kinds(name)} & {*FIRST_MOMENTS}:  # none before the first step that was not skipped
            its = reference.read(kind, name)
            turned[name] = _squares(other.read(kind, name).double() - its)
            moments += _squares(its)
    weights = math.sqrt(sum(moved.values()) / sum(sizes.values())) / travelled
    scale = math.sqrt(moments / sum(sizes.values())) or 1.0
    of_moments = [(math.sqrt(squares / sizes[name]) / scale, name) for name, squares in turned.items()]
    return {"weights": (weights, max(moved, key=moved.__getitem__)), "moments": max(of_moments, default=(0.0, ""))}


def _squares(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().item()
