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
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import xxhash
from huggingface_hub import constants
from numpy.typing import NDArray

from gearbox import filesystem
from gearbox.config.recipe import Data, Recipe
from gearbox.config.recipe_values import FORMS
from gearbox.data import chat_rendering, loss_mask, records, row_formats, sources, tokenization
from gearbox.data.records import OriginSummary
from gearbox.data.sources import Origin
from gearbox.data.tokenization import Question, UnusableRecord
from gearbox.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerFast

# After this wait another rank builds the file itself. By then the builder holds the lock, unless its data differs.
BUILDER_FIRST_SECONDS = 60
# The folder's name depends on the source text of these modules. The built-in tasks count as content of a source.
MODULES = (row_formats, sources, records, chat_rendering, loss_mask, tokenization)

Number = TypeVar("Number", bound=np.generic)


class MappedDocuments:
    """Tokenized documents in an Arrow file, whose tokens are read from it on access."""

    def __init__(self, path: Path, origins: list[Origin]) -> None:
        import pyarrow

        self.path, self.origins = path, origins
        with pyarrow.memory_map(str(path)) as file:
            table = pyarrow.ipc.open_stream(file).read_all()
        self.lengths: NDArray[np.int32] = _array(table.column("length"))
        self.targets: NDArray[np.int32] = _array(table.column("targets"))
        self.hashes: NDArray[np.uint64] = _array(table.column("hash"))
        self.origin_ids: NDArray[np.int32] = _array(table.column("origin"))
        self.record_numbers: NDArray[np.int64] = _array(table.column("number"))
        self.source_ids: NDArray[np.int64] = np.array([origin.source for origin in origins])[self.origin_ids]
        self._tokens: _ListColumn[np.int32] = _ListColumn(table.column("input_ids"))
        self._loss_masks: _ListColumn[np.int8] = _ListColumn(table.column("supervised"))

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int) -> NDArray[np.int32]:
        """Return the token ids, [n]."""
        return self._tokens[document]

    def loss_mask(self, document: int) -> NDArray[np.int8]:
        """Return 1 for each token to predict and 0 for others, [n]."""
        return self._loss_masks[document]

    def location(self, document: int) -> str:
        """Return the location of the document as file:line."""
        return self.origins[int(self.origin_ids[document])].location(int(self.record_numbers[document]))


class MappedCorpus(MappedDocuments):
    """A `Corpus` (rows/packing.py) in a folder that `tokenization.build_corpus` wrote."""

    def __init__(self, folder: Path, origins: list[Origin]) -> None:
        super().__init__(folder / tokenization.DOCUMENTS, origins)
        about = json.loads((folder / tokenization.ABOUT).read_text(encoding="utf-8"))
        self.summaries = [OriginSummary(**summary) for summary in about["summaries"]]
        self.bad = [UnusableRecord(*entry) for entry in about["bad"]]
        self.questions = [Question(**question) for question in about["questions"]]
        self.digest: str = about["digest"]
        self.key = folder.name
        """Hash of everything the documents depend on. It changes with the code that makes them; `digest` does not."""


def _array(column: pyarrow.Array | pyarrow.ChunkedArray) -> NDArray[Any]:
    """Return the numbers of a column. Its own `to_numpy` would import pandas, which takes as long as a model's load."""
    return np.from_dlpack(column.combine_chunks() if hasattr(column, "combine_chunks") else column)


class _ListColumn(Generic[Number]):
    """A memory-mapped column of lists. Nothing is copied or converted."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.values: list[NDArray[Number]] = [_array(chunk.values) for chunk in chunks]
        self.offsets: list[NDArray[np.int32]] = [_array(chunk.offsets) for chunk in chunks]
        self.firsts: list[int] = np.cumsum([0, *(len(chunk) for chunk in chunks)]).tolist()

    def __getitem__(self, index: int) -> NDArray[Number]:
        chunk = bisect_right(self.firsts, index) - 1
        offsets, row = self.offsets[chunk], index - self.firsts[chunk]
        return self.values[chunk][offsets[row] : offsets[row + 1]]


def load_corpora(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    is_builder: bool = True,
    tell: Callable[[str], None] = print,
) -> tuple[MappedCorpus, MappedCorpus | None]:
    """Return the documents of data.path, and those of eval.path if it is set.

    They come from the cache. If they are not in it, the builder tokenizes them and the other ranks wait.
    Raise UserError for data that cannot be used; nothing is cached then.
    """
    corpus = load_or_build(recipe.data, tokenizer, is_builder, tell)
    return corpus, load_evaluated(recipe, tokenizer, is_builder, tell)


def load_evaluated(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, is_builder: bool, tell: Callable[[str], None]
) -> MappedCorpus | None:
    """Return the documents of eval.path, or None if it is not set. See load_corpora."""
    if recipe.eval.path is None:
        return None
    evaluated = recipe.data.model_copy(update={"path": recipe.eval.path})
    return load_or_build(evaluated, tokenizer, is_builder, tell)


def load_or_build(
    data: Data, tokenizer: PreTrainedTokenizerFast, is_builder: bool, tell: Callable[[str], None]
) -> MappedCorpus:
    """Return the documents of one data.path from the cache, or build them. See load_corpora."""
    from filelock import FileLock, Timeout

    chat_tokenizer = loss_mask.ChatTokenizer(tokenizer, data.supervise, data.supervise_supplied)
    try:
        origins = sources.find(data.sources)
        stamps = [origin.stamp() for origin in origins]
        key = _cache_key(origins, data, tokenizer)
    except OSError as error:
        raise UserError(f"data.path: {error.filename}: cannot be read: {error.strerror}") from None
    folder = cache() / "gearbox" / key
    launcher, started = os.getppid(), time.monotonic()
    try:
        filesystem.make_folder(folder.parent)
        while not tokenization.is_whole(folder):
            if os.getppid() != launcher:
                raise RuntimeError(f"the launcher exited while this rank waited for {folder}")
            if not is_builder and time.monotonic() - started < BUILDER_FIRST_SECONDS:
                time.sleep(0.1)
                continue
            try:
                with FileLock(f"{folder}.lock", timeout=1):
                    if not tokenization.is_whole(folder):
                        if folder.exists():
                            tell(f"{folder}: is damaged; the documents are tokenized again")
                        tokenization.build_corpus(folder, origins, stamps, data, chat_tokenizer, tell)
            except Timeout:
                pass  # another process is building it
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot be written ({error.strerror}); set HF_DATASETS_CACHE") from None
    return MappedCorpus(folder, origins)


def cache() -> Path:
    """Return the cache of `datasets` without importing it, which takes half a second and 85 MB."""
    return Path(os.getenv("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets")))


def _cache_key(origins: list[Origin], data: Data, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of everything the documents depend on. Options that only affect splits and rows are excluded."""
    dependencies = [
        FORMS,
        *((origin.source, origin.fields, origin.content()) for origin in origins),
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
