"""Define the manifest of a checkpoint: a folder of safetensors and JSON, keyed by parameter name and not by rank.

step-N/
    shard-00000.safetensors   One file per rank. Each tensor has the key "kind|parameter|first element" (an index into
                              the flattened tensor). A block of an N-dimensional tensor has "kind|parameter|row,column".

    manifest.json             Size and digest of every shard, progress, shapes, recipe, gear, versions.

A checkpoint is complete or absent: a rename commits it. Where a rename is not atomic (`filesystem.rename_problem`),
shards are written into step-N itself, as shard-00000-RUN.safetensors, so no two runs write the same file. There the
manifest is the commit: it is written last, and a folder without a complete manifest is not a checkpoint.

The kinds are `parameter`, `buffer` and the optimizer's tensors (`exp_avg`, ...). No pickle is written or read. A digest
guards against damage, not against malicious code. This module handles files and does not depend on ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from gearbox.errors import one_line
from gearbox.filesystem import digest_of

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_END = b"\n}\n"  # occurs only at the end
SHARD = re.compile(r"shard-\d{5}(-\w+)?\.safetensors")
STEP = re.compile(r"step-(\d+)")
MAX_MANIFEST_BYTES = 64 * 2**20


class CorruptCheckpoint(Exception):
    """An incomplete or corrupt checkpoint; the message names the file and the problem."""


class ShardFacts(TypedDict):
    """The size and digest of a shard's file."""

    bytes: int
    xxh3_128: str


class WrittenBy(TypedDict):
    """The gear that wrote a checkpoint."""

    name: str
    num_processes: int
    engine: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    progress: dict[str, Any]
    """A `TrainState` as JSON."""
    parameters: dict[str, list[int]]
    """Full shape of each trained parameter."""
    scalars: dict[str, dict[str, Any]]
    """The optimizer's numbers by parameter, such as AdamW's step count."""
    recipe: dict[str, Any]
    rows: str
    """An identifier of the data's tokens and of their division into rows."""
    base: str | None
    """An identifier of the frozen base weights under an adapter."""
    versions: dict[str, str]
    gear: WrittenBy
    files: dict[str, ShardFacts] = field(default_factory=dict)
    eval_loss: float | None = None
    """Held-out loss at this step, if the step was evaluated."""
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file, without eval_loss if the step was not evaluated."""
        content = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.eval_loss is None:
            del content["eval_loss"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """Create a manifest from JSON, ignoring unknown fields. Raise TypeError if a field is missing."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})


def render_manifest(content: Mapping[str, Any]) -> str:
    """Return the text of manifest.json: the content and a digest that reveals any changed byte."""
    body = json.dumps(content, sort_keys=True, indent=1)
    digest = xxhash.xxh3_128(body.encode()).hexdigest()
    return json.dumps({"digest": digest, "manifest": content}, sort_keys=True, indent=1) + "\n"


def shard_name(rank: int, run_id: str = "") -> str:
    """Return the file name of a rank's shard, with the run's id if shards are written in place."""
    return f"shard-{rank:05d}-{run_id}.safetensors" if run_id else f"shard-{rank:05d}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raise CorruptCheckpoint if any byte has changed."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpoint(
                f"{MANIFEST}: has {path.stat().st_size:,} bytes, above the {MAX_MANIFEST_BYTES:,} limit"
            )
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)["manifest"]
        if render_manifest(content) != text:  # compares the digest and every other byte
            raise CorruptCheckpoint(f"{MANIFEST}: is corrupt: its digest does not match")
        if content["format"] != FORMAT:
            raise CorruptCheckpoint(f"{MANIFEST}: has format {content['format']}; this version reads format {FORMAT}")
        step, files = content["step"], content["files"]
        if STEP.fullmatch(folder.name) and folder.name != f"step-{step}":
            raise CorruptCheckpoint(f"{MANIFEST}: belongs to step {step}")
        if not files or not all(SHARD.fullmatch(name) for name in files):
            raise CorruptCheckpoint(f"{MANIFEST}: lists invalid file names: {', '.join(files)[:200]}")
        return Manifest.from_json(content)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{MANIFEST}: is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{MANIFEST}: is corrupt: {one_line(error, 200)}") from None


def verify_shards(folder: Path, files: Mapping[str, ShardFacts]) -> None:
    """Compare shards with their entries in the manifest. Raise CorruptCheckpoint at the first mismatch."""
    for name, facts in files.items():
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise CorruptCheckpoint(
                    f"{name}: is missing" if not path.exists() else f"{name}: is not a regular file"
                )
            if path.stat().st_size != facts["bytes"]:
                raise CorruptCheckpoint(f"{name}: has {path.stat().st_size:,} bytes, expected {facts['bytes']:,}")
            digest = digest_of(path)
        except OSError as error:
            raise CorruptCheckpoint(f"{name}: cannot be read: {error.strerror}") from None
        if digest != facts["xxh3_128"]:
            raise CorruptCheckpoint(f"{name}: is corrupt: its digest does not match")
