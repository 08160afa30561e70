"""Compare the lengths of a run: rows with ranks, and warm-up, evaluation and checkpoints with steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gearbox.checks.finding import Said
from gearbox.config.job import BatchPlan
from gearbox.config.recipe_values import steps_of

if TYPE_CHECKING:
    from gearbox.checks.subject import Subject

MAX_EMPTY_SHARE = 0.05  # of a step's rows; less is not worth a hint
LONG_WARMUP = 0.5  # of a run


def rows(subject: Subject) -> Iterator[Said]:
    """Check that every rank gets rows, and that few rows are empty."""
    if subject.job is None:
        return
    job, batch = subject.job, subject.job.batch
    parts = f"{batch.data_parallel} data-parallel rank{'s' * (batch.data_parallel > 1)}"
    idle = [r for r in range(job.gear.num_processes) if job.gear.data_rank(r) * batch.micro_rows >= batch.rows]
    if idle:
        use = f"use {batch.data_parallel} rows or more, or {batch.rows} ranks"
        if batch.rows >= batch.data_parallel:  # micro-batches of several rows leave none for the last ranks
            use = f"use {nearest_full(batch, job.recipe.batch.micro_rows)} rows, or a smaller batch.micro_rows"
        named = f"rank {idle[0]} gets" if len(idle) == 1 else f"ranks {_ranges(idle)} get"
        text = f"batch.rows: {batch.rows} rows on {parts}: {named} only empty rows; {use}"
        yield subject.say(text, "hint")
    elif batch.num_empty_rows / batch.num_padded_rows >= MAX_EMPTY_SHARE:
        share = f"{batch.num_empty_rows / batch.num_padded_rows:.0%}"
        use = nearest_full(batch, job.recipe.batch.micro_rows)
        yield subject.say(
            f"batch.rows: {batch.rows} rows on {parts} with batch.micro_rows {batch.micro_rows}: {share} of the rows "
            f"computed are empty; use {use} rows",
            "hint",
        )


def nearest_full(batch: BatchPlan, micro_rows: int) -> str:
    """Return the nearest numbers of rows that leave none empty, below and above."""
    ranks = batch.data_parallel
    above = next(
        n for n in range(batch.rows + 1, batch.rows + ranks * micro_rows + 1) if _is_full(n, ranks, micro_rows)
    )
    below = next((n for n in range(batch.rows - 1, 0, -1) if _is_full(n, ranks, micro_rows)), None)
    return f"{above}" if below is None else f"{below} or {above}"


def _is_full(rows: int, ranks: int, micro_rows: int) -> bool:
    return BatchPlan.divide(rows, ranks, micro_rows).num_empty_rows == 0


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers in short, such as 4-7, 12."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in spans)


def steps(subject: Subject) -> Iterator[Said]:
    """Check warm-up, evaluation and checkpoints against the steps of the run.

    A short trial, whose steps the command line gives, need not reach what the file plans.
    """
    recipe, num_steps = subject.recipe, subject.recipe.train.steps
    if num_steps is None or recipe.run.rehearse:
        return
    is_trial = "train.steps" in recipe.given
    warmup = steps_of(recipe.schedule.warmup, num_steps)
    if warmup >= LONG_WARMUP * num_steps and (not is_trial or "schedule.warmup" in recipe.given):
        yield subject.say(
            f"schedule.warmup: {recipe.schedule.warmup} is {float(warmup / num_steps):.0%} of the {num_steps} steps, "
            "so the learning rate is rarely at its peak; 3% to 10% are usual",
            "hint",
        )
    for key, every, matters, what in (
        ("eval.every", recipe.eval.every, recipe.eval.holds_out, "evaluates only at its start and end"),
        ("save.every", recipe.save.every, "every" in recipe.save.model_fields_set, "saves only at its end"),
    ):
        if every > num_steps and matters and (not is_trial or key in recipe.given):
            text = f"{key}: {every} is more than the {num_steps} steps of the run, which {what}; use fewer steps, or 0"
            yield subject.say(text, "hint")
