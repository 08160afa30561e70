"""From tokenized documents to batches. The rows of step s are a pure function of (data, seed, s).

A document is one record of the data; a piece is what a row holds of it (all of it, unless it is longer than a row);
a row is one packed sequence of `batch.row_tokens` tokens.
Shapes: B rows of a micro batch, T tokens of a row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xxhash

from gearbox.config.job import accumulation
from gearbox.data.packing import Chunks, Corpus, pack

IGNORE_INDEX = -100  # a target that is not trained; the value torch's cross entropy skips
WIDTH_STEP = 8  # rows of one document each are padded to a multiple of this: GPUs multiply such shapes faster


class PackedRows:
    """Rows of pieces. Packed ones are isolated by position ids that restart; no attention mask is needed."""

    def __init__(
        self,
        documents: Corpus,
        pieces: Chunks,
        row_tokens: int,
        pad_token: int,
        packing: bool = True,
        group: np.ndarray | None = None,
    ) -> None:
        """`group` [n]: pieces of different groups do not share a row; rows are numbered group by group."""
        self.documents, self.chunks = documents, pieces
        self.row_tokens, self.pad_token, self.packing = row_tokens, pad_token, packing
        groups = np.zeros(len(pieces), np.int64) if group is None else group
        members, starts, self.group_sizes = [], [0], []
        for number in range(int(groups.max(initial=0)) + 1):
            of_group = np.flatnonzero(groups == number)
            if packing:
                order, row_starts = pack(pieces.length[of_group], row_tokens)
            else:
                order, row_starts = np.arange(len(of_group)), np.arange(len(of_group) + 1)
            members.append(of_group[order])
            starts += (row_starts[1:] + starts[-1]).tolist()
            self.group_sizes.append(len(row_starts) - 1)
        self.members, self.starts = np.concatenate(members), np.array(starts)
        self.num_tokens = _sums(pieces.length[self.members], self.starts)
        self.targets = _sums(pieces.targets[self.members], self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def num_documents(self) -> int:
        return len(np.unique(self.chunks.document))

    @property
    def filled(self) -> float:
        """Share of the rows' room that holds tokens."""
        return float(self.num_tokens.sum()) / max(1, len(self) * self.row_tokens)

    def row(self, row_id: int) -> np.ndarray:
        """The pieces of a row, in order."""
        return self.members[self.starts[row_id] : self.starts[row_id + 1]]

    def chunk(self, piece: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and flags of supervision of a piece, [n] both."""
        document, start = int(self.chunks.document[piece]), int(self.chunks.start[piece])
        inside = slice(start, start + int(self.chunks.length[piece]))
        return self.documents.tokens(document)[inside], self.documents.loss_mask(document)[inside]

    @cached_property
    def key(self) -> str:
        """Identifies which tokens of the corpus stand in which row: equal keys of rows and corpus, equal training."""
        digest = xxhash.xxh3_128()
        for array in (self.chunks.document, self.chunks.start, self.chunks.length, self.members, self.starts):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def locations(self, row_ids: list[int], num_shown: int = 8) -> str:
        """Where the documents of these rows come from, for people: the first few."""
        documents = [int(self.chunks.document[piece]) for row_id in row_ids for piece in self.row(row_id)]
        shown = [self.documents.location(document) for document in documents[:num_shown]]
        return ", ".join(shown) + (f" and {len(documents) - num_shown} more" if len(documents) > num_shown else "")

    def batch(self, row_ids: list[int | None]) -> dict[str, torch.Tensor]:
        """input_ids, position_ids, labels and document_ids, each [B, T] int64; None makes a row without targets.

        labels[t] is the token to predict from position t, or IGNORED. document_ids are pieces, and -1 in the padding,
        which position_ids count as a piece of its own. Without packing there are no position_ids, and T is only as
        long as the longest row needs.
        """
        width = self.row_tokens
        if not self.packing:
            longest = max((int(self.num_tokens[i]) for i in row_ids if i is not None), default=1)
            width = min(width, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        shape = (len(row_ids), width)
        batch = {
            "input_ids": np.full(shape, self.pad_token),
            "labels": np.full(shape, IGNORE_INDEX),
            "document_ids": np.full(shape, -1),
        }
        positions = np.tile(np.arange(width), (len(row_ids), 1))
        for i, row_id in enumerate(row_ids):
            at = 0
            for piece in self.row(row_id) if row_id is not None else ():
                tokens, supervised = self.chunk(piece)
                length = len(tokens)
                batch["input_ids"][i, at : at + length] = tokens
                batch["labels"][i, at : at + length - 1] = np.where(supervised[1:], tokens[1:], IGNORE_INDEX)
                batch["document_ids"][i, at : at + length] = piece
                positions[i, at : at + length] = np.arange(length)
                at += length
            positions[i, at:] = np.arange(width - at)
        if self.packing:
            batch["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of the values of each row, [num_rows]; no row is empty."""
    return np.add.reduceat(values, starts[:-1]) if len(starts) > 1 else np.empty(0, np.int64)


@dataclass(frozen=True)
class StepBatch:
    """What one rank feeds to its model in one optimizer step."""

    micro_batches: list[dict[str, torch.Tensor]]
    num_targets: int
    """Targets of the whole step on all ranks."""
    num_tokens: int
    """Tokens of the whole step on all ranks, padding excluded."""
    row_ids: list[int]
    """Rows of the whole step, in order."""


def micro_batches_of(row_ids: list[int], rank: int, data_parallel: int, micro_rows: int) -> list[list[int | None]]:
    """The micro batches of one rank, the same number for each rank; short ones end in None."""
    rounds, micro_rows = accumulation(len(row_ids), data_parallel, micro_rows)
    padded = [*row_ids, *[None] * (rounds * data_parallel * micro_rows - len(row_ids))]
    starts = [(turn * data_parallel + rank) * micro_rows for turn in range(rounds)]
    return [padded[start : start + micro_rows] for start in starts]


def make_step_batch(rows: PackedRows, row_ids: list[int], rank: int, data_parallel: int, micro_rows: int) -> StepBatch:
    """This rank's share of the given rows, with the counts of the whole."""
    return StepBatch(
        micro_batches=[rows.batch(micro) for micro in micro_batches_of(row_ids, rank, data_parallel, micro_rows)],
        num_targets=int(rows.targets[row_ids].sum()),
        num_tokens=int(rows.num_tokens[row_ids].sum()),
        row_ids=row_ids,
    )


def fullest_rows(rows: PackedRows, num_rows: int) -> list[int | None]:
    """Those that share their room with most others, for a look at how well pieces are isolated; None fills up."""
    most = np.argsort(-np.diff(rows.starts), kind="stable")[:num_rows].tolist()
    return [*most, *[None] * (num_rows - len(most))]


def chain_hash(previous: str, row_ids: list[int]) -> str:
    """The running hash of the rows consumed so far, 16 hex digits."""
    return hashlib.sha256(f"{previous}:{row_ids}".encode()).hexdigest()[:16]
