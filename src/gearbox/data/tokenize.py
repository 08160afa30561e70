"""Records to an Arrow file of token ids and loss masks, on all cores."""

from __future__ import annotations

import gc
import heapq
import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gearbox import processes
from gearbox.config.recipe import Data
from gearbox.data import loss_mask, row_formats
from gearbox.data.row_formats import BadRow, FieldNames
from gearbox.data.sources import Bad, Origin, Record, parse_json
from gearbox.errors import UserError

BATCH_BYTES = 2**18  # read for one batch of documents; its tokens as Python numbers take a hundred times as much
BATCH_DOCUMENTS = 64
NO_NAMES = FieldNames("text", {}, {})  # for records before the first mapping, which do not come as far as to need names
NUM_SAMPLES = 64  # kept for people to read: those that any split holds out first


@dataclass(frozen=True)
class OriginSummary:
    """What was found in a file or dataset."""

    source: int
    """Which entry of data.path it belongs to."""
    form: str
    num_records: int
    unused: list[str]
    """Fields that are not read."""


@dataclass(frozen=True)
class Question:
    document: int
    question: str
    answer: str


class _Batch(NamedTuple):
    origin: int
    names: FieldNames
    records: list[Record]


class _Outcome(NamedTuple):
    table: Any
    """A pyarrow.RecordBatch of the documents."""
    bad: list[tuple[int, int, str]]
    """Origin, number and reason of the others."""
    samples: list[tuple[int, int, str, str]]
    """Hash, position in the table, question and answer of those with the lowest hashes."""
    unused: tuple[int, set[str]]
    """Origin, and fields of its records that are not read."""


def _features() -> Any:
    from datasets import Features, List, Value

    return Features(
        input_ids=List(Value("int32")), supervised=List(Value("int8")), length=Value("int32"), targets=Value("int32"),
        hash=Value("uint64"), origin=Value("int32"), number=Value("int64"),
    )  # fmt: skip


def build_corpus(
    folder: Path,
    found: list[Origin],
    stamps: list[Any],
    data: Data,
    encoder: loss_mask.ChatTokenizer,
    tell: Callable[[str], None],
) -> None:
    import pyarrow
    from datasets.arrow_writer import ArrowWriter

    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a builder that was killed; another one cannot be at it
    aside.mkdir()
    reader = _RecordReader(found, data)
    bad: list[tuple[int, int, str]] = []
    samples: list[tuple[int, int, str, str]] = []
    unused: list[set[str]] = [set() for _ in found]
    num_documents = 0
    started = said = time.perf_counter()
    try:
        with ArrowWriter(path=str(aside / "documents.arrow"), features=_features()) as writer:
            work = _Worker(encoder)
            for outcome in _tokenize_in_order(work, reader.batches()):
                unused[outcome.unused[0]] |= outcome.unused[1]
                for origin, number, reason in outcome.bad:
                    if data.on_bad_row == "stop":
                        raise UserError(f"{found[origin].location(number)}: {reason}")
                    bad.append((origin, number, reason))
                here = [(low, num_documents + at, *texts) for low, at, *texts in outcome.samples]
                samples = _lowest([*samples, *here])
                if len(outcome.table):
                    writer.write_table(pyarrow.Table.from_batches([outcome.table]))
                num_documents += len(outcome.table)
                if (now := time.perf_counter()) - said > 10:
                    said = now
                    tell(f"tokenizing: {num_documents:,} documents, {num_documents / (now - started):,.0f} a second")
            if not num_documents:
                raise UserError(_explain_nothing_left(found, bad))
            writer.finalize()
        for read, stamp in zip(found, stamps, strict=True):
            if read.stamp() != stamp:
                raise UserError(f"{read.name}: has changed while it was read; run again when it is complete")
        about = {
            "summaries": [
                asdict(summary) | {"unused": sorted(fields)}
                for summary, fields in zip(reader.summaries, unused, strict=True)
            ],
            "bad": bad,
            "samples": [asdict(Question(document, *texts)) for _, document, *texts in samples],
        }
        (aside / "about.json").write_text(json.dumps(about), encoding="utf-8")
        aside.rename(folder)
        seconds = time.perf_counter() - started
        tell(f"tokenized {num_documents:,} documents in {seconds:.1f} s; kept in {folder}")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _explain_nothing_left(found: list[Origin], bad: list[tuple[int, int, str]]) -> str:
    origin, number, reason = bad[0]
    names = ", ".join(origin.name for origin in found)
    return f"data.path: none of the {len(bad)} rows of {names} can be used; {found[origin].location(number)}: {reason}"


class _RecordReader:
    """Goes through the origins and tells each one's form by its first record."""

    def __init__(self, found: list[Origin], data: Data) -> None:
        self.found, self.data = found, data
        self.summaries: list[OriginSummary] = []

    def batches(self) -> Iterator[_Batch]:
        for index, origin in enumerate(self.found):
            names, num_records, records, size = None, 0, [], 0
            for record in origin.records(self.data.text_unit):
                num_records += 1
                if names is None and isinstance(value := parse_json(record.value), dict):
                    names = self._names(origin, record.number, value)
                records.append(record)
                size += record.num_bytes
                if size >= BATCH_BYTES or len(records) >= BATCH_DOCUMENTS:
                    yield _Batch(index, names or NO_NAMES, records)
                    records, size = [], 0
            if not num_records:
                records = [Record(1, Bad("the file is empty"), 0)]
            if records:
                yield _Batch(index, names or NO_NAMES, records)
            form = names.form if names else "no form"
            self.summaries.append(OriginSummary(origin.source, form, max(1, num_records), []))

    def _names(self, origin: Origin, number: int, record: dict[str, Any]) -> FieldNames:
        form = row_formats.recognise(record, self.data.form, origin.fields)
        if form is None:
            at = f"{origin.name}:1: the header" if origin.kind == "csv" else origin.location(number)
            raise row_formats.unrecognised(record, at)
        return FieldNames(form, origin.fields, self.data.roles)


class _Worker:
    """A batch of records to a table of documents."""

    def __init__(self, encoder: loss_mask.ChatTokenizer) -> None:
        self.encoder = encoder

    def __call__(self, batch: _Batch) -> _Outcome:
        import pyarrow
        import xxhash

        documents, numbers, bad = [], [], []
        unused: set[str] = set()
        for record in batch.records:
            try:
                value = parse_json(record.value)
                if isinstance(value, Bad):
                    raise BadRow(value.reason)
                documents.append(row_formats.read(value, batch.names))
                numbers.append(record.number)
                unused |= row_formats.unused_fields(value, batch.names)
            except BadRow as error:
                bad.append((batch.origin, record.number, str(error)))
        encoded = []
        for document, number, outcome in zip(documents, numbers, self.encoder.encode(documents), strict=True):
            if isinstance(outcome, BadRow):
                bad.append((batch.origin, number, row_formats.of_field(str(outcome), batch.names)))
            else:
                encoded.append((document, number, outcome))
        tokens = [outcome.tokens for _, _, outcome in encoded]
        flags = [outcome.loss_mask for _, _, outcome in encoded]
        hashes = [xxhash.xxh3_64_intdigest(ids.tobytes()) for ids in tokens]
        lengths = np.array([len(ids) for ids in tokens], np.int32)
        offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = {
            "input_ids": pyarrow.ListArray.from_arrays(offsets, np.concatenate([*tokens, np.empty(0, np.int32)])),
            "supervised": pyarrow.ListArray.from_arrays(offsets, np.concatenate([*flags, np.empty(0, np.int8)])),
            "length": lengths,
            # The first token of a document has nothing before it and is never a target.
            "targets": np.array([flag[1:].sum() for flag in flags], np.int32),
            "hash": np.array(hashes, np.uint64),
            "origin": np.full(len(encoded), batch.origin, np.int32),
            "number": np.array([number for _, number, _ in encoded], np.int64),
        }
        samples = [
            (digest, at, *asked)
            for at, (digest, (document, _, _)) in enumerate(zip(hashes, encoded, strict=True))
            if (asked := _question(document, self.encoder.supervise))
        ]
        bad.sort(key=lambda entry: entry[1])
        return _Outcome(pyarrow.record_batch(columns), bad, _lowest(samples), (batch.origin, unused))


def _lowest(samples: list[Any]) -> list[Any]:
    """Those with the lowest hashes, one of each hash."""
    return heapq.nsmallest(NUM_SAMPLES, {sample[0]: sample for sample in sorted(samples, reverse=True)}.values())


def _question(document: row_formats.Chat | str, supervise: str) -> tuple[str, str] | None:
    """The first trained answer of a chat and the question before it, where there are both, as texts."""
    if isinstance(document, str):
        return None
    turns = document.turns
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i not in document.untrained]
    first = (answers or [0])[-1 if supervise == "last" else 0]
    asked = [turn["content"] for turn in turns[:first] if turn["role"] == "user"]
    return (asked[-1], turns[first]["content"]) if asked and turns[first]["content"] else None


_worker: Any = None  # in a process of the pool, which inherits it by the fork


def _start_worker(work: _Worker) -> None:
    global _worker
    # The watch that it inherits is the parent's, which ends the pool, and by SIGTERM if a process of it has died.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    processes.die_with_parent(signal.SIGKILL)  # if the parent is killed, nobody else would end this
    gc.disable()  # it would look through all that is inherited and copy it by that; what is made here has no cycles
    _worker = work


def _run_worker(batch: _Batch) -> _Outcome:
    return _worker(batch)


def _tokenize_in_order(work: _Worker, batches: Iterator[_Batch]) -> Iterator[_Outcome]:
    """work(batch) for each batch, in order, by a process on each core; few are read ahead."""
    # A process a core; threads of the tokenizer itself would not survive the fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    first, second = next(batches, None), next(batches, None)
    if first is None or second is None or num_cores == 1:
        yield from map(work, filter(None, chain([first, second], batches)))
        return
    work(first._replace(records=first.records[:1]))  # the processes inherit the template that this compiles
    waiting: deque[Future[_Outcome]] = deque()
    # By fork, as the tokenizer is in memory already: a fresh process would take seconds to come as far.
    with ProcessPoolExecutor(num_cores, get_context("fork"), _start_worker, (work,)) as pool:
        try:
            for batch in chain([first, second], batches):
                waiting.append(pool.submit(_run_worker, batch))
                if len(waiting) > 4 * num_cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("data.path: a process that tokenizes was killed, most likely for want of memory") from None
        finally:
            pool.shutdown(cancel_futures=True)
