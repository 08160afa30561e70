"""Read rows from the shards of an index, of which few are on this machine at the same time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gearbox.data.corpus import MappedDocuments
from gearbox.data.records import OriginSummary
from gearbox.data.shard_store import ShardStore
from gearbox.data.sources import Origin
from gearbox.data.tokenization import DOCUMENTS
from gearbox.errors import UserError, one_line_with_type
from gearbox.rows.batches import PackedRows
from gearbox.rows.packing import Chunks
from gearbox.rows.shard_index import Shard, ShardIndex

KEPT_CHUNKS = 32  # in memory, to show the first documents at the end of a run


class PreparedCorpus:
    """Keep what an index knows about the documents that it was made from."""

    def __init__(self, index: ShardIndex) -> None:
        self.origins = [Origin(o.name, (Path(f"_.{o.kind}"),), source=o.source) for o in index.origins]
        self.summaries = [OriginSummary(o.source, o.form, o.num_records, o.unused) for o in index.origins]
        self.digest, self.num_shards = index.digest, len(index.shards)
        self.answer_ends = {*index.answer_ends}


class Column:
    """A number of each row of all shards, read from the row's shard, with the sum from the index."""

    def __init__(self, rows: StreamedRows, name: str, total: int) -> None:
        self._rows, self._name, self._total = rows, name, total

    def __getitem__(self, row_ids: int | Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers of these rows, [n], or of one row."""
        found = [self._of_row(row_id) for row_id in ([row_ids] if isinstance(row_ids, int) else row_ids)]
        return np.array(found[0] if isinstance(row_ids, int) else found, np.int64)

    def _of_row(self, row_id: int) -> int:
        shard, row = self._rows.place(row_id)
        return int(getattr(self._rows.shard(shard), self._name)[row])

    def sum(self) -> int:
        """Return the sum over all rows."""
        return self._total


class StreamedRows(PackedRows):
    """The rows of all shards of an index. Rows and chunks are numbered shard by shard."""

    def __init__(self, index: ShardIndex, store: ShardStore, row_tokens: int, pad_token: int, packing: bool) -> None:
        """Open no shard yet."""
        self.index, self.store = index, store
        self.row_tokens, self.pad_token, self.packing = row_tokens, pad_token, packing
        self.shards = index.shards
        self.firsts: list[int] = np.cumsum([0, *(shard.rows for shard in self.shards)]).tolist()
        self.first_chunks_of: list[int] = np.cumsum([0, *(shard.chunks for shard in self.shards)]).tolist()
        sources = range(len(index.weights or [1]))
        self.group_sizes = [sum(s.rows for s in self.shards if s.source == source) for source in sources]
        self.num_tokens: Column = Column(self, "num_tokens", sum(shard.tokens for shard in self.shards))  # type: ignore[assignment]
        self.targets: Column = Column(self, "targets", sum(shard.targets for shard in self.shards))  # type: ignore[assignment]
        self._origins = PreparedCorpus(index).origins
        self._open: dict[int, PackedRows] = {}
        self._opening = threading.RLock()
        self._first_chunks: list[tuple[str, NDArray[np.int32], NDArray[np.int8]]] = []

    def __len__(self) -> int:
        return self.firsts[-1]

    @property
    def num_documents(self) -> int:
        """Number of documents with at least one chunk in a row."""
        return sum(shard.documents for shard in self.shards)

    @cached_property
    def key(self) -> str:
        """Hash of which tokens are in which row."""
        return self.index.digest

    def place(self, row_id: int) -> tuple[int, int]:
        """Return the shard of a row, and the row's number in it."""
        shard = bisect_right(self.firsts, row_id) - 1
        return shard, row_id - self.firsts[shard]

    def shard(self, number: int) -> PackedRows:
        """Return the rows of a shard, once it is on this machine."""
        with self._opening:
            if number not in self._open:
                shard = self.shards[number]
                self._open[number] = self._opened(shard, self.store.open(shard.name))
            return self._open[number]

    def _opened(self, shard: Shard, folder: Path) -> PackedRows:
        try:  # the files are those of the index, but anyone may have written both
            documents = MappedDocuments(folder / DOCUMENTS, self._origins)
            rows = PackedRows.open(folder, documents, self.row_tokens, self.pad_token, self.packing)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:  # pyarrow's errors are among these
            raise UserError(f"data.path: {folder}: {one_line_with_type(error)}; prepare the data again") from None
        if (len(rows), len(rows.chunks)) != (shard.rows, shard.chunks):
            raise UserError(f"data.path: {folder}: has {len(rows):,} rows instead of {shard.rows:,}; prepare it again")
        return rows

    def keep(self, numbers: set[int], ahead: Iterable[int]) -> None:
        """Close all other shards. Fetch these, and then those ahead."""
        with self._opening:
            for number in self._open.keys() - numbers:
                del self._open[number]
                self.store.close(self.shards[number].name)
        self.store.want([self.shards[number].name for number in [*sorted(numbers), *ahead]])

    def row(self, row_id: int) -> NDArray[np.int64]:
        """Return the chunks of a row, in order."""
        shard, row = self.place(row_id)
        return self.shard(shard).row(row) + self.first_chunks_of[shard]

    def _chunk_place(self, index: int) -> tuple[PackedRows, int]:
        shard = bisect_right(self.first_chunks_of, index) - 1
        return self.shard(shard), index - self.first_chunks_of[shard]

    def chunk(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Return the token ids and the loss mask of a chunk, both [n]."""
        rows, chunk = self._chunk_place(int(index))
        return rows.chunk(chunk)

    def location(self, chunk: int) -> str:
        """Return the location of a chunk's document as text."""
        rows, chunk = self._chunk_place(int(chunk))
        return rows.location(chunk)

    @property
    def _first_shard(self) -> int:
        """The first shard with rows."""
        return next(number for number, shard in enumerate(self.shards) if shard.rows)

    def fullest(self, num_rows: int) -> list[int]:
        """Return the rows of the first shard with the most chunks."""
        number = self._first_shard
        return [self.firsts[number] + row for row in self.shard(number).fullest(num_rows)]

    def first_chunks(self, num_chunks: int) -> list[tuple[str, NDArray[np.int32], NDArray[np.int8]]]:
        """Return location, token ids and loss mask of the first chunks of the first shard, in file order."""
        if num_chunks > len(self._first_chunks):
            found = self.shard(self._first_shard).first_chunks(max(num_chunks, KEPT_CHUNKS))
            self._first_chunks = [(location, tokens.copy(), mask.copy()) for location, tokens, mask in found]
        return self._first_chunks[:num_chunks]

    def held_out(self) -> PackedRows:
        """Return the held-out rows, which stay on this machine."""
        shard = self.index.held_out
        if shard is not None:
            return self._opened(shard, self.store.open(shard.name))
        nothing, none = self.shard(self._first_shard).documents, np.empty(0, np.int64)
        return PackedRows(nothing, Chunks(none, none, none, none), self.row_tokens, self.pad_token, self.packing)
