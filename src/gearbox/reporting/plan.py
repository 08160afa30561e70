"""The facts of a run and its data, for the screen and the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedTokenizerFast

from gearbox.checkpoint.disk_space import DiskPlan
from gearbox.config.job import Job
from gearbox.config.recipe import Recipe
from gearbox.data.batches import PackedRows
from gearbox.data.corpus import MappedCorpus
from gearbox.data.row_formats import TITLES
from gearbox.data.splits import Leakage, TrainingRows, summarize_dropped
from gearbox.distributed.verification import EngineFacts


@dataclass(frozen=True)
class Plan:
    """What will run. Shown before the first step, and in the report."""

    job: Job
    num_steps: int
    data: dict[str, str]
    """Line by line, of `data_facts`."""
    facts: EngineFacts
    """What runs, verified."""
    leakage: Leakage | None
    """None where rows are not packed."""
    router_weight: float
    """Of the loss that balances a mixture's experts, 0 without one."""
    disk: DiskPlan
    folder: Path
    """Of the run."""
    rows_key: str
    """Identifies the tokens, and which of them are in which row."""
    base: str | None
    """Identifies the frozen weights below an adapter."""

    def lines(self) -> dict[str, str]:
        """Return name and text of each line."""
        lines = self._asked() | self.data | self.facts.lines
        if self.leakage is not None:
            lines["packed documents"] = self.leakage.describe()
        if self.router_weight:
            lines["router loss"] = f"{self.router_weight:g} x the unbalance of the experts"
        return lines | {"checkpoints": self.disk.describe(), "run": str(self.folder)}

    def _asked(self) -> dict[str, str]:
        """Return the lines that follow from recipe and gear."""
        recipe, gear, batch = self.job.recipe, self.job.gear, self.job.batch
        model = f"{recipe.model.name} ({recipe.model.init}), method {recipe.method}"
        if recipe.adapter.path:
            model += f" from {recipe.adapter.path}"
        if recipe.model.add_tokens:
            model += f", {len(recipe.model.add_tokens)} tokens added"
        copies = f"{batch.data_parallel} {'ranks' if batch.data_parallel == gear.num_processes else 'copies'}"
        step = f"{batch.rows} rows = {copies} x {batch.accumulation_steps} rounds x {batch.micro_rows} rows"
        if batch.num_empty_rows:
            step += f", {batch.num_empty_rows} of them empty"
        lines = {
            "model": model,
            "step": step,
            "optimizer": f"{recipe.optim.name}, lr {recipe.optim.lr:g}, clip {recipe.optim.max_grad_norm:g}, "
            f"{recipe.schedule.name} over {self.num_steps:,} steps",
        }
        if recipe.run.rehearse:
            lines["rehearsal"] = "a few narrow layers of the architecture, random weights, no network"
        return lines

    def show(self, screen: Console) -> None:
        """Print the lines."""
        show_lines(screen, self.lines())


def show_lines(screen: Console, lines: dict[str, str]) -> None:
    """Print name and text of each line, the texts below each other."""
    for name, text in lines.items():
        screen.print(f"[cyan]{name:<24}[/]{escape(text)}")


def data_facts(
    recipe: Recipe, corpus: MappedCorpus, prepared: TrainingRows, tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    """Return name and text of each line about the data."""
    rows, held_out = prepared.training, prepared.held_out
    lengths = corpus.lengths[np.unique(rows.chunks.document)]
    percentiles = " ".join(f"{p}%: {int(np.percentile(lengths, p)):,}" for p in (50, 90, 99))
    num_tokens, num_targets = int(rows.num_tokens.sum()), int(rows.targets.sum())
    evaluated = f"{held_out.num_documents:,} held out"
    if held_out.documents is not rows.documents:
        evaluated, apart = "0 held out", f"; evaluated on {held_out.num_documents:,} of eval.path"
        if prepared.dropped_of_evaluation:
            apart += f", {summarize_dropped(prepared.dropped_of_evaluation)}"
    else:
        apart = ""
    shown = {f"data {number}" if number else "data": text for number, text in enumerate(_origins(corpus))}
    trained, dropped = f"{rows.num_documents:,} trained", summarize_dropped(prepared.dropped)
    shown["documents"] = f"{prepared.num_read:,} read = {trained} + {evaluated} + {dropped}{apart}"
    shown["tokens"] = (
        f"{num_tokens:,}, {num_targets / num_tokens:.0%} supervised; lengths {percentiles} max: {lengths.max():,}; "
        f"{prepared.num_truncated:,} truncated, {prepared.num_split:,} split, {prepared.num_duplicates:,} duplicates"
    )
    if rows.packing:
        shown["rows"] = (
            f"{len(rows):,} of {rows.row_tokens:,} tokens, {rows.filled:.1%} filled, {1 - rows.filled:.1%} padding"
        )
    else:
        shown["rows"] = f"{len(rows):,} of a document each, by length, {_padding(rows, recipe.batch.rows):.1%} padding"
    sources = recipe.data.sources
    if sources[0].weight is not None:
        total = sum(source.weight or 0 for source in sources)
        shown["rows"] += "; " + ", ".join(
            f"{(source.weight or 0) / total:.1%} of a step from {source.path} ({size:,} rows)"
            for source, size in zip(sources, rows.group_sizes, strict=True)
        )
    if not _ends_are_special(rows, tokenizer):
        shown["hint"] = (
            "trained turns do not end with a special token, so nothing may tell the model to stop: does the chat "
            "template belong to this tokenizer?"
        )
    return shown


def _ends_are_special(rows: PackedRows, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the last trained token of most of the first documents is one that text never makes."""
    specials = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = []
    for document in np.unique(rows.chunks.document)[:100].tolist():
        tokens, trained = rows.documents.tokens(document), rows.documents.loss_mask(document)
        ends.append(int(tokens[np.flatnonzero(trained)[-1]]) in specials)
    return sum(ends) * 2 >= len(ends)


def _origins(corpus: MappedCorpus) -> Iterator[str]:
    """A line for each file, the first ones of many."""
    listed = list(zip(corpus.origins, corpus.summaries, strict=True))
    for origin, summary in listed[:4]:
        unused = f"; not read: {', '.join(summary.unused)}" if summary.unused else ""
        yield f"{origin.name}: {summary.num_records:,} rows, {TITLES.get(summary.form, summary.form)}{unused}"
    if len(listed) > 4:
        rest = [summary for _, summary in listed[4:]]
        forms = ", ".join(sorted({TITLES.get(summary.form, summary.form) for summary in rest}))
        yield f"{len(rest):,} more files: {sum(summary.num_records for summary in rest):,} rows, {forms}"


def _padding(rows: PackedRows, rows_per_step: int) -> float:
    """Share of padding, as if each step held the next rows by length and they were as wide as its longest."""
    lengths = np.sort(rows.num_tokens)
    last_of_step = np.arange(len(lengths)) // rows_per_step * rows_per_step + rows_per_step - 1
    widths = lengths[np.minimum(last_of_step, len(lengths) - 1)]
    return 1 - float(lengths.sum()) / float(widths.sum())
