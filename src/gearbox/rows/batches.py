"""Pack chunks into rows, choose the rows of each step, and build the tensors that one rank feeds to its model in it.

The rows of step s are a pure function of (rows, seed, s), so resuming replays nothing.

A row is a sequence of `batch.row_tokens` tokens: chunks of documents, then padding.
Shapes: B is the number of rows in a micro-batch, T the number of tokens in a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from gearbox import filesystem
from gearbox.config.job import BatchPlan
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.rows.packing import Chunks, Documents, pack
from gearbox.rows.units import GOOD, IGNORE_INDEX, NOT_COMPARED, ComparedAnswers

if TYPE_CHECKING:
    from gearbox.rows.teacher import Teacher

WIDTH_STEP = 8  # unpacked rows are padded to a multiple of this, because GPUs multiply such shapes faster
WINDOW_STEPS = 50  # unpacked rows are sorted by length within windows of this many steps
NUM_ROUNDS = 6  # of a Feistel network
SLOTS = 1000  # positions in a cycle; the share of a weighted source is exact to one row per cycle

# Of saved rows: four of the chunks, and four of the rows.
NUM_FULLEST = 256
FACTS = "rows.json"
FILES = ("document", "start", "length", "chunk_targets", "members", "starts", "num_tokens", "targets")

Batch = dict[str, torch.Tensor]


class PackedRows:
    """Rows of packed chunks. Position ids restart with each chunk, which isolates chunks without an attention mask."""

    answers: ComparedAnswers | None = None
    """The answers in the chunks, set before training with an objective that compares them."""
    teacher: Teacher | None = None
    """The probabilities of a teacher for the chunks, set before training with distillation."""

    def __init__(
        self,
        corpus: Documents,
        chunks: Chunks,
        row_tokens: int,
        pad_token: int,
        packing: bool = True,
        group: NDArray[np.int64] | None = None,
    ) -> None:
        """Pack the chunks. Chunks of different groups ([n]) never share a row, and rows are numbered group by group."""
        self.documents, self.chunks = corpus, chunks
        self.row_tokens, self.pad_token, self.packing = row_tokens, pad_token, packing
        unit_size = chunks.unit_size
        groups = np.zeros(len(chunks), np.int64) if group is None else group
        members, starts = [], [0]
        self.group_sizes: list[int] = []
        for number in range(int(groups.max(initial=0)) + 1):
            of_group = np.flatnonzero(groups == number).reshape(-1, unit_size)
            if packing:
                order, row_starts = pack(chunks.length[of_group].sum(1), row_tokens)
            else:
                order, row_starts = np.arange(len(of_group)), np.arange(len(of_group) + 1)
            members.append(of_group[order].ravel())
            starts += (row_starts[1:] * unit_size + starts[-1]).tolist()
            self.group_sizes.append(len(row_starts) - 1)
        self.members, self.starts = np.concatenate(members), np.array(starts)
        self.num_tokens = _sums(chunks.length[self.members], self.starts)
        self.targets = _sums(chunks.targets[self.members], self.starts)

    def save(self, folder: Path) -> None:
        """Write the rows to files of a folder, apart from their documents."""
        chunks = self.chunks
        arrays = [chunks.document, chunks.start, chunks.length, chunks.targets, self.members, self.starts]
        for name, array in zip(FILES, [*arrays, self.num_tokens, self.targets], strict=True):
            is_small = not len(array) or array.max() < 2**31
            np.save(folder / f"{name}.npy", array.astype(np.int32 if is_small else np.int64))
        facts = {
            "num_documents": self.num_documents,
            "unit_size": self.chunks.unit_size,
            "key": self.key,
            "group_sizes": self.group_sizes,
            "fullest": self.fullest(NUM_FULLEST),
        }
        filesystem.write(folder / FACTS, json.dumps(facts))

    @classmethod
    def open(cls, folder: Path, corpus: Documents, row_tokens: int, pad_token: int, packing: bool) -> PackedRows:
        """Return the rows in a folder, mapped into memory. What takes a pass over all of them was saved with them."""
        rows = cls.__new__(cls)
        loaded = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in FILES]
        facts = filesystem.read_json_object(folder / FACTS)
        rows.documents, rows.chunks = corpus, replace(Chunks(*loaded[:4]), unit_size=facts.get("unit_size", 1))
        rows.row_tokens, rows.pad_token, rows.packing = row_tokens, pad_token, packing
        rows.members, rows.starts, rows.num_tokens, rows.targets = loaded[4:]
        rows.group_sizes = facts["group_sizes"]
        vars(rows).update(num_documents=facts["num_documents"], key=facts["key"], _fullest=facts["fullest"])
        return rows

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def num_documents(self) -> int:
        """Number of documents with at least one chunk in a row."""
        return len(np.unique(self.chunks.document))

    @property
    def unit_size(self) -> int:
        """Number of documents that are trained together."""
        return self.chunks.unit_size

    @property
    def num_units(self) -> int:
        """Number of documents or pairs of answers with at least one chunk in a row."""
        return self.num_documents // self.unit_size

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
        chunks = [chunk for row_id in row_ids for chunk in self.row(row_id)]
        shown = [self.location(chunk) for chunk in chunks[:num_shown]]
        return ", ".join(shown) + (f" and {len(chunks) - num_shown} more" if len(chunks) > num_shown else "")

    def location(self, chunk: int) -> str:
        """Return the location of a chunk's document as text."""
        return self.documents.location(int(self.chunks.document[chunk]))

    def fullest(self, num_rows: int) -> list[int]:
        """Return up to `num_rows` rows, at most 256, with the most chunks."""
        return self._fullest[:num_rows]

    @cached_property
    def _fullest(self) -> list[int]:
        found: list[int] = np.argsort(-np.diff(self.starts), kind="stable")[:NUM_FULLEST].tolist()
        return found

    def first_chunks(self, num_chunks: int) -> list[tuple[str, NDArray[np.int32], NDArray[np.int8]]]:
        """Return location, token ids and loss mask of the first chunks, in file order."""
        return [(self.location(i), *self.chunk(i)) for i in range(min(num_chunks, len(self.chunks)))]

    def batch(self, row_ids: Sequence[int | None]) -> Batch:
        """Return input_ids, position_ids, labels and chunk_ids, each [B, T] int64. None is a row without targets.

        The label at position t is the token to predict from there, or IGNORE_INDEX. The chunk_ids are indices of
        chunks, and -1 in the padding. The position_ids restart in the padding, as in a chunk. Without packing there
        are no position_ids, each chunk has a line of its own, and T is only as long as the longest chunk needs.
        """
        rows: list[list[int]] = [[] if row_id is None else self.row(row_id).tolist() for row_id in row_ids]
        width = self.row_tokens
        if not self.packing:
            rows, longest = self._lines(rows, row_ids)
            width = min(width, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        shape = (len(rows), width)
        batch = {
            "input_ids": np.full(shape, self.pad_token),
            "labels": np.full(shape, IGNORE_INDEX),
            "chunk_ids": np.full(shape, -1),
        }
        positions = np.tile(np.arange(width), (len(rows), 1))
        for i, row in enumerate(rows):
            first = 0
            for chunk in row:
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

    def _lines(self, rows: list[list[int]], row_ids: Sequence[int | None]) -> tuple[list[list[int]], int]:
        """Return a line for each chunk of rows that are not packed, and the tokens of the longest."""
        if self.unit_size == 1:  # a shard knows the tokens of its rows without opening their documents
            return rows, max((int(self.num_tokens[i]) for i in row_ids if i is not None), default=1)
        lines = [line for row in rows for line in ([[chunk] for chunk in row] or [[]] * self.unit_size)]
        return lines, max((int(self.chunks.length[chunk]) for line in lines for chunk in line), default=1)


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
    num_units: int | None = None
    """Units of the complete step on all ranks, if the objective compares answers, else None."""
    num_good_targets: int = 0
    """Targets of good answers, of the complete step on all ranks."""

    @property
    def num_losses(self) -> int:
        """The number of losses whose mean is the loss of the step: one per target token, or one per unit."""
        return max(1, self.num_targets if self.num_units is None else self.num_units)


def micro_batches_of(row_ids: list[int], rank: int, plan: BatchPlan) -> list[list[int | None]]:
    """Return the rows of each micro-batch of a data-parallel rank.

    All ranks get equal shapes, and a step with fewer rows than planned has the same shapes. None fills missing rows.
    """
    padded = [*row_ids, *[None] * (plan.num_padded_rows - len(row_ids))]
    starts = [(number * plan.data_parallel + rank) * plan.micro_rows for number in range(plan.accumulation_steps)]
    return [padded[start : start + plan.micro_rows] for start in starts]


def make_step_batch(rows: PackedRows, row_ids: list[int], rank: int, plan: BatchPlan) -> StepBatch:
    """Return a data-parallel rank's share of the given rows as micro-batches, with the counts of all given rows."""
    micro_batches = [rows.batch(micro) for micro in micro_batches_of(row_ids, rank, plan)]
    if rows.teacher is not None:
        micro_batches = [rows.teacher.mark(batch) for batch in micro_batches]
    num_targets, num_units, num_good = int(rows.targets[row_ids].sum()), None, 0
    if rows.answers is not None:
        micro_batches = [rows.answers.mark(batch) for batch in micro_batches]
        chunks = np.concatenate([rows.row(row_id) for row_id in row_ids])
        num_units = len(chunks) // rows.unit_size
        sides, targets = rows.answers.sides[chunks], rows.chunks.targets[chunks]
        num_targets, num_good = int(targets[sides != NOT_COMPARED].sum()), int(targets[sides == GOOD].sum())
    return StepBatch(
        micro_batches=micro_batches,
        num_targets=num_targets,
        num_tokens=int(rows.num_tokens[row_ids].sum()),
        row_ids=row_ids,
        num_units=num_units,
        num_good_targets=num_good,
    )


def fullest_rows(rows: PackedRows, num_rows: int) -> list[int | None]:
    """Return the rows with the most chunks, to probe how well chunks are isolated. None fills missing rows."""
    most = rows.fullest(num_rows)
    return [*most, *[None] * (num_rows - len(most))]


def chain_hash(previous: str, row_ids: list[int]) -> str:
    """Return the running hash of the rows consumed so far, as 16 hex digits."""
    return hashlib.sha256(f"{previous}:{row_ids}".encode()).hexdigest()[:16]


class Sampler:
    """A sampler that chooses the rows of a step, position by position.

    Each group of rows has its own epochs; there is one group, unless sources have weights. An epoch is a permutation
    drawn from (seed, epoch), of which only the window around a position is computed. `shares` spreads the positions of
    each group evenly over the run. If `lengths` of the rows are given, rows of similar length come in the same step.
    """

    def __init__(
        self,
        group_sizes: list[int],
        rows_per_step: int,
        seed: int,
        shares: list[float] | None = None,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self.rows_per_step, self.seed, self.lengths = rows_per_step, seed, lengths
        self.group_sizes = group_sizes
        self.group_firsts: list[int] = np.cumsum([0, *group_sizes]).tolist()
        self._slots: list[int] = _deal_slots(shares or [1.0] * len(group_sizes)).tolist()
        """Group of each position in a cycle."""
        self._earlier = [self._slots[:slot].count(group) for slot, group in enumerate(self._slots)]
        """Number of earlier positions with the same group, for each position in a cycle."""
        self._per_cycle = [self._slots.count(group) for group in range(len(group_sizes))]
        """Number of positions of each group in a cycle."""
        self._permuted = lru_cache(maxsize=4 * len(group_sizes))(self._permute)

    def place(self, position: int) -> tuple[int, int, int]:
        """Return the group, its epoch and the offset in the epoch of a position, counted from the run's first row."""
        cycle, slot = divmod(position, len(self._slots))
        group = self._slots[slot]
        epoch, offset = divmod(cycle * self._per_cycle[group] + self._earlier[slot], self.group_sizes[group])
        return group, epoch, offset

    def row(self, position: int) -> int:
        """Return the row at a position, counted from the first row of the first step."""
        group, epoch, offset = self.place(position)
        number, at = divmod(offset, WINDOW_STEPS * self.rows_per_step)
        return self.group_firsts[group] + int(self._permuted(group, epoch, number)[at])

    def rows_of_step(self, step: int) -> list[int]:
        """Return the rows of a step, in order."""
        first = step * self.rows_per_step
        return [self.row(position) for position in range(first, first + self.rows_per_step)]

    def _permute(self, group: int, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the rows of a group in one window of an epoch, in order."""
        size, window = self.group_sizes[group], WINDOW_STEPS * self.rows_per_step
        rows = shuffled(np.arange(number * window, min((number + 1) * window, size)), size, (self.seed, epoch, group))
        if self.lengths is None:
            return rows
        lengths = self.lengths[self.group_firsts[group] + rows]
        return self.sort_by_length(rows, lengths, (self.seed, epoch, group, number))

    def sort_by_length(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], key: tuple[int, ...]
    ) -> NDArray[np.int64]:
        """Sort the rows of a window, [n], by their lengths, [n], and then shuffle its full steps."""
        rows = rows[np.argsort(lengths, kind="stable")]
        num_full = len(rows) // self.rows_per_step
        full = rows[: num_full * self.rows_per_step].reshape(num_full, self.rows_per_step)
        return np.concatenate([full[np.random.default_rng(key).permutation(num_full)].ravel(), rows[full.size :]])


def shuffled(places: NDArray[np.int64], size: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Return where items at these places, [n], are in a permutation of `size` items that a key of integers gives.

    A Feistel network permutes the places below a power of 4, so nothing of the permutation is kept. A result that is
    not below `size` is permuted again (cycle walking; Black and Rogaway, 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, bits = np.uint64((1 << half) - 1), np.uint64(half)
    round_keys = np.random.SeedSequence(key).generate_state(NUM_ROUNDS, np.uint64)
    found = places.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> bits, found[outside] & mask
        for round_key in round_keys:
            mixed = (right ^ round_key) * np.uint64(0xBF58476D1CE4E5B9)  # constants of splitmix64
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        found[outside] = left << bits | right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def make_sampler(recipe: Recipe, rows: PackedRows) -> Sampler:
    """Return the sampler for a recipe's training rows. Raise UserError if the weights leave a source without rows."""
    weights = [source.weight for source in recipe.data.sources]
    shares = [weight for weight in weights if weight is not None] or None
    lengths = None if rows.packing else rows.num_tokens
    return Sampler(rows.group_sizes, recipe.batch.rows, recipe.train.seed, shares, lengths)


def _deal_slots(shares: list[float]) -> NDArray[np.int64]:
    """Return the group of each position in a cycle. Each group gets its share of the positions, evenly spread."""
    if len(shares) == 1:
        return np.zeros(1, np.int64)
    exact = np.array(shares) / sum(shares) * SLOTS
    counts = np.floor(exact).astype(int)
    for group in np.argsort(counts - exact, kind="stable")[: SLOTS - counts.sum()]:
        counts[group] += 1
    if not counts.all():
        raise UserError(f"data.path: the weights {shares} give a source less than one row in {SLOTS:,}")
    positions = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(shares)), counts)[np.argsort(positions, kind="stable")]
