"""Define index.json, which lists the shards that src/prepare.py wrote, and what their rows depend on.

FOLDER/
    index.json            Written last. Size and digest of every file below, counts, settings.
    dropped.jsonl         Records that are neither trained nor held out, with reasons.
    shards/00000/         The documents and rows of one block of records.
    shards/00000/made/    What the index is made from; training does not read it.
    held_out/             All held-out documents and their rows.

Anyone may have written the index. Every value is checked before it is used: its type, its range, and each name.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gearbox import filesystem
from gearbox.config.recipe import Recipe
from gearbox.config.recipe_values import listed
from gearbox.data import corpus
from gearbox.errors import UserError, shown
from gearbox.rows import packing, splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

INDEX, SHARDS, HELD_OUT, DROPPED = "index.json", "shards", "held_out", "dropped.jsonl"
FORMAT: Final = "gearbox shards 1"
Settings = dict[str, Any]  # values that JSON can hold, by recipe key

START = json.dumps({"format": FORMAT})[:-1].encode()  # of the file
MAX_SHARDS, MAX_ROWS = 10**6, 2**40

Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Text = Annotated[str, Field(max_length=10_000)]
FileName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}(\.[a-z0-9_]{1,20}){0,2}$")]


class Part(BaseModel):
    """A part of the index. Unknown keys are errors, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileFacts(Part):
    """The size and digest of a file."""

    bytes: Count
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Shard(Part):
    """A folder of documents and rows."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}(/[0-9]{1,10})?$")]
    """Path of the folder in the folder of the index."""
    source: Count = 0
    """Index of the data.path entry if these have weights, else 0."""
    documents: Count
    """Documents with at least one chunk in a row."""
    rows: Annotated[int, Field(ge=0, le=MAX_ROWS)]
    chunks: Annotated[int, Field(ge=0, le=MAX_ROWS)]
    tokens: Count
    targets: Count
    files: Annotated[dict[FileName, FileFacts], Field(min_length=1, max_length=50)]

    @property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(facts.bytes for facts in self.files.values())


class OriginFacts(Part):
    """A file or dataset that was read."""

    name: Text
    kind: Annotated[str, Field(pattern=r"^[a-z]{1,20}$")]
    source: Count
    form: Text
    num_records: Count
    unused: list[Text]


class Question(Part):
    """A question of a held-out document, and its answer."""

    document: Count
    question: str
    answer: str


class Uses(Part):
    """The number of documents by use."""

    read: Count
    trained: Count
    held_out: Count
    dropped: Count
    truncated: Count
    split: Count
    duplicates: Count


class Lengths(Part):
    """The lengths of trained documents, in tokens."""

    median: Count
    p90: Count
    p99: Count
    max: Count

    @classmethod
    def of(cls, counted: list[tuple[list[int], list[int]]]) -> Lengths:
        """Return the percentiles of lengths and of how often each occurs, as `numpy.percentile` does."""
        counts: Counter[int] = Counter()
        for lengths, numbers in counted:
            counts.update(dict(zip(lengths, numbers, strict=True)))
        known = sorted(counts)
        ends = np.cumsum([counts[length] for length in known])

        def percentile(share: float) -> int:
            place = share * (int(ends[-1]) - 1)
            low, high = (known[int(np.searchsorted(ends, int(at), "right"))] for at in (place, np.ceil(place)))
            return int(low + (high - low) * (place % 1))

        return cls(median=percentile(0.5), p90=percentile(0.9), p99=percentile(0.99), max=known[-1])


class ShardIndex(Part):
    """The content of index.json."""

    format: Literal["gearbox shards 1"]
    settings: Settings
    """What the rows depend on, by recipe key."""
    made_with: Settings
    """Versions, code, content of the sources, and records per shard: equal in all parts."""
    weights: Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)] | None
    """Weight of each data.path entry, if it has one."""
    paths: list[Text]
    """The data.path entries."""
    origins: list[OriginFacts]
    shards: Annotated[list[Shard], Field(min_length=1, max_length=MAX_SHARDS)]
    held_out: Shard | None
    """None if no document is held out."""
    uses: Uses
    lengths: Lengths
    dropped: Text
    """Dropped records by reason, as text."""
    dropped_of_evaluation: Text
    """The same for the records of eval.path; empty if all are used."""
    questions: list[Question]
    """Questions of held-out documents, those with the lowest hashes first."""
    answer_ends: list[Count]
    """Special and added tokens that end trained spans."""

    @model_validator(mode="after")
    def _consistent(self) -> ShardIndex:
        names = [shard.name for shard in self.shards]
        if len({*names}) < len(names):
            raise ValueError("shards: a name is repeated")
        if sum(shard.rows for shard in self.shards) == 0:
            raise ValueError("shards: they have no rows")
        if any(shard.source >= len(self.weights or [1]) for shard in self.shards):
            raise ValueError("shards: a source is unknown")
        if self.uses.read != self.uses.trained + self.uses.held_out + self.uses.dropped:
            raise ValueError("uses: documents read are not trained + held out + dropped")
        if sum(shard.documents for shard in self.shards) != self.uses.trained:
            raise ValueError("uses: the shards do not have the trained documents")
        num_held_out = self.held_out.documents if self.held_out else 0
        if any(question.document >= num_held_out for question in self.questions):
            raise ValueError("questions: a document is unknown")
        return self

    @property
    def digest(self) -> str:
        """Hash of which tokens are in which row of which shard. Equal rows train identically."""
        kept = [
            [shard.source, shard.rows, {name: f.xxh3_128 for name, f in shard.files.items()}] for shard in self.shards
        ]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]

    @classmethod
    def parse(cls, raw: bytes, name: str) -> ShardIndex:
        """Return the index in a file's content. Raise UserError if it is not one."""
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part)[:100] for part in first["loc"])
            problem = first["msg"].removeprefix("Value error, ")
            raise UserError(f"{name}: {place + ': ' if place else ''}{problem}; prepare the data again") from None

    def write(self, path: Path) -> None:
        """Write the file. Its content starts with the format, the first field."""
        filesystem.atomic_write(path, json.dumps(self.model_dump(mode="json")) + "\n")


def is_index(path: Path) -> bool:
    """Return whether a file is an index of shards, in this or another format."""
    try:
        with filesystem.open_regular(path) as file:
            return file.read(len(START)) == START
    except OSError:
        return False


def settings_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Settings:
    """Return what the rows depend on, by recipe key. JSON can hold the values."""
    data, added = recipe.data, recipe.model.add_tokens
    content, template, *others = corpus.tokenizer_content(tokenizer)
    settings: Settings = {"batch.row_tokens": recipe.batch.row_tokens}
    names = ("form", "fields", "split", "roles", "supervise", "supervise_supplied", "long", "text_unit", "on_bad_row")
    settings |= {f"data.{name}": getattr(data, name) for name in (*names, "packing")}
    evaluated = [source.model_dump(exclude={"weight"}) for source in listed(recipe.eval.path or [])]
    settings |= {"eval.path": evaluated} if evaluated else {"eval.path": None, "eval.fraction": recipe.eval.fraction}
    settings |= {
        "data.chat_template": _hash(template),
        "model.add_tokens": added,
        "model.name": _hash([content, others]),
    }
    return settings


def made_with(num_records: int, sources: list[object]) -> Settings:
    """Return what all parts of an index share besides the settings."""
    modules = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (packing, splits)]
    return {"--records": num_records, "data.path": _hash(sources), "code": _hash([corpus.code_of_tokens(), modules])}


def refuse_difference(name: str, prepared: Settings, ours: Settings) -> None:
    """Raise UserError for the first setting in which shards differ from a recipe, with both values."""
    for key in ours | prepared:
        there, here = prepared.get(key), ours.get(key)
        if there != here:
            raise UserError(
                f"{key}: {shown(here)}{_what(key)}, but {name} was prepared with {shown(there)}; use the same, or "
                "prepare the data again in another folder"
            )


def _what(key: str) -> str:
    """Return what a hash identifies, for a setting whose value is one."""
    names = {"data.chat_template": "template", "model.name": "tokenizer", "data.path": "content of the sources"}
    return f" (hash of the {names[key]})" if key in names else ""


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
