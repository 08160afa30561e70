"""Define the manifest of a checkpoint: a folder of safetensors and JSON, keyed by parameter name and not by rank.

step-N/
    shard-00000.safetensors   One file per rank. Each tensor has the key "kind|parameter|first element" (an index into
                              the flattened tensor). A block of an N-dimensional tensor has "kind|parameter|row,column".

    manifest.json             Size and digest of every shard, progress, shapes, recipe, gear, versions.

A checkpoint is complete or absent: a rename commits it. Where a rename is not atomic (`filesystem.rename_problem`),
shards are written into step-N itself, as shard-00000-RUN.safetensors, so no two runs write the same file. There the
manifest is the commit: it is written last, and a folder without a complete manifest is not a checkpoint.

The kinds are `parameter`, `buffer` and the optimizer's tensors (`exp_avg`, ...). No pickle is written or read. A digest
guards against damage, not against a forger, who can compute it too. So every value is checked before it is used: its
type, its range, and the number of values. This module handles files and does not depend on ranks.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

from gearbox.errors import one_line
from gearbox.filesystem import digest_of, open_regular

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_END = b"\n}\n"  # occurs only at the end
SHARD = re.compile(r"shard-[0-9]{5}(-\w{1,40})?\.safetensors", re.ASCII)
STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})")
# LoRA on every expert of a model with 60 layers of 384 experts has 140,000 parameters. Each takes about 240 bytes and 6
# of the marks below. A file within both limits is read in less than a second.
MAX_MANIFEST_BYTES = 40 * 2**20
MARKS = (b",", b"[", b"{")  # there are no more values than these
MAX_MARKS = 1_000_000

Name = Annotated[str, Field(max_length=1000)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class CorruptCheckpoint(Exception):
    """An incomplete or corrupt checkpoint; the message names the file and the problem."""


class ShardFacts(TypedDict):
    """The size and digest of a shard's file."""

    bytes: Count
    xxh3_128: Name


class WrittenBy(TypedDict):
    """The gear that wrote a checkpoint."""

    name: Name
    num_processes: Annotated[Count, Field(ge=1)]
    engine: Name


def _each(kind: TypeAdapter[Any]) -> PlainValidator:
    """Return the validator of a dict with values of one kind. It stops at the first problem: there may be many."""

    def check(found: object) -> object:
        if not isinstance(found, dict):
            raise ValueError("is not an object")
        for name, value in found.items():
            try:
                kind.validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{name[:200]}: {explain_invalid(error)}") from None
        return found

    return PlainValidator(check)


def explain_invalid(error: ValidationError) -> str:
    """Return pydantic's first error as `place: what is wrong`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return ": ".join([*(part[:200] for part in first["loc"] if isinstance(part, str)), message])


Shape = Annotated[list[Count], Field(strict=True, max_length=16)]
ScalarTensor = Annotated[dict[str, Number], Field(strict=True, min_length=1, max_length=1)]
ScalarState = Annotated[
    dict[Annotated[str, Field(pattern=r"^\w{1,100}$")], Number | ScalarTensor], Field(strict=True, max_length=20)
]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    step: Count
    progress: dict[str, Any]
    """A `TrainState` as JSON."""
    parameters: Annotated[dict[str, list[int]], _each(TypeAdapter(Shape))]
    """Full shape of each trained parameter."""
    scalars: Annotated[dict[str, dict[str, Any]], _each(TypeAdapter(ScalarState))]
    """The optimizer's numbers by parameter, such as AdamW's step count."""
    recipe: Annotated[dict[str, dict[str, Any]], _each(TypeAdapter(dict[str, Any]))]
    rows: str
    """An identifier of the data's tokens and of their division into rows."""
    base: str | None
    """An identifier of the frozen base weights under an adapter."""
    versions: Annotated[dict[str, str], _each(TypeAdapter(str))]
    gear: WrittenBy
    files: Annotated[dict[str, ShardFacts], _each(TypeAdapter(ShardFacts))] = field(default_factory=dict)
    eval_loss: Annotated[float, Field(strict=True)] | None = None
    """Held-out loss at this step, if the step was evaluated."""
    format: Count = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file, without eval_loss if the step was not evaluated."""
        content = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.eval_loss is None:
            del content["eval_loss"]
        return content


_MANIFEST = TypeAdapter(Manifest)


def render_manifest(content: Mapping[str, Any]) -> str:
    """Return the text of manifest.json: the content and a digest that reveals any changed byte."""
    return _with_digest(json.dumps(content, sort_keys=True, indent=1).encode()).decode()


def _with_digest(body: bytes) -> bytes:
    """Return the file with this body, which is indented, and with its digest."""
    digest, indented = xxhash.xxh3_128(body).hexdigest().encode(), body.replace(b"\n", b"\n ")
    return b'{\n "digest": "' + digest + b'",\n "manifest": ' + indented + MANIFEST_END


def shard_name(rank: int, run_id: str = "") -> str:
    """Return the file name of a rank's shard, with the run's id if shards are written in place."""
    return f"shard-{rank:05d}-{run_id}.safetensors" if run_id else f"shard-{rank:05d}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raise CorruptCheckpoint if any byte has changed or any value is invalid."""
    manifest = _parse(_read_body(folder / MANIFEST))
    if STEP.fullmatch(folder.name) and folder.name != f"step-{manifest.step}":
        raise CorruptCheckpoint(f"{MANIFEST}: belongs to step {manifest.step}")
    if not manifest.files or not all(SHARD.fullmatch(name) for name in manifest.files):
        raise CorruptCheckpoint(f"{MANIFEST}: lists invalid file names: {', '.join(manifest.files)[:200]}")
    return manifest


def _read_body(path: Path) -> bytes:
    """Return the part of the file below its digest. Raise CorruptCheckpoint if any byte of the file has changed."""
    try:
        with open_regular(path, follows_links=False) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_MANIFEST_BYTES:
                raise CorruptCheckpoint(f"{MANIFEST}: has {size:,} bytes, above the {MAX_MANIFEST_BYTES:,} limit")
            text = file.read(MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{MANIFEST}: is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST}: cannot be read: {error.strerror}") from None
    body = text.partition(b'"manifest": ')[2].removesuffix(MANIFEST_END).replace(b"\n ", b"\n")
    if _with_digest(body) != text:  # compares the digest and every other byte
        raise CorruptCheckpoint(f"{MANIFEST}: is corrupt: its digest does not match")
    return body


def _parse(body: bytes) -> Manifest:
    if (number := sum(map(body.count, MARKS))) > MAX_MARKS:
        raise CorruptCheckpoint(f"{MANIFEST}: has {number:,} values, above the {MAX_MARKS:,} limit")
    try:
        # In two steps, because each of pydantic's errors about JSON text holds a copy of all values.
        content = from_json(body)
        number = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
        if isinstance(number, int) and number != FORMAT:
            raise CorruptCheckpoint(f"{MANIFEST}: has format {number}; this version reads format {FORMAT}")
        return _MANIFEST.validate_python(content)
    except ValidationError as error:
        problem = explain_invalid(error)
    except ValueError as error:
        problem = one_line(error)
    raise CorruptCheckpoint(f"{MANIFEST}: is corrupt: {problem}")


def verify_shards(folder: Path, files: Mapping[str, ShardFacts]) -> None:
    """Compare shards with their entries in the manifest. Raise CorruptCheckpoint at the first mismatch."""
    verify_sizes(folder, files)
    for name, facts in files.items():
        try:
            digest = digest_of(folder / name)
        except OSError as error:
            raise CorruptCheckpoint(f"{name}: cannot be read: {error.strerror}") from None
        if digest != facts["xxh3_128"]:
            raise CorruptCheckpoint(f"{name}: is corrupt: its digest does not match")


def verify_sizes(folder: Path, files: Mapping[str, ShardFacts]) -> None:
    """Compare only the sizes of the shards. Raise CorruptCheckpoint at the first mismatch."""
    for name, facts in files.items():
        try:
            found = (folder / name).lstat()
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{name}: is missing") from None
        except OSError as error:
            raise CorruptCheckpoint(f"{name}: cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise CorruptCheckpoint(f"{name}: is not a regular file")
        if found.st_size != facts["bytes"]:
            raise CorruptCheckpoint(f"{name}: has {found.st_size:,} bytes, expected {facts['bytes']:,}")
