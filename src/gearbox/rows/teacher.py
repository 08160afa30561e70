"""Write a teacher's probabilities chunk by chunk, and add those of each batch to it when a student trains.

The probabilities depend on a chunk's tokens only, so a chunk is found by its content. Other rows, another order and
other held-out documents find the same ones. Each rank that computes some writes parts, which are three files each:
the chunks in order, the ids and the log-probabilities of all their targets. Last comes about.json, which lists them.

Shapes: B rows of a micro-batch, T tokens of a row, k known tokens, n targets.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from gearbox import filesystem
from gearbox.errors import UserError
from gearbox.rows.batches import Batch, PackedRows
from gearbox.rows.units import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ABOUT, FORMAT = "about.json", 1
AGAIN = "write it again with src/teach.py"
IDS, LOG_PROBS, CHUNKS = "ids", "log_probs", "chunks"  # files of a part
INPUTS = ("teacher_ids", "teacher_log_probs")  # of the model (model/loss.py)
MAX_SHOWN = 3  # chunks without probabilities, in a message


class File(NamedTuple):
    """The size and digest of a file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class TeacherFacts:
    """Describe a folder in about.json."""

    teacher: str
    """Identifies the teacher's weights."""
    vocabulary: str
    """Hash of the tokens and their ids."""
    top: int
    """Number of known tokens, k."""
    num_chunks: int
    num_targets: int
    files: dict[str, File]
    """The other files of the folder, by name."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the facts of a complete folder, and compare the sizes of its files. Raise UserError, which names it."""
        if not (folder / ABOUT).is_file():
            why = "is not complete: it has no about.json" if folder.is_dir() else "does not exist"
            raise UserError(f"train.teacher: {folder} {why}; {AGAIN}")
        try:
            content = filesystem.read_json_object(folder / ABOUT)
        except ValueError as error:
            raise UserError(f"train.teacher: {error}; {AGAIN}") from None
        if content.get("format") != FORMAT:
            found = content.get("format")
            raise UserError(f"train.teacher: {folder / ABOUT}: format is {found!r}, not {FORMAT}; {AGAIN}")
        facts = cls.of(content)
        if facts is None:
            raise UserError(f"train.teacher: {folder / ABOUT} is damaged; {AGAIN}")
        for name, file in facts.files.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes, not {file.bytes:,}"
                raise UserError(f"train.teacher: {path} {found}; {AGAIN}")
        return facts

    @classmethod
    def of(cls, content: dict[str, object]) -> Self | None:
        """Return the facts in the content of about.json, or None if it is not what `write` writes."""
        files, teacher, vocabulary = (content.get(name) for name in ("files", "teacher", "vocabulary"))
        numbers = [content.get(name) for name in ("top", "num_chunks", "num_targets")]
        counts = [number for number in numbers if isinstance(number, int) and number > 0]
        if not (isinstance(files, dict) and isinstance(teacher, str) and isinstance(vocabulary, str)):
            return None
        if len(counts) < len(numbers):
            return None
        listed: dict[str, File] = {}
        for name, facts in files.items():
            if name != Path(name).name or not isinstance(facts, dict) or facts.keys() != {*File._fields}:
                return None
            size, digest = facts["bytes"], facts["xxh3_128"]
            if not isinstance(size, int) or not isinstance(digest, str):
                return None
            listed[name] = File(size, digest)
        top, num_chunks, num_targets = counts
        return cls(teacher, vocabulary, top, num_chunks, num_targets, listed)

    def write(self, path: Path) -> None:
        """Write a file such as about.json, when all other files are on disk."""
        files = {name: file._asdict() for name, file in self.files.items()}
        filesystem.atomic_write(path, json.dumps(asdict(self) | {"files": files}, indent=1))

    def damaged(self, folder: Path, names: list[str]) -> str | None:
        """Return which of these files has another content than about.json lists, or None."""
        for name in names:
            try:
                if filesystem.digest_of(folder / name) != self.files[name].xxh3_128:
                    return f"train.teacher: {folder / name} is damaged; {AGAIN}"
            except OSError as error:
                return f"train.teacher: {folder / name} cannot be read: {error.strerror}"
        return None


def vocabulary_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of the tokens and their ids."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(tokenizer.get_vocab().items())).encode())


def key_of(rows: PackedRows, chunk: int) -> int:
    """Return a hash of a chunk's tokens and of which of them are targets."""
    tokens, loss_mask = rows.chunk(chunk)
    digest = xxhash.xxh3_64(np.ascontiguousarray(tokens, "<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask[1:] > 0).tobytes())
    return digest.intdigest()


def bytes_per_target(top: int) -> int:
    """Return the bytes of a target's ids (int32) and log-probabilities (fp32).

    In fp16 they would take two thirds of it, and a student equal to its teacher would no longer have the loss 0.
    """
    return 4 * top + 4 * (top + 1)


def number_of(name: str) -> int:
    """Return the number of the part that a file belongs to."""
    return int(Path(name).stem.rpartition("-")[2])


def table_of(folder: Path, names: Collection[str]) -> NDArray[np.uint64]:
    """Return the key and the number of targets of each chunk in the parts that these files belong to, [n, 2]."""
    tables = [np.load(folder / name, allow_pickle=False) for name in sorted(names) if name.startswith(f"{CHUNKS}-")]
    return np.concatenate([np.empty((0, 2), "<u8"), *tables])


class PartWriter:
    """The files of one part, written from beginning to end."""

    def __init__(self, folder: Path, number: int, num_targets: int, top: int) -> None:
        self._folder, self._number = folder, number
        self._chunks: list[tuple[int, int]] = []
        self._files = {
            IDS: _ArrayFile(self._path(IDS), (num_targets, top), np.dtype("<i4")),
            LOG_PROBS: _ArrayFile(self._path(LOG_PROBS), (num_targets, top + 1), np.dtype("<f4")),
        }

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}-{self._number:05}.npy"

    def add(self, rows: PackedRows, batch: Batch, ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        """Append the chunks of a batch. ids: [B, T, k]. log_probs: [B, T, k + 1]."""
        for chunk, row, at in chunks_in(batch):
            self._chunks.append((key_of(rows, chunk), len(at)))
            self._files[IDS].append(ids[row, at])
            self._files[LOG_PROBS].append(log_probs[row, at])

    def close(self) -> dict[str, File]:
        """Complete the files and return their sizes and digests, by name."""
        table = np.array(self._chunks, "<u8").reshape(-1, 2)
        chunks = _ArrayFile(self._path(CHUNKS), table.shape, table.dtype)
        chunks.append(table)
        written = [*self._files.values(), chunks]
        return {file.path.name: file.close() for file in written}


class _ArrayFile:
    """A .npy file of a known shape that is written in pieces, one after the other: mounted buckets allow no other."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        self.path, self._digest, self._dtype, self._opened = path, xxhash.xxh3_128(), dtype, ExitStack()
        self._file = self._opened.enter_context(filesystem.new_file(path))
        header: dict[str, object] = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(_Both(self._file, self._digest), header)

    def append(self, array: NDArray[np.generic]) -> None:
        content = np.ascontiguousarray(array, self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)

    def close(self) -> File:
        size = self._file.tell()
        self._opened.close()
        return File(size, self._digest.hexdigest())


@dataclass(frozen=True)
class _Both:
    """A file whose content also goes into a digest."""

    file: IO[bytes]
    digest: xxhash.xxh3_128

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self.file.write(content)


def chunks_in(batch: Batch) -> list[tuple[int, int, NDArray[np.int64]]]:
    """Return each chunk of a batch that has targets, with its row in the batch and the places of its targets."""
    found: list[tuple[int, int, NDArray[np.int64]]] = []
    is_target = batch["labels"].numpy() != IGNORE_INDEX
    for row, chunks in enumerate(batch["chunk_ids"].numpy()):
        at = np.flatnonzero(is_target[row])
        starts = np.flatnonzero(np.diff(chunks[at], prepend=-1))
        found += [(int(chunks[part[0]]), row, part) for part in np.split(at, starts[1:]) if len(part)]
    return found


class Teacher:
    """The probabilities in a folder, mapped into memory, for the chunks of some rows."""

    def __init__(self, folder: Path, facts: TeacherFacts, rows: PackedRows) -> None:
        """Find each chunk of the rows. Raise UserError if some are not in the folder."""
        self.folder, self.facts = folder, facts
        self._parts: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
        tables = []
        for name in sorted(facts.files):
            if name.startswith(f"{CHUNKS}-"):
                table, ids, log_probs = (self._array(name.replace(CHUNKS, kind)) for kind in (CHUNKS, IDS, LOG_PROBS))
                self._check_part(table, ids, log_probs)
                ends = np.cumsum(table[:, 1].astype(np.int64))
                part = np.full(len(table), len(self._parts))
                tables.append(np.stack([table[:, 0].view(np.int64), part, ends - table[:, 1].astype(np.int64)], 1))
                self._parts.append((ids, log_probs))
        known = np.concatenate(tables)
        keys, first_of_key = np.unique(known[:, 0], return_index=True)
        wanted = np.array([key_of(rows, chunk) for chunk in range(len(rows.chunks))], np.uint64).view(np.int64)
        places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        if len(missing := np.flatnonzero(keys[places] != wanted)):
            raise UserError(self._no_chunks(rows, missing.tolist()))
        self._places = known[first_of_key[places], 1:]
        """Part, and first target in it, of each chunk of the rows."""

    def _array(self, name: str) -> NDArray[np.generic]:
        try:
            array: NDArray[np.generic] = np.load(self.folder / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            raise UserError(f"train.teacher: {self.folder / name} is missing or damaged; {AGAIN}") from None
        return array

    def _check_part(self, *arrays: NDArray[np.generic]) -> None:
        table, ids, log_probs = arrays
        top, found = self.facts.top, [(array.ndim, array.shape[1:], array.dtype.str) for array in arrays]
        expected = [(2, (2,), "<u8"), (2, (top,), "<i4"), (2, (top + 1,), "<f4")]
        if found != expected or not len(ids) == len(log_probs) == int(table[:, 1].sum()):
            raise UserError(f"train.teacher: {self.folder} has arrays of another shape than about.json says; {AGAIN}")

    def _no_chunks(self, rows: PackedRows, missing: list[int]) -> str:
        places = ", ".join(dict.fromkeys(rows.location(chunk) for chunk in missing[:MAX_SHOWN]))
        cut = "other documents, other supervised tokens, or rows cut elsewhere (batch.row_tokens)"
        return (
            f"train.teacher: {self.folder} lacks {len(missing):,} of {len(rows.chunks):,} pieces of documents to "
            f"train, such as {places}: it was made of {cut}; {AGAIN} and this recipe"
        )

    @cached_property
    def identity(self) -> str:
        """A hash of all probabilities in the folder."""
        return xxhash.xxh3_128_hexdigest(json.dumps(sorted(self.facts.files.items())).encode())

    def mark(self, batch: Batch) -> Batch:
        """Return a batch with `teacher_ids`, [B, T, k], and the bits of `teacher_log_probs`, [B, T, k + 1].

        Both are int32, because FSDP rounds inputs in fp32 to bf16. They are 0 where there is no target.
        """
        shape, top = tuple(batch["labels"].shape), self.facts.top
        ids, log_probs = np.zeros((*shape, top), np.int32), np.zeros((*shape, top + 1), np.int32)
        for chunk, row, at in chunks_in(batch):
            part, first = self._places[chunk].tolist()
            of_part = slice(first, first + len(at))
            ids[row, at], log_probs[row, at] = (array[of_part].view(np.int32) for array in self._parts[part])
        return batch | dict(zip(INPUTS, map(torch.from_numpy, (ids, log_probs)), strict=True))
