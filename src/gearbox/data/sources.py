"""Find the files and datasets of data.path, hash their content, and read their records with locations.

Records are read one at a time, so no file needs to fit into memory. A record that cannot be read becomes `Unreadable`
with a reason, if reading can continue after it. Otherwise reading raises a UserError.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

import xxhash

from gearbox.config.loader import matches
from gearbox.config.recipe import BUILTIN, LOCAL_ENDINGS, MAX_RECORD_BYTES
from gearbox.config.recipe_values import Source
from gearbox.errors import UserError, one_line_with_type

if TYPE_CHECKING:
    import datasets
    import pyarrow

READ_BYTES = 2**20
ARROW_ROWS = 64  # rows that are Python objects at the same time
PACKED_ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".arrow")
FORMATS = "one of " + " ".join(LOCAL_ENDINGS)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"
Stamp = list[tuple[int, int, int]]  # size, time and inode of each file


class Unreadable(NamedTuple):
    """A placeholder for a value that cannot be read."""

    reason: str


class Record(NamedTuple):
    """A record, as read from one location."""

    number: int
    """Line number, or row number if the format has no lines; from 1."""
    value: JSON | bytes | Unreadable
    """Bytes are JSON that is not parsed yet."""
    num_bytes: int
    """Approximate number of bytes read for the record."""


@dataclass(frozen=True)
class Origin:
    """A file, a dataset, or the built-in data."""

    name: str
    """Name shown in messages."""
    files: tuple[Path, ...]
    """Files whose bytes are the content."""
    split: str = ""
    """Split and number of rows of a dataset, or which built-in data."""
    dataset: datasets.Dataset | None = None
    """Dataset, memory-mapped from its files."""
    source: int = 0
    """Index of the data.path entry it belongs to."""
    fields: dict[str, str | None] = field(default_factory=dict)
    """data.fields of that entry."""

    @property
    def kind(self) -> str:
        """`dataset`, or the file ending: jsonl, json, csv, txt, parquet, py."""
        return "dataset" if self.dataset is not None else self.files[0].suffix.lstrip(".").lower()

    def location(self, number: int) -> str:
        """Return file:line of a record, or `file, row n` if the format has no lines."""
        return f"{self.name}:{number}" if self.kind in ("jsonl", "json", "csv", "txt") else f"{self.name}, row {number}"

    def stamp(self) -> Stamp:
        """Return the size, time and inode of each file, which change when it is written to or replaced."""
        return [(s.st_size, s.st_mtime_ns, s.st_ino) for s in (file.stat() for file in self.files)]

    def content(self) -> str:
        """Return a hash of the bytes and, for a dataset, of its split and number of rows."""
        digest = xxhash.xxh3_128(f"{self.kind} {self.split}".encode())
        for file in self.files:
            with file.open("rb") as stream:
                while block := stream.read(READ_BYTES):
                    digest.update(block)
        return digest.hexdigest()

    def records(self, text_unit: str) -> Iterator[Record]:
        """Yield the records in order. Raise UserError if reading cannot continue."""
        try:
            if self.dataset is not None:
                yield from _from_arrow(table for table in self.dataset.with_format("arrow").iter(ARROW_ROWS))
            elif self.kind == "py":
                from gearbox.data import builtin_tasks

                for number, document in enumerate(builtin_tasks.BUILTIN[self.name](), 1):
                    yield Record(number, document, 100)
            elif self.kind == "parquet":
                yield from _parquet(self.files[0])
            else:
                with self.files[0].open("rb") as stream:
                    yield from self._from_text(stream, text_unit)
        except OSError as error:
            raise UserError(f"{self.name}: cannot be read: {error.strerror or error}") from None

    def _from_text(self, stream: IO[bytes], text_unit: str) -> Iterator[Record]:
        if self.kind == "csv":
            return _csv(self)
        if self.kind == "txt":
            return _text(stream, text_unit)
        if self.kind == "json" and stream.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":
            return _json_array(self)
        stream.seek(0)
        lines = (line for line in _lines(stream) if not _is_blank(line))
        return _refuse_object_over_lines(lines) if self.kind == "json" else lines


def find(sources: list[Source]) -> list[Origin]:
    """Return every file and dataset of data.path, in order. Raise UserError for an entry without data."""
    origins: list[Origin] = []
    known: set[tuple[object, ...]] = set()
    for number, source in enumerate(sources):
        if source.path in BUILTIN:
            of_source = [Origin(source.path, (Path(__file__).with_name("builtin_tasks.py"),), source.path)]
        elif paths := matches(source.path):
            of_source = [origin for path in paths for origin in _origins_at(path, source)]
        else:
            of_source = [_hub_origin(source)]
        if not of_source:
            raise UserError(f"data.path: {source.path!r} contains no data; a file must end in {FORMATS}")
        for origin in of_source:
            identity = (number, *(file.resolve() for file in origin.files))
            if identity not in known:  # a glob may match a file and its folder
                known.add(identity)
                origins.append(replace(origin, source=number, fields=source.fields or {}))
    return origins


def _origins_at(path: Path, source: Source) -> list[Origin]:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return [_saved_origin(path, source)]
    if path.is_dir():
        return [Origin(str(file), (file,)) for file in _data_files(path)]
    if path.suffix.lower() not in LOCAL_ENDINGS:
        raise UserError(f"data.path: {path}: the file must end in {FORMATS}")
    return [Origin(str(path), (path,))]


def _data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder and its subfolders. Hidden files and other endings are ignored."""
    files = []
    visible = (f for f in folder.rglob("*") if not any(name.startswith(".") for name in f.relative_to(folder).parts))
    for file in sorted(visible):
        if file.is_dir() and file.is_symlink():
            raise UserError(f"data.path: {file} is a symlink to a folder and is not followed; list the folder itself")
        if (file / "state.json").is_file():
            raise UserError(f"data.path: {file} is a saved dataset inside a folder of files; list it separately")
        if file.suffix.lower() in PACKED_ENDINGS:
            raise UserError(f"data.path: {file} cannot be read directly; unpack it, or select other files with a glob")
        if file.suffix.lower() in LOCAL_ENDINGS and not file.is_dir():
            if file.exists() and not file.is_file():
                raise UserError(f"data.path: {file} is not a regular file; remove it, or select files with a glob")
            files.append(file)
    return files


def _saved_origin(path: Path, source: Source) -> Origin:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:  # damaged files raise many types of exception
        raise UserError(f"data.path: the dataset {path} cannot be read: {one_line_with_type(error)}") from None
    split = ""
    if isinstance(loaded, datasets.DatasetDict):
        split = source.split or ""
        if split not in loaded:
            raise UserError(f"data.split: {path} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return _dataset_origin(str(path), split, loaded)


def _hub_origin(source: Source) -> Origin:
    import datasets

    datasets.disable_progress_bars()  # every rank would print one
    try:
        loaded = datasets.load_dataset(source.path, split=source.split, keep_in_memory=False)
    except Exception as error:  # network errors have many types
        raise UserError(
            f"data.path: {source.path!r} (split {source.split!r}) is not a local file or folder and could not be "
            f"loaded from the Hub: {one_line_with_type(error)}"
        ) from None
    return _dataset_origin(source.path, source.split or "", loaded)


def _dataset_origin(name: str, split: str, dataset: datasets.Dataset) -> Origin:
    files = tuple(Path(file["filename"]) for file in dataset.cache_files)
    return Origin(name, files, f"{split} {len(dataset)}", dataset)


def _too_large(num_bytes: int) -> Unreadable:
    limit = f"the limit of {MAX_RECORD_BYTES // 2**20} MiB"
    return Unreadable(f"the document has {num_bytes / 2**20:,.1f} MiB, more than {limit}; split it")


def _decode_utf8(raw: bytes) -> str | Unreadable:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Unreadable(f"is not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}")


def _lines(stream: IO[bytes]) -> Iterator[Record]:
    """Yield each line as bytes, or as Unreadable if it is too long."""
    number = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        size = len(line)
        if size <= MAX_RECORD_BYTES:
            yield Record(number, line, size)
            continue
        while not line.endswith(b"\n") and (line := stream.readline(READ_BYTES)):
            size += len(line)
        yield Record(number, _too_large(size), 0)


def _is_blank(line: Record) -> bool:
    return isinstance(line.value, bytes) and not line.value.strip()


def _refuse_object_over_lines(lines: Iterator[Record]) -> Iterator[Record]:
    """Yield the lines of a .json file that is not a list. A first line of `{` becomes Unreadable."""
    for i, line in enumerate(lines):
        if i == 0 and isinstance(line.value, bytes) and line.value.strip() == b"{":
            reason = "is an object that spans several lines; write a list of documents, or one document per line"
            line = line._replace(value=Unreadable(reason))
        yield line


def _text(stream: IO[bytes], unit: str) -> Iterator[Record]:
    """Yield a text file by paragraph, by line, or as one document. Blank lines before a document are skipped."""
    lines: list[bytes] = []  # of the current document, so far
    first = size = 0

    def document() -> Record:
        text = _too_large(size) if size > MAX_RECORD_BYTES else _decode_utf8(b"".join(lines))
        if isinstance(text, Unreadable):
            return Record(first, text, size)
        return Record(first, {"text": text.replace("\r\n", "\n").strip("\n")}, size)

    for line in _lines(stream):
        if not isinstance(line.value, bytes):
            yield line
        elif lines or not _is_blank(line):
            ends_paragraph = unit == "paragraph" and _is_blank(line)
            if not ends_paragraph:
                first = first if lines else line.number
                size += line.num_bytes
                if size <= MAX_RECORD_BYTES:
                    lines.append(line.value)
            if ends_paragraph or unit == "line":
                yield document()
                lines, size = [], 0
    if lines:
        yield document()


def _csv(origin: Origin) -> Iterator[Record]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    # Bytes that are not UTF-8 become lone surrogates, which the check of each text finds.
    with origin.files[0].open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next((cells for cells in reader if any(map(str.strip, cells))), [])
            if len({*header}) < len(header):
                raise UserError(f"{origin.name}:1: the header repeats a column: {', '.join(header)}")
            first = reader.line_num + 1
            for cells in reader:
                size = sum(map(len, cells))
                if len(cells) == len(header):
                    yield Record(first, dict(zip(header, cells, strict=True)), size)
                elif any(cells):
                    yield Record(first, Unreadable(f"has {len(cells)} cells, but the header has {len(header)}"), size)
                first = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{origin.name}:{reader.line_num}: is not CSV: {error}") from None


_JSON_SPACES = re.compile(r"[ \t\r\n]*")


def _json_array(origin: Origin) -> Iterator[Record]:
    """Yield the elements of a list, parsed one at a time from a window that moves along the file."""
    decode = json.JSONDecoder().raw_decode
    with origin.files[0].open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        window, at, line = stream.read(READ_BYTES), 0, 1

        def go_to(position: int) -> None:
            nonlocal at, line
            line += window.count("\n", at, position)
            at = position

        def read_on() -> bool:
            nonlocal window, at
            if more := stream.read(READ_BYTES):
                window, at = window[at:] + more, 0
            return bool(more)

        def skip_spaces() -> str:
            """Move to the next character that is not a space and return it, or return "" at the end."""
            while True:
                go_to(_JSON_SPACES.match(window, at).end())  # type: ignore[union-attr]
                if at < len(window) or not read_on():
                    return window[at : at + 1]

        def not_json(reason: str, at_line: int) -> UserError:
            return UserError(f"{origin.name}:{at_line}: is not JSON: {reason}")

        skip_spaces()
        go_to(at + 1)  # the bracket
        if skip_spaces() == "]":
            return
        while True:
            skip_spaces()
            try:
                element, end = decode(window, at)
            except json.JSONDecodeError as error:
                # The window may end inside the element: in a string, or in a last word or number.
                may_continue = error.msg.startswith("Unterminated string") or len(window) - error.pos <= 16
                if may_continue and len(window) - at > MAX_RECORD_BYTES:
                    raise UserError(origin.location(line) + ": " + _too_large(len(window) - at).reason) from None
                if may_continue and read_on():
                    continue
                raise not_json(error.msg, line + window.count("\n", at, error.pos)) from None
            except (RecursionError, ValueError) as error:
                raise not_json(_json_limit(error), line) from None
            if end > len(window) - 3 and read_on():
                continue  # a number may continue in the next window, even after "e-"
            yield Record(line, element if end - at <= MAX_RECORD_BYTES else _too_large(end - at), end - at)
            go_to(end)
            separator = skip_spaces()
            if separator not in (",", "]"):
                raise not_json("expecting ',' or ']'" + ("" if separator else ", found the end of the file"), line)
            go_to(at + 1)
            if separator == "]":
                if skip_spaces():
                    raise not_json("there is more data after the list", line)
                return


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet

    try:
        yield from _from_arrow(pyarrow.parquet.ParquetFile(path).iter_batches(ARROW_ROWS))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as Parquet: {one_line_with_type(error)}") from None


def _from_arrow(tables: Iterable[pyarrow.Table | pyarrow.RecordBatch]) -> Iterator[Record]:
    """Yield the rows without null fields, because Arrow gives each row the fields of all rows."""
    rows = ((row, table.nbytes // len(table)) for table in tables for row in table.to_pylist())
    for number, (row, num_bytes) in enumerate(rows, 1):
        yield Record(number, _without_nulls(row), num_bytes)


def _without_nulls(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def parse_json(value: JSON | bytes | Unreadable) -> JSON | Unreadable:
    """Return a record's value, parsed if it is still bytes, or Unreadable if it is not JSON."""
    if not isinstance(value, bytes):
        return value
    text = _decode_utf8(value)
    if isinstance(text, Unreadable):
        return text
    try:
        parsed: JSON = json.loads(text.rstrip())
        return parsed
    except json.JSONDecodeError as error:
        return Unreadable(f"is not JSON: {error.msg} at column {error.colno}")
    except (RecursionError, ValueError) as error:
        return Unreadable(f"is not JSON: {_json_limit(error)}")


def _json_limit(error: RecursionError | ValueError) -> str:
    """Return the Python limit that the JSON exceeds: its depth, or the digits of a number."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
