"""All documents of a recipe as tokens: made once, kept in an Arrow file, mapped into memory by every rank.

The folder's name is a hash of all that the tokens depend on: the content of the sources, how they are read, the
tokenizer and the versions. It lies in the cache of `datasets` (HF_DATASETS_CACHE).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gearbox.config.recipe import FORMS, Data, Recipe
from gearbox.data import loss_mask, row_formats, sources
from gearbox.data.sources import Origin
from gearbox.data.tokenize import OriginSummary, Question, build_corpus
from gearbox.errors import UserError

# Until another rank sees to it; by then the builder holds the lock, unless it has read other data.
BUILDER_FIRST_SECONDS = 60


class MappedCorpus:
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
        self.samples = [Question(**sample) for sample in about["samples"]]
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

    def loss_mask(self, document: int) -> np.ndarray:
        """1 where the token is one to predict, [n] int8."""
        return self._supervised[document]

    def location(self, document: int) -> str:
        """Where the document was read: file:line."""
        return self.origins[self.origin[document]].location(int(self.number[document]))


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


def load_corpora(
    recipe: Recipe, tokenizer: Any, is_builder: bool = True, tell: Callable[[str], None] = print
) -> tuple[MappedCorpus, MappedCorpus | None]:
    """The documents of data.path and those of eval.path, if it is given.

    They come from the cache, or are made now by the builder, and others wait for that. Raises UserError for data that
    cannot be used; then nothing is kept.
    """
    corpus = load_or_build(recipe.data, tokenizer, is_builder, tell)
    if recipe.eval.path is None:
        return corpus, None
    evaluated = recipe.data.model_copy(update={"path": recipe.eval.path})
    return corpus, load_or_build(evaluated, tokenizer, is_builder, tell)


def load_or_build(data: Data, tokenizer: Any, is_builder: bool, tell: Callable[[str], None]) -> MappedCorpus:
    """One of the two."""
    import datasets
    from filelock import FileLock, Timeout

    encoder = loss_mask.ChatTokenizer(tokenizer, data.supervise)
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
                        build_corpus(folder, found, stamps, data, encoder, tell)
            except Timeout:
                pass  # another one is at it
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot be written ({error.strerror}); set HF_DATASETS_CACHE") from None
    return MappedCorpus(folder, found)


def _key(found: list[Origin], data: Data, tokenizer: Any) -> str:
    """Of all that the documents depend on; what rows and splits are made of them is not among it."""
    import xxhash

    modules = (row_formats, sources, loss_mask, sys.modules[__name__])
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
