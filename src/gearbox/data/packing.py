"""Documents cut into chunks that fit a row, and chunks packed into rows."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Corpus(Protocol):
    """What rows are made of: token ids [n] int32, flags of supervision [n] int8 and file:line, by number."""

    def tokens(self, document: int) -> np.ndarray: ...

    def loss_mask(self, document: int) -> np.ndarray: ...

    def location(self, document: int) -> str: ...


@dataclass(frozen=True)
class Chunks:
    """[n] arrays, one entry a piece, in order of the documents."""

    document: np.ndarray
    start: np.ndarray
    """First token of the piece in its document."""
    length: np.ndarray
    targets: np.ndarray
    """Supervised tokens but for the piece's first one, which has nothing before it."""

    def __len__(self) -> int:
        return len(self.document)

    def where(self, chosen: np.ndarray) -> Chunks:
        return Chunks(self.document[chosen], self.start[chosen], self.length[chosen], self.targets[chosen])

    def ends(self, num_documents: int) -> np.ndarray:
        """How many tokens of each document, from its first one, these pieces reach; [num_documents], 0 for none."""
        ends = np.zeros(num_documents, np.int64)
        np.maximum.at(ends, self.document, self.start + self.length)
        return ends


def chunk_documents(corpus: Any, row_tokens: int, long: list[str]) -> Chunks:
    """The pieces of all documents; `long` says for each origin what becomes of a document longer than a row."""
    whole = corpus.lengths <= row_tokens
    found = [
        (int(i), start) for i in np.flatnonzero(~whole) for start in _chunk_starts(corpus, int(i), row_tokens, long)
    ]
    document = np.concatenate([np.flatnonzero(whole), np.array([i for i, _ in found], np.int64)])
    start = np.concatenate([np.zeros(whole.sum(), np.int64), np.array([start for _, start in found], np.int64)])
    targets = [int(corpus.loss_mask(i)[start + 1 : start + row_tokens].sum()) for i, start in found]
    pieces = Chunks(
        document,
        start,
        np.minimum(corpus.lengths[document] - start, row_tokens),
        np.concatenate([corpus.targets[whole], np.array(targets, np.int64)]),
    )
    return pieces.where(np.lexsort((start, document)))


def _chunk_starts(corpus: Any, document: int, row_tokens: int, long: list[str]) -> range:
    policy = long[corpus.origin[document]]
    stop = {"drop": 0, "truncate": 1, "split": int(corpus.lengths[document])}[policy]
    return range(0, stop, row_tokens)


def pack(lengths: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Best fit, longest first: each piece in exactly one row, whole.

    Returns the pieces in order of the rows, and where each row begins in that order, [num_rows + 1].
    """
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    open_rows: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # by the room that is left
    rooms: list[int] = []  # that some open row has left, sorted
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, row = row_tokens, num_rows
            num_rows += 1
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms.pop(at)
        row_of[piece] = row
        if room > length:
            if not open_rows[room - length]:
                bisect.insort(rooms, room - length)
            open_rows[room - length].append(row)
    sizes = np.bincount(row_of, minlength=num_rows)
    return np.argsort(row_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])
