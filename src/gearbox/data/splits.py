"""Training rows, held-out rows, and dropped documents with the reason."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from gearbox.config.recipe import Data, Recipe
from gearbox.data.batches import PackedRows
from gearbox.data.packing import Chunks, chunk_documents
from gearbox.errors import UserError


@dataclass(frozen=True)
class Sample:
    """A held-out question to put to the model, and its right answer."""

    question: str
    prompt: list[int]
    """Tokens up to the answer."""
    answer: str


@dataclass(frozen=True)
class Dropped:
    location: str
    """file:line"""
    reason: str


@dataclass(frozen=True)
class TrainingRows:
    training: PackedRows
    held_out: PackedRows
    samples: list[Sample]
    dropped: list[Dropped]
    """Rows of data.path that are neither trained nor held out."""
    dropped_of_evaluation: list[Dropped]
    """Rows of eval.path that are not evaluated on."""
    num_read: int
    num_truncated: int
    num_split: int
    num_duplicates: int
    """Documents whose tokens another one before it has too."""


def split_and_pack(recipe: Recipe, corpus: Any, evaluated: Any, tokenizer: Any, packing: bool) -> TrainingRows:
    """Cut the documents, hold some out and pack the rest. `evaluated`, like `corpus`, is that of eval.path, or None.

    Raises UserError where nothing is left to train on.
    """
    data, batch, evaluation = recipe.data, recipe.batch, recipe.eval
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_token = next(token for token in pads if token is not None)
    long = _policies(corpus, data)
    pieces = chunk_documents(corpus, batch.row_tokens, long)
    dropped = _left_out(corpus, pieces)
    pieces = pieces.where(pieces.targets > 0)
    hashes = _hashes(corpus, pieces)
    is_used = np.zeros(len(corpus), bool)
    is_used[pieces.document] = True
    unused: list[Dropped] = []
    if evaluated is None:
        is_held_out = hashes < np.uint64(evaluation.fraction * 2**64)
        held_corpus, held_pieces = corpus, pieces.where(is_held_out[pieces.document])
    else:
        held_corpus, held_pieces = evaluated, chunk_documents(evaluated, batch.row_tokens, _policies(evaluated, data))
        unused = _left_out(evaluated, held_pieces)
        held_pieces = held_pieces.where(held_pieces.targets > 0)
        if not len(held_pieces):
            raise UserError(
                f"eval.path: {evaluation.path!r} leaves nothing to evaluate on: {summarize_dropped(unused)}"
            )
        is_held_out = np.isin(hashes, _hashes(evaluated, held_pieces)[held_pieces.document])
        copies = np.flatnonzero(is_used & is_held_out).tolist()
        dropped += [Dropped(corpus.location(document), "also in eval.path") for document in copies]
    trained = pieces.where(~is_held_out[pieces.document])
    group = None
    if data.sources[0].weight is not None:
        group = corpus.source[trained.document]
    for number, source in enumerate(data.sources):
        if not len(trained) or (group is not None and number not in group):
            raise UserError(
                f"data.path: {source.path!r} leaves nothing to train on within batch.row_tokens={batch.row_tokens}: "
                f"{len(corpus) + len(corpus.bad):,} documents read, "
                f"{int((is_used & is_held_out).sum()) if evaluated is None else 0:,} held out, {summarize_dropped(dropped)}"
            )
    is_long = is_used & (corpus.lengths > batch.row_tokens)
    is_split = np.array([policy == "split" for policy in long])[corpus.origin]
    rest = (batch.row_tokens, pad_token, packing)
    return TrainingRows(
        training=PackedRows(corpus, trained, *rest, group=group),
        held_out=PackedRows(held_corpus, held_pieces, *rest),
        samples=_samples(held_corpus, held_pieces, evaluation.samples),
        dropped=dropped,
        dropped_of_evaluation=unused,
        num_read=len(corpus) + len(corpus.bad),
        num_truncated=int((is_long & ~is_split).sum()),
        num_split=int((is_long & is_split).sum()),
        num_duplicates=int(is_used.sum()) - len(np.unique(hashes[is_used])),
    )


def summarize_dropped(dropped: list[Dropped]) -> str:
    """How many were dropped and why, most frequent reason first; reasons that differ in numbers and names are one."""
    kinds = Counter(re.sub(r"\[\d+\]|\d+", "", entry.reason).split(", found")[0] for entry in dropped)
    listed = [f"{count:,} {' '.join(kind.split())[:90]}" for kind, count in kinds.most_common(5)]
    more = [f"{len(kinds) - 5} more reasons"] if len(kinds) > 5 else []
    return f"{len(dropped):,} dropped" + (f" ({'; '.join(listed + more)})" if dropped else "")


def _policies(corpus: Any, data: Data) -> list[str]:
    """For each origin: truncate, split or drop."""
    auto = [("split" if summary.form == "text" else "truncate") for summary in corpus.summaries]
    return auto if data.long == "auto" else [data.long] * len(auto)


def _left_out(corpus: Any, pieces: Chunks) -> list[Dropped]:
    """The records that could not be used, and the documents of which no piece has a target."""
    has_piece, has_target = (np.zeros(len(corpus), bool) for _ in range(2))
    has_piece[pieces.document] = True
    has_target[pieces.document[pieces.targets > 0]] = True
    dropped = [Dropped(corpus.origins[origin].location(number), reason) for origin, number, reason in corpus.bad]
    for document in np.flatnonzero(~has_target).tolist():
        if not has_piece[document]:
            reason = "longer than a row"
        else:
            reason = "no supervised token" + (" before the cut" if corpus.targets[document] else "")
        dropped.append(Dropped(corpus.location(document), reason))
    return dropped


def _hashes(corpus: Any, pieces: Chunks) -> np.ndarray:
    """Of the tokens of each document that are used: two that differ behind the cut alone are the same."""
    hashes = corpus.hashes.copy()
    used = pieces.ends(len(corpus))
    for document in np.flatnonzero((used > 0) & (used < corpus.lengths)).tolist():
        hashes[document] = xxhash.xxh3_64_intdigest(corpus.tokens(document)[: used[document]].tobytes())
    return hashes


def _samples(corpus: Any, pieces: Chunks, num_samples: int) -> list[Sample]:
    """Of the questions that the corpus keeps, those of held-out documents whose prompt fits into a row."""
    samples: list[Sample] = []
    first_lengths = dict(
        zip(pieces.document[pieces.start == 0].tolist(), pieces.length[pieces.start == 0], strict=True)
    )
    for kept in corpus.samples:
        if len(samples) < num_samples and kept.document in first_lengths:
            prompt = int(np.argmax(corpus.loss_mask(kept.document)[: first_lengths[kept.document]]))
            samples.append(Sample(kept.question, corpus.tokens(kept.document)[:prompt].tolist(), kept.answer))
    return [sample for sample in samples if sample.prompt]
