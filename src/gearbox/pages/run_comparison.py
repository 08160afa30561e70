"""Compare two runs step by step: loss, gradient norm, trained weights and AdamW's first moment.

Weights and moments are read from the runs' checkpoints, which store each parameter by name under every gear.
All differences are numbers without a unit:

Loss, gradient norm   Relative to the reference run's value.
Weights               L2 distance over all weights, divided by the largest distance that the learning rates so far
                      allow. One AdamW step moves a weight by about the learning rate. Dividing by the weights
                      themselves would pass a run that trains nothing at lr 1e-5.
Moments               Root mean square difference in the parameter that differs most, divided by the root mean square
                      of all moments. The first moments are averaged gradients, so they reveal a constant factor that
                      AdamW hides from the weights. They also reveal a small parameter that a sum over all weights
                      would hide.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table

from gearbox.checkpoint import manifest, shards
from gearbox.errors import UserError
from gearbox.metrics import metrics_file
from gearbox.pages import charts, page
from gearbox.pages.charts import Chart, Line

QUANTITIES = ("loss", "gradient norm", "weights", "moments")
# Tolerances by precision. We measured 20 steps of ddp, fsdp, zero2 and zero3 on CPUs, with full fine-tuning, LoRA and
# QLoRA, at learning rates from 1e-5 to 1e-2. Largest differences between correct runs, in the order of QUANTITIES:
#   fp32: 8e-7, 1e-5, 2e-5, 3e-5.
#   bf16: 1e-3, 2e-2, 1e-1, 5e-2.
# A loss averaged per micro-batch, a common fault, differs by 6e-3, 4e-2, 2e-1, 6e-2.
# In bf16 only coarse faults are found. AdamW's first steps have the size of the learning rate and the sign of the
# gradient, even if that sign is only a rounding error.
TOLERANCES = {
    "no": {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3, "moments": 1e-3},
    "bf16": {"loss": 5e-3, "gradient norm": 5e-2, "weights": 1.5e-1, "moments": 1e-1},
}
LEGEND = (__doc__ or "").partition("\n\n")[2].strip()
HEADINGS = ["gear", *QUANTITIES, "verdict"]
LOWEST = 1e-9  # smallest difference drawn: a logarithmic scale cannot show 0
FIRST_MOMENTS = ("exp_avg", "state1", "momentum_buffer")  # the names in torch, in bitsandbytes and under Muon


@dataclass(frozen=True)
class Difference:
    """The differences between two runs after one step."""

    step: int
    same_rows: bool
    """Whether both runs have trained on the same rows so far."""
    values: dict[str, float]
    """Difference in each quantity. Weights and moments are present only if both runs have a checkpoint."""
    worst: dict[str, str]
    """The parameter that contributes most to the difference of `weights` and of `moments`."""
    is_exact: bool
    """Whether loss, gradient norm, weights and all of the optimizer's tensors have the same bits."""

    def over(self, tolerances: dict[str, float]) -> list[str]:
        """Return the quantities whose difference exceeds their tolerance."""
        return [quantity for quantity, value in self.values.items() if not value <= tolerances[quantity]]


@dataclass
class Compared:
    """A run and its differences from the reference."""

    name: str
    folder: Path
    problem: str = ""
    """Reason why the run cannot be compared, or an empty text."""
    differences: list[Difference] = field(default_factory=list)
    after: int = 0
    """The step that the run resumed from. Only later steps are compared."""

    def compare_with(self, reference: Compared) -> None:
        """Set `differences`, or `problem` if the runs cannot be compared."""
        try:
            self.differences = [] if self.problem else compare(reference.folder, self.folder, self.after)
        except (UserError, manifest.CorruptCheckpoint) as error:
            self.problem = str(error)

    def first_excess(self, tolerances: dict[str, float]) -> Difference | None:
        """Return the first step that exceeds a tolerance or trains different rows, or None."""
        return next((step for step in self.differences if step.over(tolerances) or not step.same_rows), None)

    @property
    def is_exact(self) -> bool:
        """True if no bit differs in any step."""
        return not self.problem and all(step.is_exact for step in self.differences)

    def verdict(self, tolerances: dict[str, float]) -> str:
        """Return `reference`, `equal`, `failed`, or `diverges @N` for step N."""
        if self.problem or not self.differences:
            return "failed" if self.problem else "reference"
        excess = self.first_excess(tolerances)
        return f"diverges @{excess.step}" if excess else "equal"

    def explanation(self, tolerances: dict[str, float]) -> str:
        """Return the problem, or the quantities of the first divergence, or an empty text."""
        if self.problem or not (excess := self.first_excess(tolerances)):
            return self.problem
        reasons = [] if excess.same_rows else ["rows"]
        for name in excess.over(tolerances):
            parameter = f" (mostly in {excess.worst[name]})" if name in excess.worst else ""
            reasons.append(f"{name} by {excess.values[name]:.1e}{parameter}")
        return f"step {excess.step} differs in " + "; ".join(reasons)

    def largest(self, quantity: str) -> tuple[float, int]:
        """Return the largest difference in a quantity and the step of that difference."""
        return max((step.values[quantity], step.step) for step in self.differences if quantity in step.values)


def compare(reference: Path, other: Path, after: int = 0) -> list[Difference]:
    """Return the differences between two runs after each step that follows step `after`, given their folders.

    Raise UserError or CorruptCheckpoint if the runs cannot be compared.
    """
    steps, reference_steps = ([line for line in read_steps(run) if line["step"] > after] for run in (other, reference))
    if len(steps) != len(reference_steps):
        raise UserError(f"{other}: has {len(steps)} steps, but {reference} has {len(reference_steps)}")
    if [line["step"] for line in steps] != [line["step"] for line in reference_steps]:
        raise UserError(f"{other}: metrics.jsonl lacks steps that the one of {reference} has; run it again")
    differences, sum_of_rates = [], 0.0
    for line, expected in zip(steps, reference_steps, strict=True):
        step = int(expected["step"])
        sum_of_rates += expected["lr"]
        values = {
            "loss": _relative(line["loss"], expected["loss"]),
            "gradient norm": _relative(line["grad_norm"], expected["grad_norm"]),
        }
        is_exact = all(line[key] is not None and line[key] == expected[key] for key in ("loss", "grad_norm"))
        worst: dict[str, str] = {}
        checkpoint = f"checkpoints/step-{step}"
        if (reference / checkpoint).exists():
            theirs, ours = _open(reference / checkpoint), _open(other / checkpoint)
            tensors = _compare_tensors(theirs, ours, sum_of_rates)
            is_exact = is_exact and _have_same_bits(theirs, ours)
            values |= {quantity: difference.value for quantity, difference in tensors.items()}
            worst = {quantity: difference.worst for quantity, difference in tensors.items()}
        differences.append(Difference(step, line["rows_hash"] == expected["rows_hash"], values, worst, is_exact))
    return differences


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the record of each training step in metrics.jsonl. Skip damaged ones."""
    return [record for record in metrics_file.read(run / "metrics.jsonl").good if _is_step(record)]


def _is_step(record: dict[str, Any]) -> bool:
    loss, norm = record.get("loss", ""), record.get("grad_norm", "")  # None means that it was not finite
    is_numeric = all(number is None or isinstance(number, int | float) for number in (loss, norm))
    return "rows_hash" in record and is_numeric and isinstance(record.get("lr"), int | float)


def table(compared: list[Compared], tolerances: dict[str, float]) -> Table:
    """Return a table with each run's largest differences and their steps."""
    result = Table(box=box.SIMPLE)
    for heading in HEADINGS:
        result.add_column(heading, no_wrap=True)
    for row in _rows(compared, tolerances):
        result.add_row(*row)
    return result


def write(path: Path, title: str, compared: list[Compared], tolerances: dict[str, float]) -> None:
    """Write an HTML page with the table, the explanations and the curves."""
    explained = [f"{run.name}: {text}" for run in compared if (text := run.explanation(tolerances))]
    word, colour = ("equal", "good") if all(_has_passed(run, tolerances) for run in compared) else ("different", "bad")
    status = f'<span class="status {colour}">{word}</span>'
    reasons = "".join(f"<p>{html.escape(text)}</p>" for text in explained)
    sections = [
        f'<header><div class="line"><h1>{html.escape(title)}</h1>{status}</div></header>',
        "<h2>Largest differences, and their steps</h2>",
        page.card(page.table(_rows(compared, tolerances), HEADINGS, "num") + reasons),
        charts.section(_charts(compared, tolerances)),
        f"<h2>Quantities</h2>{page.card(f'<pre>{html.escape(LEGEND)}</pre>')}",
    ]
    page.write(path, title, sections)


def _has_passed(run: Compared, tolerances: dict[str, float]) -> bool:
    return run.verdict(tolerances) in ("reference", "equal")


def _charts(compared: list[Compared], tolerances: dict[str, float]) -> Iterator[Chart]:
    """Yield charts of the completed runs' metrics and of their differences."""
    completed = [run for run in compared if not run.problem]
    for quantity, key in (("Loss", "loss"), ("Gradient norm", "grad_norm")) if completed else ():
        lines = [_striped(run.name, run.folder, key) for run in completed]
        yield Chart(quantity, lines)
    for quantity in QUANTITIES if len(completed) > 1 else ():
        lines = []
        for run in completed:
            steps = [step for step in run.differences if quantity in step.values]
            values = [max(step.values[quantity], LOWEST) for step in steps]
            largest = f"largest {max(step.values[quantity] for step in steps):.0e}" if steps else ""
            lines.append(Line(run.name, [step.step for step in steps], values, dash=0, value=largest))
        limit = tolerances[quantity]
        yield Chart(f"Difference in {quantity}", lines, log=True, limit=limit, limit_name="tolerance")


def _striped(name: str, run: Path, key: str) -> Line:
    """Return a line of a run's metrics, which stays visible where it coincides with others."""
    steps = read_steps(run)
    values = [math.nan if line[key] is None else line[key] for line in steps]
    return Line(name, [line["step"] for line in steps], values, "stripes")


def _rows(compared: list[Compared], tolerances: dict[str, float]) -> list[list[str]]:
    """Return the rows of the table: each run's largest differences with their steps, and its verdict."""
    rows = []
    for run in compared:
        largest = [run.largest(quantity) for quantity in QUANTITIES] if run.differences else []
        cells = [f"{value:.0e} @{step}" for value, step in largest] or [""] * len(QUANTITIES)
        rows.append([run.name, *cells, run.verdict(tolerances)])
    return [*rows, ["tolerance", *(f"{tolerances[quantity]:.0e}" for quantity in QUANTITIES), ""]]


def _relative(value: float | None, expected: float | None) -> float:
    """Return the relative difference. None means a number that was not finite; the result is then infinite."""
    if value is None or expected is None:
        return math.inf
    return abs(value - expected) / (abs(expected) or 1.0)


def _open(folder: Path) -> shards.ShardReader:
    return shards.ShardReader(folder, manifest.read_manifest(folder))


class _TensorDifference(NamedTuple):
    value: float
    worst: str
    """The parameter that contributes most."""


def _compare_tensors(
    reference: shards.ShardReader, other: shards.ShardReader, sum_of_rates: float
) -> dict[str, _TensorDifference]:
    """Return the differences in weights and moments. `sum_of_rates` adds up the learning rates of all steps so far."""
    if other.shapes != reference.shapes:
        raise UserError(f"{other.folder}: has different parameters from {reference.folder}")
    sizes = {name: math.prod(shape) for name, shape in reference.shapes.items()}
    weights: dict[str, float] = {}  # sum of squared differences by parameter
    moments: dict[str, float] = {}
    squared_moments = 0.0
    for name in sizes:
        weights[name] = _squares(other.read("parameter", name).double() - reference.read("parameter", name))
        for kind in {*reference.kinds(name)} & {*FIRST_MOMENTS}:  # no moments before the first step that is not skipped
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


def _have_same_bits(reference: shards.ShardReader, other: shards.ShardReader) -> bool:
    """Return whether all weights and all tensors of the optimizer are equal in every byte."""
    return all(
        reference.kinds(name) == other.kinds(name)
        and all(
            torch.equal(_bits(reference, kind, name), _bits(other, kind, name))
            for kind in ("parameter", *reference.kinds(name))
        )
        for name in reference.shapes
    )


def _bits(reader: shards.ShardReader, kind: str, name: str) -> torch.Tensor:
    return reader.read(kind, name).contiguous().view(-1).view(torch.uint8)


def _squares(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().item()
