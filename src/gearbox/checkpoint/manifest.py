"""A checkpoint: a folder of safetensors and JSON that is whole or not there, by parameter name and not by rank.

step-N/
    shard-00000.safetensors   one a rank: pieces, each under "kind|parameter|first element" (of the flattened tensor)
                              or, where it is cut in other dimensions than the first, "kind|parameter|row,column"
    manifest.json             every shard with size and digest, what resumes, shapes, recipe, gear, versions

It is committed by a rename. Where a folder cannot be renamed at once (`storage.why_no_rename`) the shards are written
into step-N itself, as shard-00000-RUN.safetensors: no two runs write the same one. Then the manifest is the commit: it
is written last, and without it, or with half of it, such a folder is none.

Kinds are `parameter`, `buffer` and what the optimizer keeps (`exp_avg`, ...). No pickle is written or read: a digest
is a guard against damage, and not the guard against code. This module knows files, not ranks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import xxhash

from gearbox.filesystem import digest_of

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_END = b"\n}\n"  # and nowhere before
SHARD = re.compile(r"shard-\d{5}(-\w+)?\.safetensors")
STEP = re.compile(r"step-(\d+)")
MAX_MANIFEST_BYTES = 64 * 2**20


class CorruptCheckpoint(Exception):
    """Not a whole checkpoint; the text says which file, and what is wrong with it."""


def render_manifest(content: dict[str, Any]) -> str:
    """The content with its own digest, so that a changed byte of it is noticed too."""
    body = json.dumps(content, sort_keys=True, indent=1)
    digest = xxhash.xxh3_128(body.encode()).hexdigest()
    return json.dumps({"digest": digest, "manifest": content}, sort_keys=True, indent=1) + "\n"


def shard_name(rank: int, run_id: str = "") -> str:
    """The file of a rank; with the run's id where it lies in the checkpoint's folder before that counts as one."""
    return f"shard-{rank:05d}-{run_id}.safetensors" if run_id else f"shard-{rank:05d}.safetensors"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises Damaged where it is not as it was written."""
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
        return content
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{MANIFEST}: is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{MANIFEST}: is damaged: {' '.join(str(error).split())[:200]}") from None


def verify_shards(folder: Path, files: dict[str, Any]) -> None:
    """Hold shards against what the manifest says of them. Raises Damaged at the first that differs."""
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
