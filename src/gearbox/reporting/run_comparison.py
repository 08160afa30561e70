"""Two runs compared step by step: loss, gradient norm, trained weights and AdamW's first moment.

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
from typing import Any, NamedTuple

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
#   bf16  1e-3, 2e-2, 1e-1, 5e-2 against the same: only coarse faults are found. AdamW's first steps have the size of
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
    """How two runs differ after a step."""

    step: int
    same_rows: bool
    """Whether both have trained the same rows so far."""
    values: dict[str, float]
    """Difference of each quantity; weights and moments only where both runs have a checkpoint."""
    worst: dict[str, str]
    """The parameter with the largest share in the weights', or in the moments' difference."""

    def over(self, tolerances: dict[str, float]) -> list[str]:
        """Return the quantities that differ by more than their tolerance."""
        return [quantity for quantity, value in self.values.items() if not value <= tolerances[quantity]]


@dataclass
class Compared:
    """A run and how it differs from the reference."""

    name: str
    folder: Path
    problem: str = ""
    """Why there is nothing to compare."""
    differences: list[Difference] = field(default_factory=list)

    def compare_with(self, reference: Compared) -> None:
        """Fill in the differences, or the problem."""
        try:
            self.differences = [] if self.problem else compare(reference.folder, self.folder)
        except (UserError, manifest.CorruptCheckpoint) as error:
            self.problem = str(error)

    def first_excess(self, tolerances: dict[str, float]) -> Difference | None:
        """Return the first step that differs by more than the tolerances, or in its rows."""
        return next((step for step in self.differences if step.over(tolerances) or not step.same_rows), None)

    def verdict(self, tolerances: dict[str, float]) -> str:
        """Return `reference`, `equal`, `parts at step N` or `does not run`."""
        if self.problem or not self.differences:
            return "does not run" if self.problem else "reference"
        excess = self.first_excess(tolerances)
        return f"parts at step {excess.step}" if excess else "equal"

    def explanation(self, tolerances: dict[str, float]) -> str:
        """Return the problem of the run, or in what it differs first; an empty text for neither."""
        if self.problem or not (excess := self.first_excess(tolerances)):
            return self.problem
        reasons = [] if excess.same_rows else ["other rows"]
        for name in excess.over(tolerances):
            parameter = f", most in {excess.worst[name]}" if name in excess.worst else ""
            reasons.append(f"{name} by {excess.values[name]:.1e}{parameter}")
        return "; ".join(reasons)

    def largest(self, quantity: str) -> tuple[float, int]:
        """Return the largest difference in a quantity, and its step."""
        return max((step.values[quantity], step.step) for step in self.differences if quantity in step.values)


def compare(reference: Path, other: Path) -> list[Difference]:
    """Return the difference of two runs after each step, given their folders.

    Raises UserError or CorruptCheckpoint where they cannot be compared.
    """
    steps, reference_steps = read_steps(other), read_steps(reference)
    if len(steps) != len(reference_steps):
        raise UserError(f"{other}: has {len(steps)} steps, and {reference} {len(reference_steps)}")
    differences, sum_of_rates = [], 0.0
    for line, expected in zip(steps, reference_steps, strict=True):
        step = int(expected["step"])
        sum_of_rates += expected["lr"]
        values = {
            "loss": _relative(line["loss"], expected["loss"]),
            "gradient norm": _relative(line["grad_norm"], expected["grad_norm"]),
        }
        worst: dict[str, str] = {}
        checkpoint = f"checkpoints/step-{step}"
        if (reference / checkpoint).exists():
            tensors = _compare_tensors(_open(reference / checkpoint), _open(other / checkpoint), sum_of_rates)
            values |= {quantity: difference.value for quantity, difference in tensors.items()}
            worst = {quantity: difference.worst for quantity, difference in tensors.items()}
        differences.append(Difference(step, line["rows_hash"] == expected["rows_hash"], values, worst))
    return differences


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the line of each training step in metrics.jsonl."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "rows_hash" in line]


def table(compared: list[Compared], tolerances: dict[str, float]) -> Table:
    """Return a table of the largest differences, each with its step."""
    result = Table(box=box.SIMPLE)
    for heading in HEADINGS:
        result.add_column(heading, no_wrap=True)
    for row in _rows(compared, tolerances):
        result.add_row(*row)
    return result


def write(path: Path, title: str, compared: list[Compared], tolerances: dict[str, float]) -> None:
    """Write the table to an HTML page, with the curves."""
    explained = [f"{run.name}: {text}" for run in compared if (text := run.explanation(tolerances))]
    sections = [
        html_report.table(_rows(compared, tolerances), HEADINGS),
        *(f"<p>{html.escape(text)}</p>" for text in explained),
        "<h2>Curves</h2>",
        f'<div class="curves">{"".join(_figures(compared, tolerances))}</div>',
        f"<h2>What is compared</h2><pre>{html.escape(LEGEND)}</pre>",
    ]
    html_report.write_page(path, title, sections)


def _figures(compared: list[Compared], tolerances: dict[str, float]) -> list[str]:
    """Return the curves of the runs that have run, and those of their differences."""
    completed = [run for run in compared if not run.problem]
    figures = []
    for quantity, key in (("loss", "loss"), ("gradient norm", "grad_norm")) if completed else ():
        curves = {run.name: _points(run.folder, key) for run in completed}
        figures.append(html_report.figure(quantity, curves, striped=True))
    for quantity in QUANTITIES if len(completed) > 1 else ():
        lines: html_report.Lines = {
            run.name: [(step.step, step.values[quantity]) for step in run.differences if quantity in step.values]
            for run in completed
        }
        figures.append(html_report.figure(f"difference of {quantity}", lines, limit=tolerances[quantity]))
    return figures


def _points(run: Path, key: str) -> list[tuple[float, float]]:
    return [(line["step"], math.nan if line[key] is None else line[key]) for line in read_steps(run)]


def _rows(compared: list[Compared], tolerances: dict[str, float]) -> list[list[str]]:
    """Return the largest difference of each run in each quantity with its step, and the verdict."""
    rows = []
    for run in compared:
        largest = [run.largest(quantity) for quantity in QUANTITIES] if run.differences else []
        cells = [f"{value:.0e} @{step}" for value, step in largest] or [""] * len(QUANTITIES)
        rows.append([run.name, *cells, run.verdict(tolerances)])
    return [*rows, ["tolerance", *(f"{tolerances[quantity]:.0e}" for quantity in QUANTITIES), ""]]


def _relative(value: float | None, expected: float | None) -> float:
    """Return the relative difference; None is a number that was not finite."""
    if value is None or expected is None:
        return math.inf
    return abs(value - expected) / (abs(expected) or 1.0)


def _open(folder: Path) -> shards.ShardReader:
    return shards.ShardReader(folder, manifest.read_manifest(folder))


class _TensorDifference(NamedTuple):
    value: float
    worst: str
    """The parameter with the largest share."""


def _compare_tensors(
    reference: shards.ShardReader, other: shards.ShardReader, sum_of_rates: float
) -> dict[str, _TensorDifference]:
    """Return the differences of weights and moments. `sum_of_rates` is of the learning rates of all steps so far."""
    if other.shapes != reference.shapes:
        raise UserError(f"{other.folder}: holds other parameters than {reference.folder}")
    sizes = {name: math.prod(shape) for name, shape in reference.shapes.items()}
    weights: dict[str, float] = {}  # by parameter: the sum of squared differences
    moments: dict[str, float] = {}
    squared_moments = 0.0
    for name in sizes:
        weights[name] = _squares(other.read("parameter", name).double() - reference.read("parameter", name))
        for kind in {*reference.kinds(name)} & {*FIRST_MOMENTS}:  # none before the first step that was not skipped
            expected = reference.read(kind, name)
            moments[name] = _squares(other.read(kind, name).double() - expected)
            squared_moments += _squares(expected)
    num_weights = sum(sizes.values())
    distance = math.sqrt(sum(weights.values()) / num_weights) / sum_of_rates
    scale = math.sqrt(squared_moments / num_weights) or 1.0
    of_moments = [
        _TensorDifference(math.sqrt(squares / sizes[name]) / scale, name) for name, squares in moments.items()
    ]
    return {
        "weights": _TensorDifference(distance, max(weights, key=weights.__getitem__)),
        "moments": max(of_moments, default=_TensorDifference(0.0, "")),
    }


def _squares(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().item()
