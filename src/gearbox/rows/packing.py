"""Divide documents into chunks that fit a row, and pack the chunks into rows.

A document is one record of the data. A chunk is the part of a document in one row. A document that fits a row is one
chunk. Chunks of a split document overlap by one token, so that every token but the document's first is a target once.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gearbox.data.records import OriginSummary
    from gearbox.data.sources import Origin
    from gearbox.data.tokenization import UnusableRecord


class Documents(Protocol):
    """Tokenized documents, as rows need them. Each array has one entry per document."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens in the document."""
        ...

    def tokens(self, document: int) -> NDArray[np.int32]:
        """Return the token ids, [n]."""
        ...

    def loss_mask(self, document: int) -> NDArray[np.int8]:
        """Return 1 for each token to predict and 0 for others, [n]."""
        ...

    def location(self, document: int) -> str:
        """Return the location of the document as file:line."""
        ...


class Corpus(Documents, Protocol):
    """Tokenized documents, numbered in the order of their sources. Each array has one entry per document."""

    @property
    def targets(self) -> NDArray[np.int32]:
        """Number of tokens to predict. The first token never counts, because nothing precedes it."""
        ...

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Hash of the token ids."""
        ...

    @property
    def labels(self) -> NDArray[np.int8]:
        """1 for a usual document or a good answer, 0 for a bad answer."""
        ...

    @property
    def origin_ids(self) -> NDArray[np.int32]:
        """Index into `origins`."""
        ...

    @property
    def record_numbers(self) -> NDArray[np.int64]:
        """Number of the record in its origin."""
        ...

    @property
    def source_ids(self) -> NDArray[np.int64]:
        """Index of the data.path entry."""
        ...

    @property
    def origins(self) -> list[Origin]:
        """The files and datasets that were read."""
        ...

    @property
    def summaries(self) -> list[OriginSummary]:
        """The forms and counts of each origin's records."""
        ...

    @property
    def bad(self) -> list[UnusableRecord]:
        """Records that could not be used, in order."""
        ...

    def __len__(self) -> int:
        """Return the number of documents."""
        ...


@dataclass(frozen=True)
class Chunks:
    """Chunks as [n] arrays: one entry per chunk, in the order of the documents."""

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    """First token of the chunk in its document."""
    length: NDArray[np.int64]
    targets: NDArray[np.int64]
    """Number of tokens to predict, without the chunk's first token, which nothing precedes."""
    unit_size: int = 1
    """Number of consecutive chunks that are trained together, in one row."""

    def __len__(self) -> int:
        return len(self.document)

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Chunks:
        """Return the chunks selected by a mask or a list of indices."""
        document, start, length, targets = self.document, self.start, self.length, self.targets
        return Chunks(document[chosen], start[chosen], length[chosen], targets[chosen], self.unit_size)

    def ends(self, num_documents: int) -> NDArray[np.int64]:
        """Return the number of leading tokens that these chunks cover in each document, [num_documents]."""
        ends = np.zeros(num_documents, np.int64)
        np.maximum.at(ends, self.document, self.start + self.length)
        return ends


def chunk_documents(corpus: Corpus, row_tokens: int, policies: list[str]) -> Chunks:
    """Return the chunks of all documents.

    `policies` gives the treatment of documents longer than a row, one per origin: truncate, split or drop.
    """
    fits = corpus.lengths <= row_tokens
    long_chunks = [
        (int(i), start) for i in np.flatnonzero(~fits) for start in _chunk_starts(corpus, int(i), row_tokens, policies)
    ]
    long_targets = [int(corpus.loss_mask(i)[start + 1 : start + row_tokens].sum()) for i, start in long_chunks]
    document = np.concatenate([np.flatnonzero(fits), np.array([i for i, _ in long_chunks], np.int64)])
    start = np.concatenate([np.zeros(fits.sum(), np.int64), np.array([start for _, start in long_chunks], np.int64)])
    chunks = Chunks(
        document,
        start,
        np.minimum(corpus.lengths[document] - start, row_tokens),
        np.concatenate([corpus.targets[fits], np.array(long_targets, np.int64)]),
    )
    return chunks.where(np.lexsort((start, document)))


def _chunk_starts(corpus: Corpus, document: int, row_tokens: int, policies: list[str]) -> range:
    """Return the first token of each chunk of a document longer than a row.

    A chunk begins with the last token of the chunk before it: each token is then predicted from the one before.
    """
    policy = policies[corpus.origin_ids[document]]
    last_target = int(corpus.lengths[document]) - 1
    stop = {"drop": 0, "truncate": 1, "split": last_target}[policy]
    return range(0, stop, row_tokens - 1)


def pack(lengths: NDArray[np.int64], row_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assign each chunk, undivided, to exactly one row: best fit, longest first.

    Return the chunks in the order of the rows, and the start of each row in that order, [num_rows + 1].
    """
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    open_rows: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # by the number of tokens that still fit
    rooms: list[int] = []  # sizes for which there is an open row, sorted
    for chunk in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[chunk])
        tightest = bisect.bisect_left(rooms, length)
        if tightest == len(rooms):
            room, row = row_tokens, num_rows
            num_rows += 1
        else:
            room = rooms[tightest]
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms.pop(tightest)
        row_of[chunk] = row
        if room > length:
            if not open_rows[room - length]:
                bisect.insort(rooms, room - length)
            open_rows[room - length].append(row)
    sizes = np.bincount(row_of, minlength=num_rows)
    return np.argsort(row_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])
