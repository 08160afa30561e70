"""Group documents into units, which a step trains together: answers that are compared share a row, and so a rank.

A unit is one document, or two if the objective compares answers: documents 2i and 2i + 1 of the corpus. They are a
chosen and a rejected answer, or for KTO an answer and another prompt's answer to the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from gearbox.config.recipe import Recipe
from gearbox.data.judged_answers import hash_of_pair
from gearbox.rows.packing import Chunks, Corpus, Documents

if TYPE_CHECKING:
    from gearbox.data.records import OriginSummary
    from gearbox.data.sources import Origin
    from gearbox.data.tokenization import UnusableRecord

T = TypeVar("T", bound=np.generic)
IGNORE_INDEX = -100  # label of an untrained target; torch's cross entropy skips it
SMALLEST_PASS = 8  # tokens of a pass without targets
GOOD, BAD, NOT_COMPARED = 0, 1, -1
"""The sides of an answer. One that is not compared only measures how far the model has moved."""


class MismatchedCorpus:
    """A corpus for KTO: each document of another corpus, followed by its prompt with the answer to another prompt.

    The loss of KTO estimates the distance to the reference from answers that do not belong to their prompts (Ethayarajh
    et al., 2024). The other answer is that of the nearest earlier document with another prompt, in a circle. It depends
    on the data alone, so that its reference can be kept.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return 2 * len(self.corpus)

    @cached_property
    def _answer_starts(self) -> NDArray[np.int64]:
        """First token of each document's answer, [n]."""
        return np.array([int(np.argmax(self.corpus.loss_mask(i))) for i in range(len(self.corpus))], np.int64)

    @cached_property
    def _others(self) -> NDArray[np.int64]:
        """The document whose answer follows each document's prompt, [n]; its own if all prompts are equal."""
        corpus, starts = self.corpus, self._answer_starts
        prompts = [xxhash.xxh3_64_intdigest(corpus.tokens(i)[: starts[i]].tobytes()) for i in range(len(corpus))]
        others, last_other = np.arange(len(corpus)), -1
        for i in [*range(len(corpus))] * 2:  # once around the circle, to know what precedes the first
            if prompts[i] != prompts[i - 1]:
                last_other = (i - 1) % len(corpus)
            others[i] = i if last_other < 0 else last_other
        return others

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each document."""
        own, starts = self.corpus.lengths, self._answer_starts
        return _alternating(own, (starts + (own - starts)[self._others]).astype(np.int32))

    @cached_property
    def targets(self) -> NDArray[np.int32]:
        """Number of tokens to predict in each document."""
        own, has_no_prompt = self.corpus.targets, self._answer_starts == 0
        answers = own + has_no_prompt  # the first token of a document is never a target
        return _alternating(own, (answers[self._others] - has_no_prompt).astype(np.int32))

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """Hash of the document, and once more for its prompt with the other answer: both are used alike."""
        return np.repeat(self.corpus.hashes, 2)

    @property
    def labels(self) -> NDArray[np.int8]:
        """1 for a good answer and 0 for a bad one, and once more for its prompt with the other answer."""
        return np.repeat(self.corpus.labels, 2)

    @property
    def origin_ids(self) -> NDArray[np.int32]:
        """Index into `origins` of each document."""
        return np.repeat(self.corpus.origin_ids, 2)

    @property
    def record_numbers(self) -> NDArray[np.int64]:
        """Number of the record of each document."""
        return np.repeat(self.corpus.record_numbers, 2)

    @property
    def source_ids(self) -> NDArray[np.int64]:
        """Index of the data.path entry of each document."""
        return np.repeat(self.corpus.source_ids, 2)

    @property
    def origins(self) -> list[Origin]:
        """The files and datasets that were read."""
        return self.corpus.origins

    @property
    def summaries(self) -> list[OriginSummary]:
        """The forms and counts of each origin's records."""
        return self.corpus.summaries

    @property
    def bad(self) -> list[UnusableRecord]:
        """Records that could not be used, in order."""
        return self.corpus.bad

    def tokens(self, document: int) -> NDArray[np.int32]:
        """Return the token ids, [n]."""
        return self._joined(document, self.corpus.tokens)

    def loss_mask(self, document: int) -> NDArray[np.int8]:
        """Return 1 for each token to predict and 0 for others, [n]."""
        return self._joined(document, self.corpus.loss_mask)

    def _joined(self, document: int, of: Callable[[int], NDArray[T]]) -> NDArray[T]:
        own, is_mismatched = divmod(document, 2)
        if not is_mismatched:
            return of(own)
        other = int(self._others[own])
        return np.concatenate([of(own)[: self._answer_starts[own]], of(other)[self._answer_starts[other] :]])

    def location(self, document: int) -> str:
        """Return the location of the document as file:line."""
        return self.corpus.location(document // 2)


def _alternating(first: NDArray[T], second: NDArray[T]) -> NDArray[T]:
    """Return the items of two arrays, [n], in turn: [2n]."""
    return np.stack([first, second], 1).ravel()


def as_units(recipe: Recipe, corpus: Corpus) -> Corpus:
    """Return the corpus whose documents make up the units of the objective."""
    return MismatchedCorpus(corpus) if recipe.train.objective == "kto" else corpus


def place_of(corpus: Documents, document: int) -> int:
    """Return the number that a document of the data has in the corpus of units."""
    return 2 * document if isinstance(corpus, MismatchedCorpus) else document


def chunk_pairs(corpus: Corpus, row_tokens: int, policies: list[str]) -> Chunks:
    """Return one chunk per document, cut so that the two documents of each unit fit into a row together.

    A document may be as long as the other leaves room for, and has at least half of a row. `policies` gives the
    treatment of longer ones, one per origin: truncate or drop.
    """
    lengths = corpus.lengths.astype(np.int64).reshape(-1, 2)
    kept = np.minimum(lengths, np.maximum(row_tokens // 2, row_tokens - lengths[:, ::-1]))
    drops = np.array([policy == "drop" for policy in policies], bool)[corpus.origin_ids].reshape(-1, 2).any(1)
    is_used = ~(drops & (kept < lengths).any(1))
    targets = corpus.targets.astype(np.int64)
    for document in np.flatnonzero((kept < lengths).ravel()).tolist():
        targets[document] = int(corpus.loss_mask(document)[1 : kept.flat[document]].sum())
    chosen = np.flatnonzero(np.repeat(is_used, 2))
    return Chunks(chosen, np.zeros(len(chosen), np.int64), kept.ravel()[chosen], targets[chosen], unit_size=2)


def usable_pairs(chunks: Chunks, corpus: Corpus, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which chunks of pairs can be compared: both have targets, and they differ before the cut."""
    pairs = chunks.document.reshape(-1, 2)
    is_cut = (chunks.length < corpus.lengths[chunks.document]).reshape(-1, 2).any(1)
    is_same = (hashes[pairs[:, 0]] == hashes[pairs[:, 1]]) & is_cut
    if isinstance(corpus, MismatchedCorpus):  # whose pairs are not compared with each other
        is_same[:] = False
    return np.repeat((chunks.targets > 0).reshape(-1, 2).all(1) & ~is_same, 2)


def hashes_of_records(corpus: Corpus, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hashes of documents, [n], where the two documents of a pair have the hash of both."""
    found, number, origin = hashes.copy(), corpus.record_numbers, corpus.origin_ids
    if isinstance(corpus, MismatchedCorpus):  # whose pairs are also two documents of one record
        return np.repeat(hashes_of_records(corpus.corpus, hashes[::2]), 2)
    first = np.flatnonzero((number[1:] == number[:-1]) & (origin[1:] == origin[:-1]))
    pairs = zip(hashes[first].tolist(), hashes[first + 1].tolist(), strict=True)
    found[first] = found[first + 1] = np.array([hash_of_pair(*pair) for pair in pairs], np.uint64)
    return found


@dataclass(frozen=True)
class ComparedAnswers:
    """The answers in the chunks of rows, for an objective that compares them."""

    sides: NDArray[np.int8]
    """The side of each chunk's answer, [n]."""
    reference: NDArray[np.float32] | None
    """The reference's log-probability of each chunk's answer, [n], or None without a reference."""

    @classmethod
    def of(cls, corpus: Documents, chunks: Chunks) -> ComparedAnswers:
        """Return the answers of these chunks, without a reference."""
        is_second = chunks.document % 2
        if isinstance(corpus, MismatchedCorpus):
            own = np.where(corpus.labels[chunks.document] > 0, GOOD, BAD)
            return cls(np.where(is_second, NOT_COMPARED, own).astype(np.int8), None)
        return cls(np.where(is_second, BAD, GOOD).astype(np.int8), None)

    def mark(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a batch with `answers` and, with a reference, `reference`, both [B, T].

        The number of an answer is 2 x its unit in the batch + its side, and -1 elsewhere. The reference is at the first
        token of an answer's chunk. It is the bits of an fp32, as int32: FSDP2 would round numbers to bf16. Answers that
        are not compared have no labels.
        """
        chunks = batch["chunk_ids"].numpy()
        sides = np.where(chunks < 0, NOT_COMPARED, self.sides[chunks])
        is_compared = sides != NOT_COMPARED
        answers = np.full(chunks.shape, -1)
        units = np.unique(chunks[is_compared] // 2, return_inverse=True)[1]
        answers[is_compared] = 2 * units + sides[is_compared]
        marked = batch | {
            "labels": batch["labels"].masked_fill(torch.from_numpy(~is_compared), IGNORE_INDEX),
            "answers": torch.from_numpy(answers),
        }
        if self.reference is not None:
            is_first = is_compared & (np.diff(chunks, axis=1, prepend=-1) != 0)
            at_first = np.where(is_first, self.reference[chunks], np.float32(0))
            marked["reference"] = torch.from_numpy(at_first.view(np.int32))
        return marked


def passes_of(
    batch: dict[str, torch.Tensor], max_tokens: int, unit_size: int | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return the chunks of a packed batch as batches of one row each, [1, n], for passes of few tokens.

    Chunks are isolated, so the sum over the passes is the batch's. A pass has at most `max_tokens` tokens, unless a
    single chunk or unit is longer. Padding and chunks without targets are left out. There is at least one pass.

    A unit has `unit_size` chunks, by default two if the batch has answers that are compared.
    """
    documents, is_target = batch["chunk_ids"].flatten(), batch["labels"].flatten() != IGNORE_INDEX
    units = documents // (unit_size or (2 if "answers" in batch else 1))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (documents.diff() != 0).nonzero()[:, 0] + 1])
    lengths = starts.diff(append=torch.tensor([len(documents)])).tolist()
    spans: list[list[slice]] = []
    num_tokens = 0  # of the last pass
    for start, length in zip(starts.tolist(), lengths, strict=True):
        inside = slice(start, start + length)
        if documents[start] < 0 or not is_target[inside].any():
            continue
        is_same_unit = bool(spans) and units[spans[-1][-1].start] == units[start]
        if not spans or (num_tokens + length > max_tokens and not is_same_unit):
            spans.append([])
            num_tokens = 0
        spans[-1].append(inside)
        num_tokens += length
    spans = spans or [[slice(0, SMALLEST_PASS)]]
    flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
    passes = [{name: torch.cat([t[inside] for inside in span])[None] for name, t in flat.items()} for span in spans]
    return [_renumbered(one) if "answers" in one else one for one in passes]


def _renumbered(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a part of a marked batch, whose answers are numbered from 0 again."""
    answers = batch["answers"]
    is_compared = answers >= 0
    units = torch.unique(answers[is_compared] // 2, return_inverse=True)[1]
    return batch | {"answers": answers.masked_scatter(is_compared, 2 * units + answers[is_compared] % 2)}
