"""From tokenized documents to batches. The rows of step s are a pure function of (data, seed, s).

A document is one record of the data; a piece is what a row holds of it (all of it, unless it is longer than a row);
a row is one packed sequence of `batch.row_tokens` tokens.
Shapes: B rows of a micro batch, T tokens of a row.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from gearbox.config import Data, Recipe, UserError, accumulation

IGNORED = -100  # a target that is not trained; the value torch's cross entropy skips
WIDTH_STEP = 8  # rows of one document each are padded to a multiple of this: GPUs multiply such shapes faster
GROUP_STEPS = 50  # steps within which rows of one document each are sorted by length
SLOTS = 1000  # the shares of weighted sources are kept to within one row of so many


class Documents(Protocol):
    """What rows are made of: token ids [n] int32, flags of supervision [n] int8 and file:line, by number."""

    def tokens(self, document: int) -> np.ndarray: ...

    def supervised(self, document: int) -> np.ndarray: ...

    def place(self, document: int) -> str: ...


# --------------------------------------------------------------------------- pieces


@dataclass(frozen=True)
class Pieces:
    """[n] arrays, one entry a piece, in order of the documents."""

    document: np.ndarray
    start: np.ndarray
    """First token of the piece in its document."""
    length: np.ndarray
    targets: np.ndarray
    """Supervised tokens but for the piece's first one, which has nothing before it."""

    def __len__(self) -> int:
        return len(self.document)

    def where(self, chosen: np.ndarray) -> Pieces:
        return Pieces(self.document[chosen], self.start[chosen], self.length[chosen], self.targets[chosen])

    def ends(self, num_documents: int) -> np.ndarray:
        """How many tokens of each document, from its first one, these pieces reach; [num_documents], 0 for none."""
        ends = np.zeros(num_documents, np.int64)
        np.maximum.at(ends, self.document, self.start + self.length)
        return ends


def cut(corpus: Any, row_tokens: int, long: list[str]) -> Pieces:
    """The pieces of all documents; `long` says for each origin what becomes of a document longer than a row."""
    whole = corpus.lengths <= row_tokens
    found = [(int(i), start) for i in np.flatnonzero(~whole) for start in _starts(corpus, int(i), row_tokens, long)]
    document = np.concatenate([np.flatnonzero(whole), np.array([i for i, _ in found], np.int64)])
    start = np.concatenate([np.zeros(whole.sum(), np.int64), np.array([start for _, start in found], np.int64)])
    targets = [int(corpus.supervised(i)[start + 1 : start + row_tokens].sum()) for i, start in found]
    pieces = Pieces(
        document,
        start,
        np.minimum(corpus.lengths[document] - start, row_tokens),
        np.concatenate([corpus.targets[whole], np.array(targets, np.int64)]),
    )
    return pieces.where(np.lexsort((start, document)))


def _starts(corpus: Any, document: int, row_tokens: int, long: list[str]) -> range:
    policy = long[corpus.origin[document]]
    stop = {"drop": 0, "truncate": 1, "split": int(corpus.lengths[document])}[policy]
    return range(0, stop, row_tokens)


# --------------------------------------------------------------------------- rows


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


class Rows:
    """Rows of pieces. Packed ones are isolated by position ids that restart; no attention mask is needed."""

    def __init__(
        self,
        documents: Documents,
        pieces: Pieces,
        row_tokens: int,
        pad_token: int,
        packing: bool = True,
        group: np.ndarray | None = None,
    ) -> None:
        """`group` [n]: pieces of different groups do not share a row; rows are numbered group by group."""
        self.documents, self.pieces = documents, pieces
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
        return len(np.unique(self.pieces.document))

    @property
    def filled(self) -> float:
        """Share of the rows' room that holds tokens."""
        return float(self.num_tokens.sum()) / max(1, len(self) * self.row_tokens)

    def row(self, row_id: int) -> np.ndarray:
        """The pieces of a row, in order."""
        return self.members[self.starts[row_id] : self.starts[row_id + 1]]

    def piece(self, piece: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and flags of supervision of a piece, [n] both."""
        document, start = int(self.pieces.document[piece]), int(self.pieces.start[piece])
        inside = slice(start, start + int(self.pieces.length[piece]))
        return self.documents.tokens(document)[inside], self.documents.supervised(document)[inside]

    @cached_property
    def key(self) -> str:
        """Identifies which tokens of the corpus stand in which row: equal keys of rows and corpus, equal training."""
        digest = xxhash.xxh3_128()
        for array in (self.pieces.document, self.pieces.start, self.pieces.length, self.members, self.starts):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def places(self, row_ids: list[int], num_shown: int = 8) -> str:
        """Where the documents of these rows come from, for people: the first few."""
        documents = [int(self.pieces.document[piece]) for row_id in row_ids for piece in self.row(row_id)]
        shown = [self.documents.place(document) for document in documents[:num_shown]]
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
            "labels": np.full(shape, IGNORED),
            "document_ids": np.full(shape, -1),
        }
        positions = np.tile(np.arange(width), (len(row_ids), 1))
        for i, row_id in enumerate(row_ids):
            at = 0
            for piece in self.row(row_id) if row_id is not None else ():
                tokens, supervised = self.piece(piece)
                length = len(tokens)
                batch["input_ids"][i, at : at + length] = tokens
                batch["labels"][i, at : at + length - 1] = np.where(supervised[1:], tokens[1:], IGNORED)
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
class Step:
    """What one rank feeds to its model in one optimizer step."""

    micro_batches: list[dict[str, torch.Tensor]]
    num_targets: int
    """Targets of the whole step on all ranks."""
    num_tokens: int
    """Tokens of the whole step on all ranks, padding excluded."""
    row_ids: list[int]
    """Rows of the whole step, in order."""


class Order:
    """Which rows belong to step s, read position by position.

    Each group of rows (one, unless sources have weights) has its own epochs, an epoch being a permutation drawn from
    (seed, epoch); `shares` deals the positions out to the groups, evenly all along. With `lengths` of the rows, rows
    of similar length come in the same step.
    """

    def __init__(
        self,
        group_sizes: list[int],
        rows_per_step: int,
        seed: int,
        shares: list[float] | None = None,
        lengths: np.ndarray | None = None,
    ) -> None:
        self.rows_per_step, self.seed, self.lengths = rows_per_step, seed, lengths
        self.group_sizes, self.group_firsts = group_sizes, np.cumsum([0, *group_sizes]).tolist()
        self.slots = _slots(shares or [1.0] * len(group_sizes))
        self.turns = [int((self.slots[:i] == group).sum()) for i, group in enumerate(self.slots)]
        self.counts = np.bincount(self.slots, minlength=len(group_sizes))
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def row(self, position: int) -> int:
        cycle, slot = divmod(position, len(self.slots))
        group = int(self.slots[slot])
        epoch, offset = divmod(cycle * int(self.counts[group]) + self.turns[slot], self.group_sizes[group])
        return self.group_firsts[group] + int(self._permutation(group, epoch)[offset])

    def _permutation(self, group: int, epoch: int) -> np.ndarray:
        if self._epochs.get(group, (-1,))[0] != epoch:
            draw = np.random.default_rng([self.seed, epoch, group] if group else [self.seed, epoch])
            order = draw.permutation(self.group_sizes[group])
            if self.lengths is not None:
                order = self._by_length(order, self.lengths[self.group_firsts[group] :], draw)
            self._epochs[group] = (epoch, order)
        return self._epochs[group][1]

    def _by_length(self, order: np.ndarray, lengths: np.ndarray, draw: Any) -> np.ndarray:
        """Sorted within some steps' worth of rows, and those steps shuffled again."""
        window = GROUP_STEPS * self.rows_per_step
        steps = []
        for first in range(0, len(order), window):
            rows = order[first : first + window]
            rows = rows[np.argsort(lengths[rows], kind="stable")]
            cuts = [rows[i : i + self.rows_per_step] for i in range(0, len(rows), self.rows_per_step)]
            whole = [cut for cut in cuts if len(cut) == self.rows_per_step]
            steps += [whole[i] for i in draw.permutation(len(whole))] + cuts[len(whole) :]
        return np.concatenate(steps) if steps else order

    def step(self, step: int) -> list[int]:
        first = step * self.rows_per_step
        return [self.row(position) for position in range(first, first + self.rows_per_step)]


def order(recipe: Recipe, rows: Rows) -> Order:
    """The order of a recipe's rows."""
    weights = [source.weight for source in recipe.data.sources]
    shares = [weight for weight in weights if weight is not None] or None
    lengths = None if rows.packing else rows.num_tokens
    return Order(rows.group_sizes, recipe.batch.rows, recipe.train.seed, shares, lengths)


def _slots(shares: list[float]) -> np.ndarray:
    """The group of each position of a cycle: every group as often as its share says, spread evenly."""
    if len(shares) == 1:
        return np.zeros(1, np.int64)
    exact = np.array(shares) / sum(shares) * SLOTS
    counts = np.floor(exact).astype(int)
    for group in np.argsort(counts - exact, kind="stable")[: SLOTS - counts.sum()]:
        counts[group] += 1
    if not counts.all():
        raise UserError(f"data.path: the weights {shares} leave a source less than one row in {SLOTS:,}")
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(shares)), counts)[np.argsort(places, kind="stable")]


def deal(row_ids: list[int], rank: int, data_parallel: int, micro_rows: int) -> list[list[int | None]]:
    """The micro batches of one rank, the same number for each rank; short ones end in None."""
    rounds, micro_rows = accumulation(len(row_ids), data_parallel, micro_rows)
    padded = [*row_ids, *[None] * (rounds * data_parallel * micro_rows - len(row_ids))]
    starts = [(turn * data_parallel + rank) * micro_rows for turn in range(rounds)]
    return [padded[start : start + micro_rows] for start in starts]


def make_step(rows: Rows, row_ids: list[int], rank: int, data_parallel: int, micro_rows: int) -> Step:
    """This rank's share of the given rows, with the counts of the whole."""
    return Step(
        micro_batches=[rows.batch(micro) for micro in deal(row_ids, rank, data_parallel, micro_rows)],
        num_targets=int(rows.targets[row_ids].sum()),
        num_tokens=int(rows.num_tokens[row_ids].sum()),
        row_ids=row_ids,
    )


def fullest_rows(rows: Rows, num_rows: int) -> list[int | None]:
    """Those that share their room with most others, for a look at how well pieces are isolated; None fills up."""
    most = np.argsort(-np.diff(rows.starts), kind="stable")[:num_rows].tolist()
    return [*most, *[None] * (num_rows - len(most))]


def chain_hash(previous: str, row_ids: list[int]) -> str:
    """The running hash of the rows consumed so far, 16 hex digits."""
    return hashlib.sha256(f"{previous}:{row_ids}".encode()).hexdigest()[:16]


# --------------------------------------------------------------------------- splits


@dataclass(frozen=True)
class Sample:
    """A held-out question to put to the model, and its right answer."""

    question: str
    prompt: list[int]
    """Tokens up to the answer."""
    answer: str


@dataclass(frozen=True)
class Dropped:
    place: str
    """file:line"""
    reason: str


@dataclass(frozen=True)
class Prepared:
    training: Rows
    held_out: Rows
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


def arrange(recipe: Recipe, corpus: Any, evaluated: Any, tokenizer: Any, packing: bool) -> Prepared:
    """Cut the documents, hold some out and pack the rest. `evaluated`, like `corpus`, is that of eval.path, or None.

    Raises UserError where nothing is left to train on.
    """
    data, batch, evaluation = recipe.data, recipe.batch, recipe.eval
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_token = next(token for token in pads if token is not None)
    long = _policies(corpus, data)
    pieces = cut(corpus, batch.row_tokens, long)
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
        held_corpus, held_pieces = evaluated, cut(evaluated, batch.row_tokens, _policies(evaluated, data))
        unused = _left_out(evaluated, held_pieces)
        held_pieces = held_pieces.where(held_pieces.targets > 0)
        if not len(held_pieces):
            raise UserError(f"eval.path: {evaluation.path!r} leaves nothing to evaluate on: {told(unused)}")
        is_held_out = np.isin(hashes, _hashes(evaluated, held_pieces)[held_pieces.document])
        copies = np.flatnonzero(is_used & is_held_out).tolist()
        dropped += [Dropped(corpus.place(document), "also in eval.path") for document in copies]
    trained = pieces.where(~is_held_out[pieces.document])
    group = None
    if data.sources[0].weight is not None:
        group = corpus.source[trained.document]
    for number, source in enumerate(data.sources):
        if not len(trained) or (group is not None and number not in group):
            raise UserError(
                f"data.path: {source.path!r} leaves nothing to train on within batch.row_tokens={batch.row_tokens}: "
                f"{len(corpus) + len(corpus.bad):,} documents read, "
                f"{int((is_used & is_held_out).sum()) if evaluated is None else 0:,} held out, {told(dropped)}"
            )
    is_long = is_used & (corpus.lengths > batch.row_tokens)
    is_split = np.array([policy == "split" for policy in long])[corpus.origin]
    rest = (batch.row_tokens, pad_token, packing)
    return Prepared(
        training=Rows(corpus, trained, *rest, group=group),
        held_out=Rows(held_corpus, held_pieces, *rest),
        samples=_samples(held_corpus, held_pieces, evaluation.samples),
        dropped=dropped,
        dropped_of_evaluation=unused,
        num_read=len(corpus) + len(corpus.bad),
        num_truncated=int((is_long & ~is_split).sum()),
        num_split=int((is_long & is_split).sum()),
        num_duplicates=int(is_used.sum()) - len(np.unique(hashes[is_used])),
    )


def told(dropped: list[Dropped]) -> str:
    """How many were dropped and why, most frequent reason first; reasons that differ in numbers and names are one."""
    kinds = Counter(re.sub(r"\[\d+\]|\d+", "", entry.reason).split(", found")[0] for entry in dropped)
    listed = [f"{count:,} {' '.join(kind.split())[:90]}" for kind, count in kinds.most_common(5)]
    more = [f"{len(kinds) - 5} more reasons"] if len(kinds) > 5 else []
    return f"{len(dropped):,} dropped" + (f" ({'; '.join(listed + more)})" if dropped else "")


def _policies(corpus: Any, data: Data) -> list[str]:
    """For each origin: truncate, split or drop."""
    auto = [("split" if summary.form == "text" else "truncate") for summary in corpus.summaries]
    return auto if data.long == "auto" else [data.long] * len(auto)


def _left_out(corpus: Any, pieces: Pieces) -> list[Dropped]:
    """The records that could not be used, and the documents of which no piece has a target."""
    has_piece, has_target = (np.zeros(len(corpus), bool) for _ in range(2))
    has_piece[pieces.document] = True
    has_target[pieces.document[pieces.targets > 0]] = True
    dropped = [Dropped(corpus.origins[origin].place(number), reason) for origin, number, reason in corpus.bad]
    for document in np.flatnonzero(~has_target).tolist():
        if not has_piece[document]:
            reason = "longer than a row"
        else:
            reason = "no supervised token" + (" before the cut" if corpus.targets[document] else "")
        dropped.append(Dropped(corpus.place(document), reason))
    return dropped


def _hashes(corpus: Any, pieces: Pieces) -> np.ndarray:
    """Of the tokens of each document that are used: two that differ behind the cut alone are the same."""
    hashes = corpus.hashes.copy()
    used = pieces.ends(len(corpus))
    for document in np.flatnonzero((used > 0) & (used < corpus.lengths)).tolist():
        hashes[document] = xxhash.xxh3_64_intdigest(corpus.tokens(document)[: used[document]].tobytes())
    return hashes


def _samples(corpus: Any, pieces: Pieces, num_samples: int) -> list[Sample]:
    """Of the questions that the corpus keeps, those of held-out documents whose prompt fits into a row."""
    samples: list[Sample] = []
    first_lengths = dict(
        zip(pieces.document[pieces.start == 0].tolist(), pieces.length[pieces.start == 0], strict=True)
    )
    for kept in corpus.samples:
        if len(samples) < num_samples and kept.document in first_lengths:
            prompt = int(np.argmax(corpus.supervised(kept.document)[: first_lengths[kept.document]]))
            samples.append(Sample(kept.question, corpus.tokens(kept.document)[:prompt].tolist(), kept.answer))
    return [sample for sample in samples if sample.prompt]
