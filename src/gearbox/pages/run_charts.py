"""Choose the charts of a run: its curves, its memory, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gearbox.pages.charts import Chart, Line
from gearbox.pages.run_data import PARTS, RunData
from gearbox.pages.scale import moving_mean

LABELLED = {"chosen": "good", "rejected": "bad"}  # the names under kto, whose answers need no partner
AREA_POINTS = 200  # of a stacked chart, each the mean of its steps
NOISY = ("Gradient norm", "Tokens per second")
FIGURES = (  # of compared answers: title, unit, and each line's name by its key
    ("Reward accuracy", "percent", {"accuracy": "accuracy"}),
    ("Reward margin", "", {"margin": "margin"}),
    ("Rewards", "", {"reward_chosen": "chosen", "reward_rejected": "rejected"}),
    ("KL divergence, estimated", "nats", {"kl": "KL"}),
)
STACK_COLOURS = (7, 1, 4, 6, 3, 2)  # of PARTS


def charts(run: RunData) -> Iterator[Chart]:
    """Yield the charts of what the run has measured."""
    yield losses(run)
    yield from _figures(run)
    if times := time_of_a_step(run):
        yield times
    exact = [("eval_exact_match", "exact match"), ("eval_metric", "metric of eval.metric")]
    for key, title in exact:
        if column := run.column(key):
            unit = "percent" if key == "eval_exact_match" else ""
            yield Chart(title.capitalize(), [Line(title, column.steps, column.values, "dots", 2)], unit, from_zero=True)
    yield _simple(run, "Learning rate", {"lr": "learning rate"})
    yield _simple(run, "Gradient norm", {"grad_norm": "norm"}, colour=4)
    yield _simple(run, "Tokens per second", {"tokens_per_second": "speed"}, colour=3)
    yield _memory(run)
    loads = {"expert_load": "fullest expert", "rank_load": "fullest rank", "router_loss": "router loss"}
    yield _simple(run, "Load of the experts", loads, "times the mean")
    yield _simple(run, "Idle share of the pipeline", {"idle": "idle"}, "percent")
    yield _simple(run, "Model FLOPs utilization", {"mfu": "share of the device's peak"}, "percent")


def losses(run: RunData) -> Chart:
    """Return the chart of the losses, with the signs of everything that happened."""
    training, held_out, marks = run.column("loss"), run.column("eval_loss"), run.marks
    means, size = moving_mean(training.values)
    lines = [
        Line("loss of each step", training.steps, training.values, "faint", 1),
        Line(f"mean of {size} steps", training.steps, means, "line", 1),
        Line("held-out loss", held_out.steps, held_out.values, "dots", 2, dash=1),
    ]
    signs = {
        "resume": [
            (step, f"resumed before step {step:,}, {seconds:,.0f} s without a step") for step, seconds in marks.resumes
        ],
        "skipped": [(step, f"step {step:,} was skipped: loss or gradients not finite") for step in marks.skipped],
        "spike": [(step, f"spike of the loss in step {step:,}") for step in marks.spikes],
        "save": [(step, f"checkpoint of step {step:,}") for step in marks.saves],
        "failed save": [(step, f"step {step:,} could not be saved: {why}") for step, why in marks.failed_saves],
    }
    bars = [step for step, _ in marks.resumes]
    return Chart("Loss", lines, run.unit_of_loss, signs={k: [*v] for k, v in signs.items()}, bars=bars, is_wide=True)


def _figures(run: RunData) -> Iterator[Chart]:
    """Yield the charts of compared answers: means over steps, and held-out values."""
    for title, unit, names in FIGURES:
        lines = []
        for place, (key, usual) in enumerate(names.items()):
            name = LABELLED.get(usual, usual) if run.objective == "kto" else usual
            steps, held_out = run.column(key), run.column(f"eval_{key}")
            means, size = moving_mean(steps.values)
            colour = 2 * place + 1
            if len(names) == 1:
                lines.append(Line(f"{name} of each step", steps.steps, steps.values, "faint", colour))
            lines.append(Line(f"{name}, mean of {size} steps", steps.steps, means, "line", colour, dash=2 * place))
            lines.append(Line(f"{name}, held out", held_out.steps, held_out.values, "dots", colour + 1, dash=1))
        bars = [step for step, _ in run.marks.resumes]
        yield Chart(title, lines, unit, from_zero=True, log=False, bars=bars)


def _simple(run: RunData, title: str, names: dict[str, str], unit: str = "", colour: int = 0) -> Chart:
    """Return a chart of some columns, from zero on."""
    found = [(name, column) for key, name in names.items() if (column := run.column(key))]
    lines = [Line(name, one.steps, one.values, colour=colour, dash=place) for place, (name, one) in enumerate(found)]
    if title in NOISY and found:
        (name, column), *_ = found
        means, size = moving_mean(column.values)
        lines = [
            Line(f"{name} of each step", column.steps, column.values, "faint", colour),
            Line(f"mean of {size} steps", column.steps, means, "line", colour, dash=0),
        ]
    bars = [step for step, _ in run.marks.resumes]
    return Chart(title, lines, unit, from_zero=True, log=None if title == "Gradient norm" else False, bars=bars)


def _memory(run: RunData) -> Chart:
    """Return the memory of the first rank, measured beside predicted, and what its device has."""
    names = {"memory_bytes": "now", "memory_peak_bytes": "peak so far", "memory_predicted_bytes": "predicted peak"}
    chart = _simple(run, "Memory of the first rank", names, "bytes")
    limit, peak = run.facts.memory_available_bytes, run.column("memory_peak_bytes").peak
    # A limit far above the lines would flatten them; the text below the headline has it as well.
    is_near = limit is not None and peak > limit / 5
    return Chart(
        chart.title,
        chart.lines,
        chart.unit,
        from_zero=True,
        log=False,
        bars=chart.bars,
        limit=limit if is_near else None,
        limit_name="available",
    )


def time_of_a_step(run: RunData) -> Chart | None:
    """Return where the time of a step goes, as stacked areas, or None if no part was measured."""
    columns = {part: run.column(f"seconds_{part}") for part in PARTS}
    parts = {part: dict(zip(one.steps, one.values, strict=True)) for part, one in columns.items() if one}
    steps = sorted({step for values in parts.values() for step in values})
    if not steps:
        return None
    size = -(-len(steps) // AREA_POINTS)
    buckets = [steps[first : first + size] for first in range(0, len(steps), size)]
    lines, total = [], sum(_finite(value) for values in parts.values() for value in values.values())
    for colour, part in zip(STACK_COLOURS, PARTS, strict=True):
        if part in parts:
            values = parts[part]
            means = [sum(_finite(values.get(step, 0.0)) for step in bucket) / len(bucket) for bucket in buckets]
            lines.append(
                Line(
                    part,
                    [bucket[len(bucket) // 2] for bucket in buckets],
                    means,
                    "area",
                    colour,
                    value=f"{sum(map(_finite, values.values())) / (total or 1):.0%}",
                )
            )
    return Chart("Where the time of a step goes", lines, "s", from_zero=True, log=False, is_wide=True)


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0
