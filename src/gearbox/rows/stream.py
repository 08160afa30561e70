"""Train from prepared shards: find the rows of a step by arithmetic on the index, and read them from few shards.

Each epoch permutes the shards. The rows of `data.shuffle_shards` consecutive shards, a window, are permuted together.
So the rows of step s are a pure function of (index, seed, s), and resuming replays nothing. Only the shards of the
windows of the current steps, and of the next one, are on this machine.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gearbox import filesystem
from gearbox.config.loader import is_url
from gearbox.config.recipe import Recipe
from gearbox.config.recipe_values import listed
from gearbox.data import corpus
from gearbox.data.corpus import Builder, MappedCorpus
from gearbox.data.shard_store import ShardStore, read_file
from gearbox.data.tokenization import Question
from gearbox.errors import UserError
from gearbox.rows import arranged, shard_index, splits
from gearbox.rows.batches import WINDOW_STEPS, Sampler, shuffled
from gearbox.rows.shard_index import INDEX, ShardIndex, is_index
from gearbox.rows.splits import DataFacts, TrainingRows
from gearbox.rows.streamed_rows import PreparedCorpus, StreamedRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GB = 10**9
MOST_EPOCHS = 100  # whose shards are added up before the run
BEFORE_HANG = 0.9  # of run.hang_timeout: the error names the shard


class Window(NamedTuple):
    """Consecutive shards of an epoch's order."""

    group: int
    epoch: int
    number: int


class StreamSampler(Sampler):
    """A sampler that reads the shards of a window at a time, and has those of the next one fetched."""

    def __init__(self, rows: StreamedRows, recipe: Recipe, num_rows: int) -> None:
        """Take the rows that a run trains."""
        super().__init__(rows.group_sizes, recipe.batch.rows, recipe.train.seed, rows.index.weights)
        self.rows, self.shuffle_shards, self.num_rows = rows, recipe.data.shuffle_shards, num_rows
        self._shards = [
            np.array([i for i, s in enumerate(rows.shards) if s.source == group and s.rows], np.int64)
            for group in range(len(rows.group_sizes))
        ]
        self._sizes = np.array([shard.rows for shard in rows.shards], np.int64)
        self._ordered = lru_cache(maxsize=4 * len(self._shards))(self._order)
        self._in_window = lru_cache(maxsize=4 * len(self._shards))(self._permute_window)

    def _order(self, group: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shards of an epoch in order, and the first row of each in the epoch, [n] and [n + 1]."""
        shards = self._shards[group]
        order = shards[shuffled(np.arange(len(shards)), len(shards), (self.seed, epoch, group))]
        return order, np.concatenate([[0], np.cumsum(self._sizes[order])])

    def _window(self, position: int) -> tuple[Window, int]:
        """Return the window of a position of the run, and the offset in its epoch."""
        group, epoch, offset = self.place(position)
        number = int(np.searchsorted(self._ordered(group, epoch)[1], offset, "right")) - 1
        return Window(group, epoch, number // self.shuffle_shards), offset

    def _shards_of(self, window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shards of a window, and the first row of each in the epoch with the end of the last."""
        order, starts = self._ordered(window.group, window.epoch)
        first = window.number * self.shuffle_shards
        return order[first : first + self.shuffle_shards], starts[first : first + self.shuffle_shards + 1]

    def row(self, position: int) -> int:
        """Return the row at a position, counted from the first row of the first step."""
        window, offset = self._window(position)
        shards, starts = self._shards_of(window)
        at = int(self._in_window(window)[offset - int(starts[0])])
        shard = int(np.searchsorted(starts, starts[0] + at, "right")) - 1
        return self.rows.firsts[int(shards[shard])] + at - int(starts[shard] - starts[0])

    def _permute_window(self, window: Window) -> NDArray[np.int64]:
        """Return the rows of a window in order, counted from its first. Those of a step may have similar lengths."""
        shards, starts = self._shards_of(window)
        size = int(starts[-1] - starts[0])
        order = shuffled(np.arange(size), size, (self.seed, *window))
        if self.rows.packing:
            return order
        lengths = np.concatenate([self.rows.shard(int(shard)).num_tokens for shard in shards])
        many = WINDOW_STEPS * self.rows_per_step
        parts = [order[first : first + many] for first in range(0, size, many)]
        keys = [(self.seed, *window, number) for number in range(len(parts))]
        return np.concatenate([self.sort_by_length(p, lengths[p], k) for p, k in zip(parts, keys, strict=True)])

    def rows_of_step(self, step: int) -> list[int]:
        """Return the rows of a step, in order. Their shards are kept with those of the step before.

        When the first rank takes this step's rows, other ranks may still read those of the step before.
        """
        now = self._windows(max(0, step - 1), step)
        ahead = [following for window in now if (following := self._next(window)) is not None]
        kept = [int(shard) for window in now for shard in self._shards_of(window)[0]]
        self.rows.keep({*kept}, [int(s) for w in ahead for s in self._shards_of(w)[0] if s not in kept])
        return super().rows_of_step(step)

    def _windows(self, first_step: int, last_step: int) -> dict[Window, None]:
        """Return the windows that these steps read, in order."""
        positions = range(first_step * self.rows_per_step, min(self.num_rows, (last_step + 1) * self.rows_per_step))
        return dict.fromkeys(self._window(position)[0] for position in positions)

    def _next(self, window: Window) -> Window | None:
        """Return the window after this one in its group, or None if the run ends before."""
        group, epoch, number = window
        is_last = (number + 1) * self.shuffle_shards >= len(self._shards[group])
        following = Window(group, epoch + 1, 0) if is_last else Window(group, epoch, number + 1)
        start = following.epoch * self.group_sizes[group] + int(self._shards_of(following)[1][0])
        return following if start < self.num_rows else None

    def most_bytes(self) -> int:
        """Return the most bytes of shards that two consecutive steps of the run can read."""
        return sum(self._most_bytes_of(group) for group in range(len(self._shards)) if self.group_sizes[group])

    def _most_bytes_of(self, group: int) -> int:
        windows: list[tuple[int, int, int]] = []  # first row and end in the run, and bytes
        window: Window | None = Window(group, 0, 0)
        while window is not None and window.epoch < MOST_EPOCHS:
            shards, starts = self._shards_of(window)
            before = window.epoch * self.group_sizes[group]
            num_bytes = sum(self.rows.shards[int(shard)].num_bytes for shard in shards)
            windows.append((before + int(starts[0]), before + int(starts[-1]), num_bytes))
            window = self._next(window)
        most = used = oldest = 0
        for first, _, num_bytes in windows:
            used += num_bytes
            while first - windows[oldest][1] + 2 > 2 * self.rows_per_step:
                used -= windows[oldest][2]
                oldest += 1
            most = max(most, used)
        return most


def load_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, builder: Builder
) -> tuple[MappedCorpus | PreparedCorpus, MappedCorpus | None, TrainingRows]:
    """Return the documents and rows of data.path: prepared shards, or files that are tokenized and packed."""
    path = recipe.data.path
    if isinstance(path, str) and is_prepared(path):
        if recipe.train.objective != "sft":
            raise UserError(
                f"data.path: {path} has prepared shards, but train.objective={recipe.train.objective} reads files; "
                "give the files that the shards were made from"
            )
        return _open_stream(recipe, tokenizer, builder)
    for source in [*listed(path), *listed(recipe.eval.path or [])]:
        if is_prepared(source.path):
            raise UserError(f"data.path: {source.path} has prepared shards; give it as data.path, with nothing else")
    documents, evaluated = corpus.load_corpora(recipe, tokenizer, builder)
    rows = arranged.split_and_pack(recipe, documents, evaluated, tokenizer, recipe.data.packing, builder)
    return documents, evaluated, rows


def answer_ends(documents: MappedCorpus | PreparedCorpus, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the special and added tokens that end trained spans: generation stops at them."""
    if isinstance(documents, PreparedCorpus):
        return documents.answer_ends
    return splits.answer_ends(documents, tokenizer)


def is_prepared(path: str) -> bool:
    """Return whether a data.path is a URL, or a folder with the index of shards."""
    return is_url(path) or is_index(Path(path).expanduser() / INDEX)


def _open_stream(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, builder: Builder
) -> tuple[PreparedCorpus, None, TrainingRows]:
    """Return the rows of prepared shards. Raise UserError if the recipe differs from theirs."""
    assert isinstance(recipe.data.path, str)
    location = recipe.data.path if is_url(recipe.data.path) else str(Path(recipe.data.path).expanduser())
    name = f"{location.rstrip('/')}/{INDEX}"
    seconds = recipe.run.hang_timeout * BEFORE_HANG
    index = ShardIndex.parse(read_file(name, filesystem.MAX_JSON_BYTES, seconds, builder.tell), name)
    shard_index.refuse_difference(location, index.settings, shard_index.settings_of(recipe, tokenizer))
    if index.weights and recipe.train.epochs is not None:
        raise UserError("train.epochs: weighted sources end at different times; give train.steps instead")
    cache = corpus.cache() / "gearbox" / "shards" / index.digest
    limit = None if recipe.data.cache_gb is None else int(recipe.data.cache_gb * GB)
    folders = [*index.shards, *([index.held_out] if index.held_out else [])]
    files = {folder.name: folder.files for folder in folders}
    store = ShardStore(location, cache, files, limit, builder.is_first, seconds, builder.tell)
    pad_token, packing = splits.pad_token_of(tokenizer), recipe.data.packing
    rows = StreamedRows(index, store, recipe.batch.row_tokens, pad_token, packing)
    num_rows = splits.num_rows_of(recipe, len(rows))
    sampler = StreamSampler(rows, recipe, num_rows)
    if store.is_remote and limit is not None:
        held_out_bytes = index.held_out.num_bytes if index.held_out else 0
        needed = sampler.most_bytes() + held_out_bytes
        if needed > limit:
            raise UserError(
                f"data.cache_gb: {recipe.data.cache_gb:g} cannot hold the {needed / GB:.3g} GB of shards that are "
                f"needed at the same time; raise it, or lower data.shuffle_shards ({recipe.data.shuffle_shards})"
            )
    held_out = rows.held_out()
    questions = [Question(one.document, one.question, one.answer) for one in index.questions]
    return (
        PreparedCorpus(index),
        None,
        TrainingRows(
            training=rows,
            held_out=held_out,
            num_rows=num_rows,
            sampler=sampler,
            samples=splits.find_samples(held_out, questions, recipe.eval.num_questions),
            facts=_facts(index),
        ),
    )


def _facts(index: ShardIndex) -> DataFacts:
    """Return what an index knows about its documents. The padding of rows of one document is not among it."""
    uses, lengths = index.uses, index.lengths
    return DataFacts(
        num_read=uses.read,
        num_truncated=uses.truncated,
        num_split=uses.split,
        num_duplicates=uses.duplicates,
        dropped=index.dropped,
        dropped_of_evaluation=index.dropped_of_evaluation,
        document_lengths=(lengths.median, lengths.p90, lengths.p99, lengths.max),
        padding=None,
        weights=tuple(zip(index.paths, index.weights or [], strict=False)),
        has_own_evaluation=index.settings.get("eval.path") is not None,
    )
