"""A checkpoint: a folder of safetensors and JSON, complete or absent, by parameter name and not by rank.

step-N/
    shard-00000.safetensors   one a rank: tensors, each under "kind|parameter|first element" (of the flattened tensor)
                              or, for a block of an N-dimensional tensor, "kind|parameter|row,column"
    manifest.json             every shard with size and digest, what resumes, shapes, recipe, gear, versions

A rename commits it. Where a rename is not atomic (`filesystem.rename_problem`), shards are written into step-N itself,
as shard-00000-RUN.safetensors: no two runs write the same one. Then the manifest is the commit: it is written last,
and without a complete one the folder is not a checkpoint.

Kinds are `parameter`, `buffer` and what the optimizer keeps (`exp_avg`, ...). No pickle is written or read: a digest
guards against damage, not against code. This module knows files, not ranks.
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
MANIFEST_END = b"\n}\n"  # and nowhere before
SHARD = re.compile(r"shard-\d{5}(-\w+)?\.safetensors")
STEP = re.compile(r"step-(\d+)")
MAX_MANIFEST_BYTES = 64 * 2**20


class CorruptCheckpoint(Exception):
    """An incomplete or damaged checkpoint; the text names the file and what is wrong with it."""


class ShardFacts(TypedDict):
    """Size and digest of a shard's file."""

    bytes: int
    xxh3_128: str


class WrittenBy(TypedDict):
    """The gear that wrote a checkpoint."""

    name: str
    num_processes: int
    engine: str


@dataclass(frozen=True)
class Manifest:
    """What manifest.json holds."""

    step: int
    progress: dict[str, Any]
    """A `TrainState` as JSON."""
    parameters: dict[str, list[int]]
    """Full shape of each trained parameter."""
    scalars: dict[str, dict[str, Any]]
    """By parameter, what the optimizer keeps in addition to tensors, such as AdamW's count of steps."""
    recipe: dict[str, Any]
    rows: str
    """Identifies the tokens of the data, and which of them are in which row."""
    base: str | None
    """Identifies the frozen weights below an adapter."""
    versions: dict[str, str]
    gear: WrittenBy
    files: dict[str, ShardFacts] = field(default_factory=dict)
    eval_loss: float | None = None
    """Held-out loss at this step, if it was evaluated."""
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file; eval_loss is left out where there is none."""
        content = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.eval_loss is None:
            del content["eval_loss"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """Raises TypeError where a field is missing; unknown ones are ignored."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})


def render_manifest(content: Mapping[str, Any]) -> str:
    """Return the text of manifest.json: the content with its digest, which reveals any changed byte."""
    body = json.dumps(content, sort_keys=True, indent=1)
    digest = xxhash.xxh3_128(body.encode()).hexdigest()
    return json.dumps({"digest": digest, "manifest": content}, sort_keys=True, indent=1) + "\n"


def shard_name(rank: int, run_id: str = "") -> str:
    """Return the file name of a rank; with the run's id where shards are written in place."""
    return f"shard-{rank:05d}-{run_id}.safetensors" if run_id else f"shard-{rank:05d}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises CorruptCheckpoint where a byte of it has changed."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpoint(f"{MANIFEST}: has {path.stat().st_size:,} bytes, which none has")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)["manifest"]
        if render_manifest(content) != text:  # its digest, and every byte of it
            raise CorruptCheckpoint(f"{MANIFEST}: is damaged: it is not as it was written")
        if content["format"] != FORMAT:
            raise CorruptCheckpoint(f"{MANIFEST}: is of format {content['format']}, and this version reads {FORMAT}")
        step, files = content["step"], content["files"]
        if STEP.fullmatch(folder.name) and folder.name != f"step-{step}":
            raise CorruptCheckpoint(f"{MANIFEST}: is that of step {step}")
        if not files or not all(SHARD.fullmatch(name) for name in files):
            raise CorruptCheckpoint(f"{MANIFEST}: names files that no checkpoint has: {', '.join(files)[:200]}")
        return Manifest.from_json(content)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{MANIFEST}: is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{MANIFEST}: is damaged: {one_line(error, 200)}") from None


def verify_shards(folder: Path, files: Mapping[str, ShardFacts]) -> None:
    """Compare shards with their facts in the manifest. Raises CorruptCheckpoint at the first that differs."""
    for name, facts in files.items():
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise CorruptCheckpoint(
                    f"{name}: is missing" if not path.exists() else f"{name}: is no file of its own"
                )
            if path.stat().st_size != facts["bytes"]:
                raise CorruptCheckpoint(f"{name}: has {path.stat().st_size:,} bytes instead of {facts['bytes']:,}")
            digest = digest_of(path)
        except OSError as error:
            raise CorruptCheckpoint(f"{name}: cannot be read: {error.strerror}") from None
        if digest != facts["xxh3_128"]:
            raise CorruptCheckpoint(f"{name}: is damaged: its digest differs")
