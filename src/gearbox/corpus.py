"""All documents of a recipe as tokens: made once, kept in an Arrow file, mapped into memory by every rank.

The folder's name is a hash of all that the tokens depend on: the content of the sources, how they are read, the
tokenizer and the versions. It lies in the cache of `datasets` (HF_DATASETS_CACHE).
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import json
import os
import shutil
import signal
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gearbox import command, forms, sources, supervision
from gearbox.config import FORMS, Data, Recipe, UserError
from gearbox.forms import BadRow, Names
from gearbox.sources import Bad, Origin, Record

BATCH_BYTES = 2**18  # read for one batch of documents; its tokens as Python numbers take a hundred times as much
BATCH_DOCUMENTS = 64
NO_NAMES = Names("text", {}, {})  # for records before the first mapping, which do not come as far as to need names
# Until another rank sees to it; by then the builder holds the lock, unless it has read other data.
BUILDER_FIRST_SECONDS = 60
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
class Sample:
    document: int
    question: str
    answer: str


class Corpus:
    """The documents in order of their sources; [n] arrays, one entry a document."""

    def __init__(self, folder: Path, origins: list[Origin]) -> None:
        import datasets

        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        self.origins = origins
        self.summaries = [OriginSummary(**summary) for summary in about["summaries"]]
        self.bad: list[tuple[int, int, str]] = [tuple(entry) for entry in about["bad"]]
        """Origin, number and reason of each record that could not be used, in order."""
        self.key = folder.name
        """The same for the same documents."""
        self.samples = [Sample(**sample) for sample in about["samples"]]
        table = datasets.Dataset.from_file(str(folder / "documents.arrow")).data
        self.origin, self.number, self.targets, self.hashes, self.lengths = (
            table.column(name).to_numpy() for name in ("origin", "number", "targets", "hash", "length")
        )
        self.source = np.array([summary.source for summary in self.summaries])[self.origin]
        self._tokens, self._supervised = (_Mapped(table.column(name)) for name in ("input_ids", "supervised"))

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int) -> np.ndarray:
        """Token ids, [n] int32."""
        return self._tokens[document]

    def supervised(self, document: int) -> np.ndarray:
        """1 where the token is one to predict, [n] int8."""
        return self._supervised[document]

    def place(self, document: int) -> str:
        """Where the document was read: file:line."""
        return self.origins[self.origin[document]].place(int(self.number[document]))


class _Mapped:
    """A column of lists, read from the file as it is asked for: no copy, no conversion."""

    def __init__(self, column: Any) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.values = [chunk.values.to_numpy() for chunk in chunks]
        self.offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self.firsts = np.cumsum([0, *(len(chunk) for chunk in chunks)]).tolist()

    def __getitem__(self, index: int) -> np.ndarray:
        chunk = bisect_right(self.firsts, index) - 1
        offsets, at = self.offsets[chunk], index - self.firsts[chunk]
        return self.values[chunk][offsets[at] : offsets[at + 1]]


def of_recipe(
    recipe: Recipe, tokenizer: Any, is_builder: bool = True, tell: Callable[[str], None] = print
) -> tuple[Corpus, Corpus | None]:
    """The documents of data.path and those of eval.path, if it is given.

    They come from the cache, or are made now by the builder, and others wait for that. Raises UserError for data that
    cannot be used; then nothing is kept.
    """
    corpus = prepare(recipe.data, tokenizer, is_builder, tell)
    if recipe.eval.path is None:
        return corpus, None
    evaluated = recipe.data.model_copy(update={"path": recipe.eval.path})
    return corpus, prepare(evaluated, tokenizer, is_builder, tell)


def prepare(data: Data, tokenizer: Any, is_builder: bool, tell: Callable[[str], None]) -> Corpus:
    """One of the two."""
    import datasets
    from filelock import FileLock, Timeout

    encoder = supervision.Encoder(tokenizer, data.supervise)
    try:
        found = sources.find(data.sources)
        stamps = [origin.stamp() for origin in found]
        key = _key(found, data, tokenizer)
    except OSError as error:
        raise UserError(f"data.path: {error.filename}: cannot be read: {error.strerror}") from None
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "gearbox" / key
    launcher, started = os.getppid(), time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not folder.exists():
            if os.getppid() != launcher:
                raise RuntimeError(f"the launcher has ended while this rank waited for {folder}")
            if not is_builder and time.monotonic() - started < BUILDER_FIRST_SECONDS:
                time.sleep(0.1)
                continue
            try:
                with FileLock(f"{folder}.lock", timeout=1):
                    if not folder.exists():
                        _make(folder, found, stamps, data, encoder, tell)
            except Timeout:
                pass  # another one is at it
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot be written ({error.strerror}); set HF_DATASETS_CACHE") from None
    return Corpus(folder, found)


def _key(found: list[Origin], data: Data, tokenizer: Any) -> str:
    """Of all that the documents depend on; what rows and splits are made of them is not among it."""
    import xxhash

    modules = (forms, sources, supervision, sys.modules[__name__])
    parts = [
        FORMS,
        *((origin.source, origin.fields, origin.content()) for origin in found),
        data.model_dump(include={"form", "roles", "supervise", "text_unit", "on_bad_row"}),
        xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode()),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        [Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules],
        [version(name) for name in ("transformers", "tokenizers", "jinja2", "datasets")],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


# --------------------------------------------------------------------------- making


class _Batch(NamedTuple):
    origin: int
    names: Names
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


def _make(
    folder: Path,
    found: list[Origin],
    stamps: list[Any],
    data: Data,
    encoder: supervision.Encoder,
    tell: Callable[[str], None],
) -> None:
    import pyarrow
    from datasets.arrow_writer import ArrowWriter

    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a builder that was killed; another one cannot be at it
    aside.mkdir()
    reader = _Reader(found, data)
    bad: list[tuple[int, int, str]] = []
    samples: list[tuple[int, int, str, str]] = []
    unused: list[set[str]] = [set() for _ in found]
    num_documents = 0
    started = said = time.perf_counter()
    try:
        with ArrowWriter(path=str(aside / "documents.arrow"), features=_features()) as writer:
            work = _Worker(encoder)
            for outcome in _in_order(work, reader.batches()):
                unused[outcome.unused[0]] |= outcome.unused[1]
                for origin, number, reason in outcome.bad:
                    if data.on_bad_row == "stop":
                        raise UserError(f"{found[origin].place(number)}: {reason}")
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
                raise UserError(_nothing_left(found, bad))
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
            "samples": [asdict(Sample(document, *texts)) for _, document, *texts in samples],
        }
        (aside / "about.json").write_text(json.dumps(about), encoding="utf-8")
        aside.rename(folder)
        seconds = time.perf_counter() - started
        tell(f"tokenized {num_documents:,} documents in {seconds:.1f} s; kept in {folder}")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _nothing_left(found: list[Origin], bad: list[tuple[int, int, str]]) -> str:
    origin, number, reason = bad[0]
    names = ", ".join(origin.name for origin in found)
    return f"data.path: none of the {len(bad)} rows of {names} can be used; {found[origin].place(number)}: {reason}"


class _Reader:
    """Goes through the origins and tells each one's form by its first record."""

    def __init__(self, found: list[Origin], data: Data) -> None:
        self.found, self.data = found, data
        self.summaries: list[OriginSummary] = []

    def batches(self) -> Iterator[_Batch]:
        for index, origin in enumerate(self.found):
            names, num_records, records, size = None, 0, [], 0
            for record in origin.records(self.data.text_unit):
                num_records += 1
                if names is None and isinstance(value := _parsed(record.value), dict):
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

    def _names(self, origin: Origin, number: int, record: dict[str, Any]) -> Names:
        form = forms.recognise(record, self.data.form, origin.fields)
        if form is None:
            at = f"{origin.name}:1: the header" if origin.kind == "csv" else origin.place(number)
            raise forms.unrecognised(record, at)
        return Names(form, origin.fields, self.data.roles)


def _parsed(value: Any) -> Any:
    """A record's JSON where it is still bytes; Bad if it is none."""
    if not isinstance(value, bytes):
        return value
    text = sources.utf8(value)
    if isinstance(text, Bad):
        return text
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        return Bad(f"is not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return Bad("is not JSON: it is nested too deeply")
    except ValueError as error:  # a number of thousands of digits
        return Bad(f"is not JSON: {error}")


class _Worker:
    """A batch of records to a table of documents."""

    def __init__(self, encoder: supervision.Encoder) -> None:
        self.encoder = encoder

    def __call__(self, batch: _Batch) -> _Outcome:
        import pyarrow
        import xxhash

        documents, numbers, bad = [], [], []
        unused: set[str] = set()
        for record in batch.records:
            try:
                value = _parsed(record.value)
                if isinstance(value, Bad):
                    raise BadRow(value.reason)
                documents.append(forms.read(value, batch.names))
                numbers.append(record.number)
                unused |= forms.unused_fields(value, batch.names)
            except BadRow as error:
                bad.append((batch.origin, record.number, str(error)))
        encoded = []
        for document, number, outcome in zip(documents, numbers, self.encoder.encode(documents), strict=True):
            if isinstance(outcome, BadRow):
                bad.append((batch.origin, number, forms.of_field(str(outcome), batch.names)))
            else:
                encoded.append((document, number, outcome))
        tokens = [outcome.tokens for _, _, outcome in encoded]
        flags = [outcome.supervised for _, _, outcome in encoded]
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


def _question(document: forms.Chat | str, supervise: str) -> tuple[str, str] | None:
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
    command.end_with_parent(signal.SIGKILL)  # if the parent is killed, nobody else would end this
    gc.disable()  # it would look through all that is inherited and copy it by that; what is made here has no cycles
    _worker = work


def _run_worker(batch: _Batch) -> _Outcome:
    return _worker(batch)


def _in_order(work: _Worker, batches: Iterator[_Batch]) -> Iterator[_Outcome]:
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
