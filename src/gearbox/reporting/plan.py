"""Describe a run and its data in labelled lines, for the screen and the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from gearbox.checkpoint.disk_space import DiskPlan
from gearbox.config.job import Job
from gearbox.config.recipe import Recipe
from gearbox.config.recipe_values import TITLES, WITH_REFERENCE
from gearbox.console import Screen, styled
from gearbox.data.corpus import MappedCorpus
from gearbox.distributed.verification import EngineFacts
from gearbox.model.dropout import listed
from gearbox.planning.fit import Fit
from gearbox.planning.strategy import METHOD_NAMES
from gearbox.rows.splits import Leakage, TrainingRows
from gearbox.rows.streamed_rows import PreparedCorpus

WARNING = "warning"
MANY_TRUNCATED = 0.05  # share of the documents


@dataclass(frozen=True)
class Plan:
    """A description of the run, shown before the first step and in the report."""

    job: Job
    num_steps: int
    data: dict[str, str]
    """Lines about the data, by label, from `data_facts`."""
    facts: EngineFacts
    """Facts read from the running engine."""
    num_weights: tuple[int, int]
    """Numbers of trained weights and of all weights."""
    leakage: Leakage | None
    """Result of the packing check; None if rows are not packed."""
    router_weight: float
    """Factor of the load-balancing loss of a mixture of experts; 0 if there is no such loss."""
    switched_off: dict[str, float]
    """Dropout rates of the model's config.json that are set to 0, by key."""
    disk: DiskPlan
    fit: Fit | None
    """The predicted memory of a rank."""
    folder: Path
    """The run's folder."""
    rows_key: str
    """Identifies the tokens and their assignment to rows."""
    base: str | None
    """Identifies the frozen weights under an adapter; None if all weights are trained."""

    def lines(self) -> dict[str, str]:
        """Return each line's text by its label."""
        lines = self._requested() | {"trained": self._trained()} | self.data | self.facts.lines
        if self.leakage is not None:
            lines["packing check"] = self.leakage.describe()
        if self.router_weight:
            lines["router loss"] = f"{self.router_weight:g} x load imbalance of the experts"
        if self.switched_off:
            lines["dropout"] = f"off, where config.json has {listed(self.switched_off)} (model.dropout=true keeps it)"
        if self.fit is not None:
            lines["memory"] = self.fit.describe()
        return lines | {"checkpoints": self.disk.describe(), "run folder": str(self.folder)}

    def _trained(self) -> str:
        """Return how many weights are trained, and their share."""
        trained, total = self.num_weights
        if trained == total:
            return f"all {total:,} weights"
        return f"{trained:,} of {total:,} weights ({trained / total:.2%})"

    def _requested(self) -> dict[str, str]:
        """Return the lines that follow from the recipe and the gear."""
        recipe, gear, batch = self.job.recipe, self.job.gear, self.job.batch
        model = f"{recipe.model.name} ({recipe.model.init} weights), {METHOD_NAMES[recipe.method]}"
        if recipe.adapter.path:
            model += f" from {recipe.adapter.path}"
        if recipe.model.add_tokens:
            model += f", {_count(len(recipe.model.add_tokens), 'added token')}"
        replicas = _count(batch.data_parallel, "rank" if batch.data_parallel == gear.num_processes else "replica")
        rounds, rows = _count(batch.accumulation_steps, "accumulation round"), _count(batch.micro_rows, "row")
        step = f"{_count(batch.rows, 'row')} = {replicas} x {rounds} x {rows}"
        if batch.num_empty_rows:
            step += f" - {_count(batch.num_empty_rows, 'empty row')}"
        lines = {
            "model": model,
            **({"objective": described(recipe)} if recipe.compares else {}),
            "batch": step,
            "optimizer": f"{recipe.optim.name}, lr {recipe.optim.lr:g}, gradient clip {recipe.optim.max_grad_norm:g}",
            "schedule": f"{recipe.schedule.name}, {_count(self.num_steps, 'step')}",
        }
        if self.job.full_size is not None:
            small = "a few narrow layers of the same architecture, random weights, no network access"
            lines["rehearsal"] = "; ".join([small, *shortened(recipe, self.job.full_size)])
        return lines

    def show(self, screen: Screen) -> None:
        """Print the lines."""
        show_lines(screen, self.lines())


def described(recipe: Recipe) -> str:
    """Return an objective that compares answers, with the settings that it has."""
    objective, settings = recipe.train.objective, recipe.preference
    facts = {"beta": settings.beta_of(objective)}
    if objective in ("dpo", "simpo"):
        facts |= {"label smoothing": settings.label_smoothing, "margin": settings.margin_of(objective)}
    if objective == "kto":
        facts |= {"weight of good answers": settings.desirable_weight, "of bad ones": settings.undesirable_weight}
    facts["weight of the usual loss"] = settings.sft_weight_of(objective)
    shown = [f"{name} {value:g}" for name, value in facts.items() if value or name == "beta"]
    reference = "" if objective in WITH_REFERENCE else "; no reference"
    return f"{objective}: {', '.join(shown)}{reference}"


def shortened(recipe: Recipe, full_size: Recipe) -> Iterator[str]:
    """Yield what is smaller in a rehearsal than in the recipe that it stands for."""
    here, there = recipe.batch, full_size.batch
    if (here.rows, here.row_tokens) != (there.rows, there.row_tokens):
        yield f"{here.rows} rows x {here.row_tokens:,} tokens instead of {there.rows:,} x {there.row_tokens:,}"
    if recipe.train != full_size.train:
        length = f"{full_size.train.steps:,}" if full_size.train.steps else f"{full_size.train.epochs:g} epochs"
        yield f"{_count(recipe.train.steps or 0, 'step')} instead of {length}"


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def show_lines(screen: Screen, lines: dict[str, str]) -> None:
    """Print each label and its text, with the texts aligned in one column."""
    for name, text in lines.items():
        is_warning = name == WARNING
        show = screen.print_always if is_warning else screen.print
        show(styled((f"{name:<24}", "bold red" if is_warning else "cyan"), text))


def data_facts(
    recipe: Recipe, corpus: MappedCorpus | PreparedCorpus, prepared: TrainingRows, tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    """Return the lines about the data, each text by its label."""
    rows, held_out, facts = prepared.training, prepared.held_out, prepared.facts
    median, p90, p99, longest = (f"{length:,}" for length in facts.document_lengths)
    num_tokens, num_targets = int(rows.num_tokens.sum()), int(rows.targets.sum())
    unit = rows.unit_size if recipe.compares else 1  # a pair counts once
    num_held_out = held_out.num_documents // unit
    evaluated = f"{num_held_out:,} held out"
    separate = ""
    if facts.has_own_evaluation:
        evaluated, separate = "0 held out", f"; evaluation: {num_held_out:,} from eval.path"
        if facts.dropped_of_evaluation:
            separate += f", {facts.dropped_of_evaluation}"
    shown = {f"data {number}" if number else "data": text for number, text in enumerate(_origins(corpus))}
    trained, dropped = f"{rows.num_documents // unit:,} trained", facts.dropped
    shown["documents"] = f"{facts.num_read:,} read = {trained} + {evaluated} + {dropped}{separate}"
    shown["tokens"] = f"{num_tokens:,}, {num_targets / num_tokens:.0%} supervised"
    shown["document lengths"] = (
        f"median {median}, p90 {p90}, p99 {p99}, max {longest} tokens; "
        f"{facts.num_truncated:,} truncated, {facts.num_split:,} split, {facts.num_duplicates:,} duplicates"
    )
    if facts.num_truncated > MANY_TRUNCATED * facts.num_read:
        shown[WARNING] = (
            f"{facts.num_truncated:,} of {facts.num_read:,} documents lose their end, because they are longer "
            f"than batch.row_tokens={recipe.batch.row_tokens}; raise it, or set data.long=split"
        )
    if rows.packing:
        rows_label, padding = "packed rows", 1 - rows.filled
        shown[rows_label] = (
            f"{len(rows):,} x {rows.row_tokens:,} tokens, {rows.filled:.1%} filled, {padding:.1%} padding"
        )
    else:
        rows_label, share = "rows", facts.padding
        shown[rows_label] = f"{len(rows):,}, one document each, grouped by length"
        shown[rows_label] += "" if share is None else f", {share:.1%} padding"
    if isinstance(corpus, PreparedCorpus):
        window = f"the rows of {recipe.data.shuffle_shards} shards at a time are shuffled"
        shown["shards"] = f"{corpus.num_shards:,} in {recipe.data.path}; {window}"
    if short := prepared.num_rows % recipe.batch.rows:
        shown["last step"] = f"{_count(short, 'row')} instead of {recipe.batch.rows:,}, to end with train.epochs"
    if weights := facts.weights:
        total = sum(weight for _, weight in weights)
        shown[rows_label] += "; " + ", ".join(
            f"{weight / total:.1%} of each batch from {path} ({size:,} rows)"
            for (path, weight), size in zip(weights, rows.group_sizes, strict=True)
        )
    return shown


def _origins(corpus: MappedCorpus | PreparedCorpus) -> Iterator[str]:
    """Yield one line for each of the first four files, and one for the rest."""
    listed = list(zip(corpus.origins, corpus.summaries, strict=True))
    for origin, summary in listed[:4]:
        unused = f"; not read: {', '.join(summary.unused)}" if summary.unused else ""
        records = _count(summary.num_records, "record")
        yield f"{origin.name}: {records}, {TITLES.get(summary.form, summary.form)}{unused}"
    if len(listed) > 4:
        rest = [summary for _, summary in listed[4:]]
        forms = ", ".join(sorted({TITLES.get(summary.form, summary.form) for summary in rest}))
        yield f"{len(rest):,} more files: {sum(summary.num_records for summary in rest):,} records, {forms}"
