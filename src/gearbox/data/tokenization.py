"""Tokenize records on all cores, into an Arrow file of token ids and loss masks with a digest."""

from __future__ import annotations

import gc
import heapq
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from gearbox import filesystem, processes
from gearbox.config.recipe import MAX_QUESTIONS
from gearbox.console import Work
from gearbox.data import judged_answers, loss_mask, row_formats
from gearbox.data.judged_answers import GOOD, Answer
from gearbox.data.records import Item, OriginSummary, RecordReader, unused_fields
from gearbox.data.row_formats import FieldNames, InvalidRecord, JsonObject
from gearbox.data.sources import Origin, Record, Stamp, Unreadable, parse_json
from gearbox.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow

BATCH_BYTES = 2**18  # read per batch of documents; as Python numbers, its tokens need a hundred times as much
WRITTEN_DOCUMENTS, WRITTEN_BYTES = 8192, 2**26  # in one batch of the file
BATCH_DOCUMENTS = 64
DOCUMENTS, ABOUT, BAD = "documents.arrow", "about.json", "bad.json"


@dataclass(frozen=True)
class Question:
    """A question in a chat, and its answer: in a pair, the chosen one."""

    document: int
    question: str
    answer: str
    rejected: str | None = None
    """The rejected answer of a pair."""


class UnusableRecord(NamedTuple):
    """A record that cannot be used."""

    origin: int
    number: int
    reason: str


class _Batch(NamedTuple):
    origin: int
    names: FieldNames
    records: list[Record]


class _Document(NamedTuple):
    """A tokenized document, with the number of its record and the hash of its tokens."""

    number: int
    encoded: loss_mask.Encoded
    hash: int
    label: int


class _Candidate(NamedTuple):
    """A `Question`, with the hash of its document or pair."""

    hash: int
    document: int
    question: str
    answer: str
    rejected: str | None


class _Outcome(NamedTuple):
    """A tokenized batch."""

    origin: int
    table: pyarrow.RecordBatch
    """The documents."""
    bad: list[UnusableRecord]
    candidates: list[_Candidate]
    """Candidates with the lowest hashes. Documents are numbered within the table."""
    unused: set[str]
    """Fields of the records that are not read."""


def _features() -> datasets.Features:
    from datasets import Features, List, Value

    types = {"length": "int32", "targets": "int32", "hash": "uint64", "origin": "int32", "number": "int64"}
    types["label"] = "int8"
    tokens = {"input_ids": List(Value("int32")), "supervised": List(Value("int8"))}
    return Features(tokens | {name: Value(type_name) for name, type_name in types.items()})


class CorpusDigest:
    """The digest of all documents in order: an xxh3-128 of their token ids, loss masks and lengths.

    Each column has its own stream, so the digest does not depend on the batches. The labels count if one is not 1.
    """

    def __init__(self) -> None:
        self._streams = {name: xxhash.xxh3_128() for name in ("input_ids", "supervised", "length")}
        self._labels, self._has_labels = xxhash.xxh3_128(), False

    def update(self, table: pyarrow.RecordBatch) -> None:
        """Add the documents of a table."""
        for name, stream in self._streams.items():
            column = table.column(name)
            values = column if name == "length" else column.flatten()
            stream.update(values.to_numpy())
        labels = table.column("label").to_numpy()
        self._labels.update(labels)
        self._has_labels |= bool((labels != GOOD).any())

    def hexdigest(self) -> str:
        """Return the digest of the documents so far, as 32 hex digits."""
        streams = [*self._streams.values(), *([self._labels] if self._has_labels else [])]
        return str(xxhash.xxh3_128_hexdigest(b"".join(stream.digest() for stream in streams)))


class Collector:
    """A collector of the metadata in about.json, which takes the outcomes in order."""

    def __init__(self, origins: list[Origin], stop_on_bad: bool) -> None:
        self.origins, self.stop_on_bad = origins, stop_on_bad
        self.num_documents = 0
        self.bad: list[UnusableRecord] = []
        self.candidates: list[_Candidate] = []
        self.unused: list[set[str]] = [set() for _ in origins]
        self.digest = CorpusDigest()

    def add(self, outcome: _Outcome) -> None:
        """Add the outcome of the next batch. Raise UserError for a bad record if `stop_on_bad` is set."""
        if outcome.bad and self.stop_on_bad:
            first = outcome.bad[0]
            raise UserError(f"{self.origins[first.origin].location(first.number)}: {first.reason}")
        self.bad += outcome.bad
        self.unused[outcome.origin] |= outcome.unused
        moved = [c._replace(document=self.num_documents + c.document) for c in outcome.candidates]
        self.candidates = _lowest([*self.candidates, *moved])
        self.digest.update(outcome.table)
        self.num_documents += len(outcome.table)

    def about(self, summaries: list[OriginSummary]) -> JsonObject:
        """Return the content of about.json. Raise UserError if there are no documents."""
        if not self.num_documents:
            first = self.bad[0]
            names = ", ".join(origin.name for origin in self.origins)
            location = self.origins[first.origin].location(first.number)
            raise UserError(
                f"data.path: none of the {len(self.bad)} rows in {names} can be used; {location}: {first.reason}"
            )
        return {
            "summaries": [
                asdict(summary) | {"unused": sorted(fields)}
                for summary, fields in zip(summaries, self.unused, strict=True)
            ],
            "questions": [asdict(Question(*c[1:])) for c in self.candidates],
            "digest": self.digest.hexdigest(),
        }


def build_corpus(
    folder: Path,
    reader: RecordReader,
    stamps: list[Stamp],
    tokenizer: loss_mask.ChatTokenizer,
    work: Work,
) -> int:
    """Tokenize all records, write documents.arrow, bad.json and about.json to the folder, and return their number.

    Raise UserError if the data cannot be used. Also raise it if an origin no longer has its stamp, so was written to.
    """
    collected = Collector(reader.origins, stop_on_bad=reader.data.on_bad_row == "stop")
    write_documents(folder / DOCUMENTS, reader.items(), tokenizer, collected, work)
    about = collected.about(reader.summaries)
    check_stamps(reader.origins, stamps)
    about |= {"num_bad": len(collected.bad), "bytes": (folder / DOCUMENTS).stat().st_size}
    filesystem.write(folder / BAD, json.dumps([list(entry) for entry in collected.bad]))
    filesystem.write(folder / ABOUT, json.dumps(about))
    return collected.num_documents


def write_documents(
    path: Path,
    items: Iterable[Item],
    tokenizer: loss_mask.ChatTokenizer,
    collected: Collector,
    work: Work,
) -> None:
    """Tokenize records and write the documents to a file. Raise UserError if a record ends the run."""
    import pyarrow
    from datasets.arrow_writer import ArrowWriter

    kept: list[pyarrow.RecordBatch] = []
    with ArrowWriter(path=str(path), features=_features()) as writer:

        def write_kept() -> None:  # together: each rank later holds a few objects for each batch of the file
            if kept:
                writer.write_table(pyarrow.Table.from_batches(kept).combine_chunks())
                kept.clear()

        for outcome in _tokenize_in_order(_BatchTokenizer(tokenizer), _batches(items)):
            collected.add(outcome)
            if len(outcome.table):
                kept.append(outcome.table)
            if sum(map(len, kept)) >= WRITTEN_DOCUMENTS or sum(batch.nbytes for batch in kept) >= WRITTEN_BYTES:
                write_kept()
            work.at(collected.num_documents)
        write_kept()
        writer.finalize()


def check_stamps(origins: list[Origin], stamps: list[Stamp]) -> None:
    """Raise UserError if an origin no longer has its stamp, so was written to."""
    for origin, stamp in zip(origins, stamps, strict=True):
        if origin.stamp() != stamp:
            raise UserError(f"{origin.name}: changed while it was being read; run again when it is complete")


def is_whole(folder: Path) -> bool:
    """Return True if the folder has all documents that `build_corpus` wrote."""
    try:
        num_bytes = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["bytes"]
        return bool((folder / DOCUMENTS).stat().st_size == num_bytes and (folder / BAD).is_file())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _batches(items: Iterable[Item]) -> Iterator[_Batch]:
    """Group records in order. No batch spans two origins."""
    batched: list[Item] = []
    size = 0
    for item in items:
        is_full = size >= BATCH_BYTES or len(batched) >= BATCH_DOCUMENTS
        if batched and (is_full or batched[-1].origin != item.origin):
            yield _batch_of(batched)
            batched, size = [], 0
        batched.append(item)
        size += item.record.num_bytes
    if batched:
        yield _batch_of(batched)


def _batch_of(items: list[Item]) -> _Batch:
    """Return records of one origin as a batch. The names are known from its first object on."""
    return _Batch(items[-1].origin, items[-1].names, [item.record for item in items])


class _BatchTokenizer:
    """A callable that turns a batch of records into a table of documents."""

    def __init__(self, tokenizer: loss_mask.ChatTokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, batch: _Batch) -> _Outcome:
        records: list[tuple[int, list[Answer]]] = []
        bad: list[UnusableRecord] = []
        unused: set[str] = set()
        for record in batch.records:
            try:
                value = parse_json(record.value)
                if isinstance(value, Unreadable):
                    raise InvalidRecord(value.reason)
                records.append((record.number, judged_answers.read(value, batch.names)))
                unused |= unused_fields(value, batch.names)
            except InvalidRecord as error:
                bad.append(UnusableRecord(batch.origin, record.number, str(error)))
        outcomes = iter(self.tokenizer.encode([one.document for _, answers in records for one in answers]))
        documents: list[_Document] = []
        candidates: list[_Candidate] = []
        for number, answers in records:
            try:
                encoded = judged_answers.finish(answers, [*islice(outcomes, len(answers))], batch.names.form)
            except InvalidRecord as error:
                bad.append(UnusableRecord(batch.origin, number, str(error)))
                continue
            hashes = [xxhash.xxh3_64_intdigest(one.tokens.tobytes()) for one in encoded]
            if texts := _question(answers, self.tokenizer.supervise):
                digest = hashes[0] if len(hashes) == 1 else judged_answers.hash_of_pair(hashes[0], hashes[1])
                candidates.append(_Candidate(digest, len(documents), *texts))
            documents += [
                _Document(number, one, digest, answer.label)
                for one, digest, answer in zip(encoded, hashes, answers, strict=True)
            ]
        bad.sort(key=lambda entry: entry.number)
        return _Outcome(batch.origin, _make_table(batch.origin, documents), bad, _lowest(candidates), unused)


def _make_table(origin: int, documents: list[_Document]) -> pyarrow.RecordBatch:
    """Return the documents of one origin, with the columns of `_features`."""
    import pyarrow

    tokens = [document.encoded.tokens for document in documents]
    masks = [document.encoded.loss_mask for document in documents]
    lengths = np.array([len(ids) for ids in tokens], np.int32)
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pyarrow.record_batch(
        {
            "input_ids": pyarrow.ListArray.from_arrays(offsets, np.concatenate([*tokens, np.empty(0, np.int32)])),
            "supervised": pyarrow.ListArray.from_arrays(offsets, np.concatenate([*masks, np.empty(0, np.int8)])),
            "length": lengths,
            # The first token of a document has nothing before it and is never a target.
            "targets": np.array([mask[1:].sum() for mask in masks], np.int32),
            "hash": np.array([document.hash for document in documents], np.uint64),
            "origin": np.full(len(documents), origin, np.int32),
            "number": np.array([document.number for document in documents], np.int64),
            "label": np.array([document.label for document in documents], np.int8),
        }
    )


def _lowest(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """Return the candidates with the lowest hashes, at most one per hash."""
    by_hash = {candidate.hash: candidate for candidate in sorted(candidates, reverse=True)}
    return heapq.nsmallest(MAX_QUESTIONS, by_hash.values())


def _question(answers: list[Answer], supervise: str) -> tuple[str, str, str | None] | None:
    """Return a question, its good answer and the rejected one of a pair, or None if the first two are missing."""
    good = _asked(answers[0].document, supervise) if answers[0].label == GOOD else None
    if good is None or not all(good):
        return None
    rejected = _asked(answers[1].document, supervise) if len(answers) > 1 else None
    return *good, (rejected[1] or None) if rejected else None


def _asked(document: row_formats.Chat | str, supervise: str) -> tuple[str, str] | None:
    """Return a question of a chat and its trained answer as texts, or None without a question.

    The answer is the last one if only the last is trained, otherwise the first.
    """
    if isinstance(document, str):
        return None
    turns = document.turns
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i not in document.untrained]
    first = (answers or [0])[-1 if supervise == "last" else 0]
    questions = [turn["content"] for turn in turns[:first] if turn["role"] == "user"]
    return (questions[-1], turns[first]["content"]) if questions else None


_worker: _BatchTokenizer | None = None  # set in each worker process, which inherits it through the fork


def _start_worker(work: _BatchTokenizer) -> None:
    global _worker
    # Reset the signal handling inherited from the parent: if one worker dies, the pool sends SIGTERM to the others.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    processes.die_with_parent(signal.SIGKILL)  # if the parent is killed, nothing else ends this process
    gc.disable()  # a collection would touch, and so copy, all inherited memory; new objects have no cycles
    _worker = work


def _run_worker(batch: _Batch) -> _Outcome:
    assert _worker is not None
    return _worker(batch)


def _tokenize_in_order(work: _BatchTokenizer, batches: Iterator[_Batch]) -> Iterator[_Outcome]:
    """Yield work(batch) for each batch in order, computed by one process per core. Few batches are read ahead."""
    # Threads of the tokenizer would not survive the fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    first, second = next(batches, None), next(batches, None)
    if first is None or second is None or num_cores == 1:
        yield from map(work, filter(None, chain([first, second], batches)))
        return
    work(first._replace(records=first.records[:1]))  # compiles the template, which the workers inherit
    waiting: deque[Future[_Outcome]] = deque()
    # Fork, because the tokenizer is already in memory; a new process would need seconds to load it.
    with ProcessPoolExecutor(num_cores, get_context("fork"), _start_worker, (work,)) as pool:
        try:
            for batch in chain([first, second], batches):
                waiting.append(pool.submit(_run_worker, batch))
                if len(waiting) > 4 * num_cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("data.path: a tokenizing process was killed; it probably ran out of memory") from None
        finally:
            pool.shutdown(cancel_futures=True)
