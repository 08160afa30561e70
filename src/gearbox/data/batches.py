"""Pack chunks into rows, and build the tensors that one rank feeds to its model in one step.

A row is a sequence of `batch.row_tokens` tokens: chunks of documents, then padding.
Shapes: B is the number of rows in a micro-batch, T the number of tokens in a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from gearbox.config.job import BatchPlan
from gearbox.data.packing import Chunks, Corpus, pack

IGNORE_INDEX = -100  # label of an untrained target; torch's cross entropy skips it
WIDTH_STEP = 8  # unpacked rows are padded to a multiple of this, because GPUs multiply such shapes faster

Batch = dict[str, torch.Tensor]


class PackedRows:
    """Rows of packed chunks. Position ids restart with each chunk, which isolates chunks without an attention mask."""

    def __init__(
        self,
        corpus: Corpus,
        chunks: Chunks,
        row_tokens: int,
        pad_token: int,
        packing: bool = True,
        group: NDArray[np.int64] | None = None,
    ) -> None:
        """Pack the chunks. Chunks of different groups ([n]) never share a row, and rows are numbered group by group."""
        self.documents, self.chunks = corpus, chunks
        self.row_tokens, self.pad_token, self.packing = row_tokens, pad_token, packing
        groups = np.zeros(len(chunks), np.int64) if group is None else group
        members, starts = [], [0]
        self.group_sizes: list[int] = []
        for number in range(int(groups.max(initial=0)) + 1):
            of_group = np.flatnonzero(groups == number)
            if packing:
                order, row_starts = pack(chunks.length[of_group], row_tokens)
            else:
                order, row_starts = np.arange(len(of_group)), np.arange(len(of_group) + 1)
            members.append(of_group[order])
            starts += (row_starts[1:] + starts[-1]).tolist()
            self.group_sizes.append(len(row_starts) - 1)
        self.members, self.starts = np.concatenate(members), np.array(starts)
        self.num_tokens = _sums(chunks.length[self.members], self.starts)
        self.targets = _sums(chunks.targets[self.members], self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents with at least one chunk in a row."""
        return len(np.unique(self.chunks.document))

    @property
    def filled(self) -> float:
        """Share of the rows' capacity that is filled with tokens."""
        return float(self.num_tokens.sum()) / max(1, len(self) * self.row_tokens)

    def row(self, row_id: int) -> NDArray[np.int64]:
        """Return the chunks of a row, in order."""
        return self.members[self.starts[row_id] : self.starts[row_id + 1]]

    def chunk(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Return the token ids and the loss mask of a chunk, both [n]."""
        document, start = int(self.chunks.document[index]), int(self.chunks.start[index])
        inside = slice(start, start + int(self.chunks.length[index]))
        return self.documents.tokens(document)[inside], self.documents.loss_mask(document)[inside]

    @cached_property
    def key(self) -> str:
        """Hash of which tokens of the corpus are in which row. Equal rows of equal corpora train identically."""
        digest = xxhash.xxh3_128()
        for array in (self.chunks.document, self.chunks.start, self.chunks.length, self.members, self.starts):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def locations(self, row_ids: Sequence[int], num_shown: int = 8) -> str:
        """Return the locations of the first `num_shown` documents in these rows, as text."""
        documents = [int(self.chunks.document[chunk]) for row_id in row_ids for chunk in self.row(row_id)]
        shown = [self.documents.location(document) for document in documents[:num_shown]]
        return ", ".join(shown) + (f" and {len(documents) - num_shown} more" if len(documents) > num_shown else "")

    def batch(self, row_ids: Sequence[int | None]) -> Batch:
        """Return input_ids, position_ids, labels and chunk_ids, each [B, T] int64. None is a row without targets.

        The label at position t is the token to predict from there, or IGNORE_INDEX. The chunk_ids are indices of
        chunks, and -1 in the padding. The position_ids restart in the padding, as in a chunk. Without packing there
        are no position_ids, and T is only as long as the longest row needs.
        """
        width = self.row_tokens
        if not self.packing:
            longest = max((int(self.num_tokens[i]) for i in row_ids if i is not None), default=1)
            width = min(width, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        shape = (len(row_ids), width)
        batch = {
            "input_ids": np.full(shape, self.pad_token),
            "labels": np.full(shape, IGNORE_INDEX),
            "chunk_ids": np.full(shape, -1),
        }
        positions = np.tile(np.arange(width), (len(row_ids), 1))
        for i, row_id in enumerate(row_ids):
            first = 0
            for chunk in self.row(row_id) if row_id is not None else ():
                tokens, loss_mask = self.chunk(chunk)
                end = first + len(tokens)
                batch["input_ids"][i, first:end] = tokens
                batch["labels"][i, first : end - 1] = np.where(loss_mask[1:], tokens[1:], IGNORE_INDEX)
                batch["chunk_ids"][i, first:end] = chunk
                positions[i, first:end] = np.arange(len(tokens))
                first = end
            positions[i, first:] = np.arange(width - first)
        if self.packing:
            batch["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def _sums(values: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of each row's values, [num_rows]. No row may be empty."""
    return np.add.reduceat(values, starts[:-1]) if len(starts) > 1 else np.empty(0, np.int64)


@dataclass(frozen=True)
class StepBatch:
    """The input of one rank for one optimizer step."""

    micro_batches: list[Batch]
    num_targets: int
    """Targets of the complete step on all ranks."""
    num_tokens: int
    """Tokens of the complete step on all ranks, without padding."""
    row_ids: list[int]
    """Rows of the complete step, in order."""


def micro_batches_of(row_ids: list[int], rank: int, plan: BatchPlan) -> list[list[int | None]]:
    """Return the rows of each micro-batch of a data-parallel rank.

    All ranks get equal shapes, and a step with fewer rows than planned has the same shapes. None fills missing rows.
    """
    padded = [*row_ids, *[None] * (plan.num_padded_rows - len(row_ids))]
    starts = [(number * plan.data_parallel + rank) * plan.micro_rows for number in range(plan.accumulation_steps)]
    return [padded[start : start + plan.micro_rows] for start in starts]


def make_step_batch(rows: PackedRows, row_ids: list[int], rank: int, plan: BatchPlan) -> StepBatch:
    """Return a data-parallel rank's share of the given rows as micro-batches, with the counts of all given rows."""
    return StepBatch(
        micro_batches=[rows.batch(micro) for micro in micro_batches_of(row_ids, rank, plan)],
        num_targets=int(rows.targets[row_ids].sum()),
        num_tokens=int(rows.num_tokens[row_ids].sum()),
        row_ids=row_ids,
    )


def fullest_rows(rows: PackedRows, num_rows: int) -> list[int | None]:
    """Return the rows with the most chunks, to probe how well chunks are isolated. None fills missing rows."""
    most = np.argsort(-np.diff(rows.starts), kind="stable")[:num_rows].tolist()
    return [*most, *[None] * (num_rows - len(most))]


def chain_hash(previous: str, row_ids: list[int]) -> str:
    """Return the running hash of the rows consumed so far, as 16 hex digits."""
    return hashlib.sha256(f"{previous}:{row_ids}".encode()).hexdigest()[:16]
