"""Load the documents of a data.path as tokens, from an Arrow file that every rank maps into memory.

The file is written once, to the cache of `datasets` (HF_DATASETS_CACHE). Its folder is named by a hash of everything
the tokens depend on. This covers the content of the sources, how they are read, the tokenizer and the versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from huggingface_hub import constants
from numpy.typing import NDArray

from gearbox import filesystem, processes
from gearbox.config.recipe import Data, Recipe
from gearbox.config.recipe_values import FORMS
from gearbox.console import Screen, Work, status
from gearbox.data import chat_rendering, judged_answers, loss_mask, records, row_formats, sources, tokenization
from gearbox.data.records import OriginSummary
from gearbox.data.sources import Origin, Stamp
from gearbox.data.tokenization import Question, UnusableRecord
from gearbox.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerFast

# After this wait another rank builds the file itself. By then the builder holds the lock, unless its data differs.
BUILDER_FIRST_SECONDS = 60
# The folder's name depends on the source text of these modules. The built-in tasks count as content of a source.
MODULES = (row_formats, judged_answers, sources, records, chat_rendering, loss_mask, tokenization)

Numbers = NDArray[Any]  # of the dtype that the column has


class MappedDocuments:
    """Tokenized documents in an Arrow file, whose tokens are read from it on access."""

    def __init__(self, path: Path, origins: list[Origin]) -> None:
        import pyarrow

        self.path, self.origins = path, origins
        with pyarrow.memory_map(str(path)) as file:
            table = pyarrow.ipc.open_stream(file).read_all()
        chunks = [chunk for chunk in table.to_batches() if len(chunk)]
        self._numbers: dict[str, list[Numbers]] = {
            name: [_array(chunk.column(name)) for chunk in chunks]
            for name in ("length", "targets", "hash", "origin", "number", "label")
            if name in table.column_names
        }
        self._firsts: list[int] = np.cumsum([0, *(len(chunk) for chunk in chunks)]).tolist()
        self._tokens = [_ListColumn(chunk.column("input_ids")) for chunk in chunks]
        self._loss_masks = [_ListColumn(chunk.column("supervised")) for chunk in chunks]

    def __len__(self) -> int:
        return self._firsts[-1]

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each document. This and the next arrays are copied from the file once."""
        return self._column("length", np.int32)

    @cached_property
    def targets(self) -> NDArray[np.int32]:
        """Number of tokens to predict in each document."""
        return self._column("targets", np.int32)

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """Hash of the token ids of each document."""
        return self._column("hash", np.uint64)

    @cached_property
    def labels(self) -> NDArray[np.int8]:
        """1 for a good answer and for a usual document, 0 for a rejected or bad answer.

        A pair is two consecutive documents of a record, 1 then 0. Shards of earlier versions have usual documents only.
        """
        return self._column("label", np.int8) if "label" in self._numbers else np.ones(len(self), np.int8)

    @cached_property
    def origin_ids(self) -> NDArray[np.int32]:
        """Index into `origins` of each document."""
        return self._column("origin", np.int32)

    @cached_property
    def record_numbers(self) -> NDArray[np.int64]:
        """Number of the record of each document."""
        return self._column("number", np.int64)

    @cached_property
    def source_ids(self) -> NDArray[np.int64]:
        """Index of the data.path entry of each document."""
        return np.array([origin.source for origin in self.origins], np.int64)[self.origin_ids]

    def _column(self, name: str, dtype: type[np.generic]) -> Numbers:
        chunks = self._numbers[name]
        return np.concatenate(chunks) if chunks else np.empty(0, dtype)

    def _place(self, document: int) -> tuple[int, int]:
        """Return the chunk of a document, and its place in it."""
        chunk = bisect_right(self._firsts, document) - 1
        return chunk, document - self._firsts[chunk]

    def tokens(self, document: int) -> NDArray[np.int32]:
        """Return the token ids, [n]."""
        chunk, row = self._place(document)
        return self._tokens[chunk][row]

    def loss_mask(self, document: int) -> NDArray[np.int8]:
        """Return 1 for each token to predict and 0 for others, [n]."""
        chunk, row = self._place(document)
        return self._loss_masks[chunk][row]

    def location(self, document: int) -> str:
        """Return the location of the document as file:line."""
        chunk, row = self._place(document)
        origin, number = (int(self._numbers[name][chunk][row]) for name in ("origin", "number"))
        return self.origins[origin].location(number)


class MappedCorpus(MappedDocuments):
    """A `Corpus` (rows/packing.py) in a folder that `tokenization.build_corpus` wrote."""

    def __init__(self, folder: Path, origins: list[Origin]) -> None:
        super().__init__(folder / tokenization.DOCUMENTS, origins)
        about = json.loads((folder / tokenization.ABOUT).read_text(encoding="utf-8"))
        self.summaries = [OriginSummary(**summary) for summary in about["summaries"]]
        self.num_bad: int = about["num_bad"]
        self.questions = [Question(**question) for question in about["questions"]]
        """Questions to ask the model, from the documents that any split holds out first."""
        self.digest: str = about["digest"]
        """Hash of the training content: token ids, loss masks and lengths of all documents, in order."""
        self.key = folder.name
        """Hash of everything the documents depend on. It changes with the code that makes them; `digest` does not."""

    @cached_property
    def bad(self) -> list[UnusableRecord]:
        """Records that could not be used, in order."""
        entries = json.loads((self.path.parent / tokenization.BAD).read_text(encoding="utf-8"))
        return [UnusableRecord(*entry) for entry in entries]


def _array(column: pyarrow.Array) -> Numbers:
    """Return the numbers of a column. Its own `to_numpy` would import pandas, which takes as long as a model's load."""
    return np.from_dlpack(column)


class _ListColumn:
    """A memory-mapped column of lists. Nothing is copied or converted."""

    __slots__ = ("offsets", "values")

    def __init__(self, column: pyarrow.ListArray) -> None:
        self.values, self.offsets = _array(column.values), _array(column.offsets)

    def __getitem__(self, row: int) -> Numbers:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class Builder:
    """A rank that makes folders of the cache once per machine, or waits for the rank that does."""

    is_first: bool = True
    """True for the first rank of the machine. The others wait for it."""
    tell: Callable[[str], None] = print
    screen: Screen | None = None
    """A screen that shows what takes time."""

    def working(self, text: str, unit: str = "") -> AbstractContextManager[Work]:
        """Return a context that shows what takes time, on a terminal at once and elsewhere by `tell` now and then."""
        if self.screen is not None and self.screen.is_live:
            return status(self.screen, text, unit)
        return nullcontext(Work(text, unit, self.tell))

    def make(self, folder: Path, is_whole: Callable[[Path], bool], build: Callable[[Path], None]) -> None:
        """Return once the folder is whole. `build` makes its content in the folder that it is given, under a lock."""
        from filelock import FileLock, Timeout

        launcher, started = os.getppid(), time.monotonic()
        try:
            filesystem.make_folder(folder.parent)
            while not is_whole(folder):
                processes.check_launcher(launcher, folder)
                if not self.is_first and time.monotonic() - started < BUILDER_FIRST_SECONDS:
                    time.sleep(0.1)
                    continue
                try:
                    with FileLock(f"{folder}.lock", timeout=1):
                        if not is_whole(folder):
                            self._build(folder, build)
                except Timeout:
                    pass  # another process is building it
        except OSError as error:
            raise UserError(f"{folder.parent}: cannot be written ({error.strerror}); set HF_DATASETS_CACHE") from None

    def _build(self, folder: Path, build: Callable[[Path], None]) -> None:
        if folder.exists():
            self.tell(f"{folder}: is damaged; it is made again")
        for left in (folder, partial := folder.with_name(f"{folder.name}.partial")):
            filesystem.remove(left)  # damaged, or left by a builder that was killed; no other builder can be running
        partial.mkdir()
        try:
            build(partial)
            filesystem.sync_tree(partial)
            filesystem.rename(partial, folder)
        finally:
            filesystem.remove(partial)


def load_corpora(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    builder: Builder = Builder(),
) -> tuple[MappedCorpus, MappedCorpus | None]:
    """Return the documents of data.path, and those of eval.path if it is set.

    They come from the cache. If they are not in it, the builder tokenizes them and the other ranks wait.
    Raise UserError for data that cannot be used; nothing is cached then.
    """
    corpus = load_or_build(recipe.data, tokenizer, builder, recipe.forms)
    return corpus, load_evaluated(recipe, tokenizer, builder)


def load_evaluated(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, builder: Builder) -> MappedCorpus | None:
    """Return the documents of eval.path, or None if it is not set. See load_corpora."""
    if recipe.eval.path is None:
        return None
    evaluated = recipe.data.model_copy(update={"path": recipe.eval.path})
    return load_or_build(evaluated, tokenizer, builder, recipe.forms)


def load_or_build(
    data: Data, tokenizer: PreTrainedTokenizerFast, builder: Builder, forms: tuple[str, ...]
) -> MappedCorpus:
    """Return the documents of one data.path in some formats from the cache, or build them. See load_corpora."""
    chat_tokenizer = loss_mask.ChatTokenizer(tokenizer, data.supervise, data.supervise_supplied)
    origins, stamps, contents = find_origins(data)
    folder = cache() / "gearbox" / _cache_key([forms, *contents], data, tokenizer)

    def build(made: Path) -> None:
        started = time.perf_counter()
        with builder.working("tokenizing", "documents") as work:
            reader = records.RecordReader(origins, data, forms)
            num_documents = tokenization.build_corpus(made, reader, stamps, chat_tokenizer, work)
        seconds = time.perf_counter() - started
        builder.tell(f"tokenized {num_documents:,} documents in {seconds:.1f} s; cached in {folder}")

    builder.make(folder, tokenization.is_whole, build)
    return MappedCorpus(folder, origins)


def cache() -> Path:
    """Return the cache of `datasets` without importing it, which takes half a second and 85 MB."""
    return Path(os.getenv("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets")))


def find_origins(data: Data) -> tuple[list[Origin], list[Stamp], list[object]]:
    """Return the origins of data.path, the stamp of each, and what its records depend on, which JSON can hold.

    Raise UserError if one cannot be read.
    """
    try:
        origins = sources.find(data.sources)
        stamps = [origin.stamp() for origin in origins]
        return origins, stamps, [[origin.source, origin.fields, origin.content()] for origin in origins]
    except OSError as error:
        raise UserError(f"data.path: {error.filename}: cannot be read: {error.strerror}") from None


def _cache_key(contents: list[object], data: Data, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of everything the documents depend on. Options that only affect splits and rows are excluded."""
    dependencies = [
        FORMS,
        *contents,
        data.model_dump(include={"form", "roles", "supervise", "supervise_supplied", "text_unit", "on_bad_row"}),
        *tokenizer_content(tokenizer),
        *code_of_tokens(),
    ]
    return hashlib.sha256(json.dumps(dependencies, sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokenizer_content(tokenizer: PreTrainedTokenizerFast) -> list[object]:
    """Return everything of a tokenizer that tokens depend on; its chat template comes second."""
    generation = Path(tokenizer.name_or_path, "generation_config.json")
    return [
        xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode()),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        generation.read_text(encoding="utf-8") if generation.is_file() else None,
    ]


def code_of_tokens() -> list[object]:
    """Return the code and the versions that tokens depend on."""
    return [
        [Path(str(module.__file__)).read_text(encoding="utf-8") for module in MODULES],
        [version(name) for name in ("transformers", "tokenizers", "jinja2", "datasets")],
    ]
