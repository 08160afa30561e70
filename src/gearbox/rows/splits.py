"""Decide whether each document is trained, held out or dropped."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from gearbox import filesystem
from gearbox.config.recipe import Data, Recipe
from gearbox.config.recipe_values import listed
from gearbox.errors import UserError
from gearbox.redact import redacted, secrets
from gearbox.rows import units
from gearbox.rows.batches import PackedRows, Sampler
from gearbox.rows.packing import Chunks, Corpus, chunk_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gearbox.data.tokenization import Question

NUM_LOOKED_AT = 1000  # documents, to find the tokens that end answers


@dataclass(frozen=True)
class Sample:
    """A question to ask the model, and its correct answer."""

    question: str
    prompt: list[int]
    """Tokens before the answer."""
    answer: str | None
    """None if there is no correct answer, as for a question of eval.prompts."""
    rejected: str | None = None
    """The rejected answer of a pair, whose chosen one is `answer`."""


@dataclass(frozen=True)
class Dropped:
    """A record that is not used."""

    location: str
    """file:line"""
    reason: str


@dataclass(frozen=True)
class Leakage:
    """The leakage between packed documents, as measured by a probe."""

    loss_change: float
    """Largest change of a token's loss when another document in its row changes."""
    tolerance: float

    @property
    def is_isolated(self) -> bool:
        """True if documents may share a row."""
        return self.loss_change <= self.tolerance

    def describe(self) -> str:
        """Return the text of the plan's line about packed documents."""
        change = f"largest loss change {self.loss_change:.2g}"
        if self.is_isolated:
            return f"documents do not affect each other ({change})"
        return f"documents leak into each other ({change}): packing is off, one document per row"


@dataclass(frozen=True)
class DataFacts:
    """Numbers and texts that describe how a run uses its documents."""

    num_read: int
    num_truncated: int
    num_split: int
    num_duplicates: int
    """Number of documents with the same tokens as an earlier document."""
    dropped: str
    """The records of data.path that are neither trained nor held out, by reason."""
    dropped_of_evaluation: str
    """The records of eval.path that are not used for evaluation, by reason; empty if all are used."""
    document_lengths: tuple[int, ...]
    """Median, 90th and 99th percentile, and maximum of the trained documents' tokens."""
    padding: float | None
    """Share of padding if rows are sorted by length and padded to the longest of their step. None if not known."""
    weights: tuple[tuple[str, float], ...]
    """Path and weight of each source, or nothing if sources have no weights."""
    has_own_evaluation: bool
    """True if eval.path gives the held-out documents."""


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run, their order, and how its documents are used."""

    training: PackedRows
    held_out: PackedRows
    num_rows: int
    """Rows that the run trains: all rows of train.steps, or exactly the rows of train.epochs."""
    sampler: Sampler
    """Chooses the training rows of each step."""
    samples: list[Sample]
    facts: DataFacts
    dropped_file: Path | None = None
    """The records of data.path and eval.path that are not used, one on a line; None if it is not on this machine."""
    leakage: Leakage | None = None
    """Leakage between packed documents, once measured with the model. None if rows are not packed."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run: train.steps, or the number that train.epochs needs."""
        return -(-self.num_rows // self.sampler.rows_per_step)

    def rows_of_step(self, step: int) -> list[int]:
        """Return the training rows of a step, in order. The run's last step may have fewer rows than the others."""
        return self.sampler.rows_of_step(step)[: self.num_rows - step * self.sampler.rows_per_step]

    def dropped(self) -> Iterator[Dropped]:
        """Yield the records that are not used: those of data.path, then those of eval.path."""
        if self.dropped_file is not None:
            with self.dropped_file.open(encoding="utf-8") as file:
                for line in file:
                    yield Dropped(*json.loads(line))

    def num_rows_left_out(self, step: int, epochs: float | None) -> int:
        """Return the rows that no step trains if a run of `epochs` ended with `step` and now goes on."""
        planned, taken = step * self.sampler.rows_per_step, num_rows_of_epochs(epochs or 0, len(self.training))
        return max(0, planned - taken) if epochs and step < self.num_steps else 0


@dataclass(frozen=True)
class Division:
    """The chunks of a corpus by use, and counts of its documents."""

    training: Chunks
    held_out: Chunks
    """Empty if eval.path gives the documents to evaluate on."""
    hashes: NDArray[np.uint64]
    """Hash of each document, or pair of answers, that is trained or held out."""
    dropped: list[Dropped]
    num_truncated: int
    num_split: int


def divide(recipe: Recipe, corpus: Corpus, copies: NDArray[np.uint64] | None) -> Division:
    """Divide the documents into chunks, and hold some out: a share, or none but the `copies` of eval.path."""
    row_tokens = recipe.batch.row_tokens
    policies = _policies(corpus, recipe.data)
    chunks, hashes, dropped = _chunked(recipe, corpus)
    own = corpus.hashes if isinstance(corpus, units.MismatchedCorpus) else hashes  # the answers of a pair count twice
    is_used = np.zeros(len(corpus), bool)
    is_used[chunks.document] = True
    is_held_out = hashes < np.uint64(recipe.eval.fraction * 2**64) if copies is None else np.isin(hashes, copies)
    held_out = chunks.where(is_held_out[chunks.document])
    if copies is not None:
        copied = np.unique(held_out.document)[:: chunks.unit_size].tolist()
        dropped += [Dropped(corpus.location(document), "also in eval.path") for document in copied]
        held_out = held_out.where(np.zeros(len(held_out), bool))
    is_long = is_used & (corpus.lengths > (row_tokens if chunks.unit_size == 1 else chunks.ends(len(corpus))))
    is_split = np.array([policy == "split" for policy in policies])[corpus.origin_ids]
    return Division(
        training=chunks.where(~is_held_out[chunks.document]),
        held_out=held_out,
        hashes=own[is_used][:: chunks.unit_size],
        dropped=dropped,
        num_truncated=int((is_long & ~is_split).sum()),
        num_split=int((is_long & is_split).sum()),
    )


def _chunked(recipe: Recipe, corpus: Corpus) -> tuple[Chunks, NDArray[np.uint64], list[Dropped]]:
    """Return the chunks with targets, the hash of each document that decides its use, and the dropped records."""
    row_tokens, policies = recipe.batch.row_tokens, _policies(corpus, recipe.data)
    if not recipe.compares:
        chunks = chunk_documents(corpus, row_tokens, policies)
        dropped = _unused_documents(corpus, chunks)
        chunks = chunks.where(chunks.targets > 0)
        return chunks, _hashes(corpus, chunks), dropped
    chunks = units.chunk_pairs(corpus, row_tokens, policies)
    hashes = _hashes(corpus, chunks)
    used = chunks.where(units.usable_pairs(chunks, corpus, hashes))
    return used, units.hashes_of_records(corpus, hashes), _unused_pairs(corpus, chunks, used)


def pad_token_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the token that fills rows."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def num_rows_of(recipe: Recipe, num_rows: int) -> int:
    """Return the rows that a run trains, of num_rows rows per epoch."""
    train = recipe.train
    return num_rows_of_epochs(train.epochs, num_rows) if train.epochs else (train.steps or 0) * recipe.batch.rows


def num_rows_of_epochs(epochs: float, num_rows: int) -> int:
    """Return the rows of that many epochs of num_rows rows. A fraction of a row is rounded up."""
    return math.ceil(Fraction(str(epochs)) * num_rows)  # exact, where 1.1 * 10 is above 11


def answer_ends(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the special and added tokens that end trained spans, in the first documents: generation stops at them."""
    ends: set[int] = set()
    for document in range(min(len(corpus), NUM_LOOKED_AT)):
        last = np.flatnonzero(np.diff(corpus.loss_mask(document), append=0) < 0)
        ends |= {*corpus.tokens(document)[last].tolist()}
    return ends & {*tokenizer.added_tokens_decoder}


def evaluation_chunks(recipe: Recipe, evaluated: Corpus) -> tuple[Chunks, NDArray[np.uint64], list[Dropped]]:
    """Return the chunks of eval.path with targets, their documents' hashes, and its dropped records.

    Raise UserError if no chunk is left.
    """
    chunks, hashes, dropped = _chunked(recipe, evaluated)
    if not len(chunks):
        paths = ", ".join(repr(source.path) for source in listed(recipe.eval.path or []))
        raise UserError(f"eval.path: {paths} leaves nothing to evaluate on: {summarize_dropped(dropped)}")
    return chunks, hashes[chunks.document], dropped


def check_every_source(recipe: Recipe, present: set[int], num_read: int, num_held_out: int, dropped: str) -> None:
    """Raise UserError if no source is present in the training rows, or if one with a weight is not."""
    for number, source in enumerate(recipe.data.sources):
        if not present or (source.weight is not None and number not in present):
            raise UserError(
                f"data.path: {source.path!r} leaves nothing to train on within "
                f"batch.row_tokens={recipe.batch.row_tokens}: {num_read:,} documents read, {num_held_out:,} held out, "
                f"{dropped}"
            )


def write_dropped(path: Path, dropped: Iterable[Dropped]) -> None:
    """Write the dropped records, one on a line, without secrets."""
    known = secrets()
    with filesystem.new_file(path) as file:
        for one in dropped:
            line = json.dumps(redacted({"place": one.location, "reason": one.reason}, known))
            file.write(f"{line}\n".encode())


def summarize_dropped(dropped: Iterable[Dropped]) -> str:
    """Return the number of dropped documents by reason, most frequent first. Numbers and found values are ignored."""
    return summarize_reasons(count_reasons(dropped))


def count_reasons(dropped: Iterable[Dropped]) -> Counter[str]:
    """Return the number of dropped documents by reason, without numbers and found values."""
    return Counter(re.sub(r"\[\d+\]|\d+", "", entry.reason).split(", found")[0] for entry in dropped)


def summarize_reasons(reasons: Counter[str]) -> str:
    """Return the number of dropped documents, and the most frequent reasons."""
    listed = [f"{count:,} {' '.join(kind.split())[:90]}" for kind, count in reasons.most_common(5)]
    more = [f"{len(reasons) - 5} more reasons"] if len(reasons) > 5 else []
    return f"{reasons.total():,} dropped" + (f" ({'; '.join(listed + more)})" if reasons else "")


def _policies(corpus: Corpus, data: Data) -> list[str]:
    """Return the treatment of long documents for each origin: truncate, split or drop."""
    auto = [("split" if summary.form == "text" else "truncate") for summary in corpus.summaries]
    return auto if data.long == "auto" else [data.long] * len(auto)


def _unused_documents(corpus: Corpus, chunks: Chunks) -> list[Dropped]:
    """Return the records that could not be used, and the documents without a chunk that has a target."""
    has_chunk, has_target = (np.zeros(len(corpus), bool) for _ in range(2))
    has_chunk[chunks.document] = True
    has_target[chunks.document[chunks.targets > 0]] = True
    dropped = [Dropped(corpus.origins[entry.origin].location(entry.number), entry.reason) for entry in corpus.bad]
    for document in np.flatnonzero(~has_target).tolist():
        if not has_chunk[document]:
            reason = "longer than a row"
        else:
            reason = "no supervised token" + (" before the cut" if corpus.targets[document] else "")
        dropped.append(Dropped(corpus.location(document), reason))
    return dropped


def _unused_pairs(corpus: Corpus, chunks: Chunks, used: Chunks) -> list[Dropped]:
    """Return the records that could not be used, and the units that are not among the used ones of all chunks."""
    dropped = [Dropped(corpus.origins[entry.origin].location(entry.number), entry.reason) for entry in corpus.bad]
    is_used, has_chunk = (np.isin(np.arange(0, len(corpus), 2), of.document) for of in (used, chunks))
    has_targets = np.zeros(len(corpus), bool)
    has_targets[chunks.document[chunks.targets > 0]] = True
    for unit in np.flatnonzero(~is_used).tolist():
        reason = "no supervised token before the cut"
        if not has_chunk[unit]:
            reason = "longer than a row, with the answer that it is compared with"
        elif has_targets[2 * unit : 2 * unit + 2].all():
            reason = "the answers are equal before the cut"
        dropped.append(Dropped(corpus.location(2 * unit), reason))
    return dropped


def _hashes(corpus: Corpus, chunks: Chunks) -> NDArray[np.uint64]:
    """Return the hash of each document's tokens up to its truncation; later tokens make no difference."""
    hashes: NDArray[np.uint64] = corpus.hashes.copy()
    ends = chunks.ends(len(corpus))
    for document in np.flatnonzero((ends > 0) & (ends < corpus.lengths)).tolist():
        hashes[document] = xxhash.xxh3_64_intdigest(corpus.tokens(document)[: ends[document]].tobytes())
    return hashes


def find_samples(rows: PackedRows, questions: list[Question], num_samples: int) -> list[Sample]:
    """Return up to `num_samples` held-out questions whose prompts fit into a row."""
    samples: list[Sample] = []
    corpus, chunks = rows.documents, rows.chunks
    for kept in questions:
        document = units.place_of(corpus, kept.document)
        first = int(np.searchsorted(chunks.document, document))
        is_there = first < len(chunks) and chunks.document[first] == document and chunks.start[first] == 0
        if len(samples) < num_samples and is_there:
            prompt = int(np.argmax(corpus.loss_mask(document)[: chunks.length[first]]))
            tokens = corpus.tokens(document)[:prompt].tolist()
            samples.append(Sample(kept.question, tokens, kept.answer, kept.rejected))
    return [sample for sample in samples if sample.prompt]
