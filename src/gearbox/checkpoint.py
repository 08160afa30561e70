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
import math
import os
import re
import shutil
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from gearbox import storage
from gearbox.redact import redacted

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_END = b"\n}\n"  # and nowhere before
SHARD = re.compile(r"shard-\d{5}(-\w+)?\.safetensors")
STEP = re.compile(r"step-(\d+)")
CHUNK_BYTES = 16 * 2**20  # written, hashed or read at once
MAX_MANIFEST_BYTES = 64 * 2**20
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Damaged(Exception):
    """Not a whole checkpoint; the text says which file, and what is wrong with it."""


@dataclass(frozen=True)
class Piece:
    """A run of elements of one flattened tensor, or a box of the tensor, as a rank holds it."""

    kind: str
    name: str
    """Of the parameter."""
    start: int | tuple[int, ...]
    """Of its first element in the whole flattened tensor; of a box, of its first corner in each dimension."""
    tensor: torch.Tensor
    """[n] or the box, a view of what is trained: writing to it writes there."""

    @property
    def key(self) -> str:
        start = str(self.start) if isinstance(self.start, int) else ",".join(map(str, self.start))
        return f"{self.kind}|{self.name}|{start}"


# --------------------------------------------------------------------------- writing


def render_manifest(content: dict[str, Any]) -> str:
    """The content with its own digest, so that a changed byte of it is noticed too."""
    body = json.dumps(content, sort_keys=True, indent=1)
    digest = xxhash.xxh3_128(body.encode()).hexdigest()
    return json.dumps({"digest": digest, "manifest": content}, sort_keys=True, indent=1) + "\n"


def shard(rank: int, run_id: str = "") -> str:
    """The file of a rank; with the run's id where it lies in the checkpoint's folder before that counts as one."""
    return f"shard-{rank:05d}-{run_id}.safetensors" if run_id else f"shard-{rank:05d}.safetensors"


def commit(aside: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Make a checkpoint of shards that are on the disk: the manifest, and one rename unless they lie there already."""
    if aside == folder:
        (folder / MANIFEST).unlink(missing_ok=True)  # of a damaged one of the same step
    with (aside / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(render_manifest(redacted(manifest) | {"format": FORMAT}))
        storage.sync(file)
    storage.sync_folder(aside)
    if aside == folder:
        for path in folder.iterdir():  # what is left of a damaged one
            if path.name not in {MANIFEST, *manifest["files"]}:
                with suppress(OSError):
                    path.unlink()
        return
    if folder.exists():  # a damaged one of the same step, which was passed over
        remove(folder)
    aside.rename(folder)
    storage.sync_folder(folder.parent)


def remove(folder: Path, renames: bool = True) -> None:
    """Delete a checkpoint. A kill on the way leaves nothing that counts as one."""
    aside = folder.with_name(f"{folder.name}.tmp-removed-{time.time_ns()}")  # another may be left: NFS keeps open files
    if renames:
        with suppress(OSError):  # an overlay refuses it for what lies below it
            folder.rename(aside)
            folder = aside
    discard(folder)


def discard(folder: Path) -> None:
    """Delete a folder, and first what makes it a checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # what stays is swept


def sweep(parent: Path) -> list[Path]:
    """Delete what dead runs left half written; returns the unfinished steps. Only for whoever holds the run's lock."""
    for leftover in parent.glob("*.tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()
    unfinished = [folder for _, folder in _folders(parent) if _is_unfinished(folder)]
    for folder in unfinished:
        with suppress(OSError):
            discard(folder)
    return unfinished


def prune(parent: Path, keep: int, renames: bool = True) -> None:
    """Delete all but the newest `keep` checkpoints and the one with the lowest held-out loss."""
    whole: dict[int, float | None] = {}
    for step, folder in steps(parent):
        try:
            whole[step] = read_manifest(folder).get("eval_loss")
        except Damaged:
            continue
    kept = set(sorted(whole)[-keep:])
    looked_at = {step: loss for step, loss in whole.items() if loss is not None and math.isfinite(loss)}
    if looked_at:
        kept.add(min(looked_at, key=lambda step: (looked_at[step], -step)))
    for step, folder in _folders(parent):
        if step not in kept and step < max(kept, default=0):
            remove(folder, renames)


# --------------------------------------------------------------------------- reading


def steps(parent: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, damaged ones too, newest first; not those that were never finished."""
    return [(step, folder) for step, folder in _folders(parent) if not _is_unfinished(folder)]


def _folders(parent: Path) -> list[tuple[int, Path]]:
    found = [(STEP.fullmatch(path.name), path) for path in parent.glob("step-*")]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _is_unfinished(folder: Path) -> bool:
    """Whether it has no whole manifest yet. After a rename it always has had one: then it is damaged."""
    try:
        if any(SHARD.fullmatch(path.name) and path.name.count("-") == 1 for path in folder.iterdir()):
            return False
        with (folder / MANIFEST).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(MANIFEST_END)))
            return file.read() != MANIFEST_END
    except FileNotFoundError:
        return True
    except OSError:
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises Damaged where it is not as it was written."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise Damaged(f"{MANIFEST}: has {path.stat().st_size:,} bytes, which none has")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)["manifest"]
        if render_manifest(content) != text:  # its digest, and every byte of it
            raise Damaged(f"{MANIFEST}: is damaged: it is not as it was written")
        if content["format"] != FORMAT:
            raise Damaged(f"{MANIFEST}: is of format {content['format']}, and this version reads {FORMAT}")
        step, files = content["step"], content["files"]
        if STEP.fullmatch(folder.name) and folder.name != f"step-{step}":
            raise Damaged(f"{MANIFEST}: is that of step {step}")
        if not files or not all(SHARD.fullmatch(name) for name in files):
            raise Damaged(f"{MANIFEST}: names files that no checkpoint has: {', '.join(files)[:200]}")
        return content
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST}: is missing") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST}: is damaged: {' '.join(str(error).split())[:200]}") from None


def verify(folder: Path, files: dict[str, Any]) -> None:
    """Hold shards against what the manifest says of them. Raises Damaged at the first that differs."""
    for name, facts in files.items():
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise Damaged(f"{name}: is missing" if not path.exists() else f"{name}: is no file of its own")
            if path.stat().st_size != facts["bytes"]:
                raise Damaged(f"{name}: has {path.stat().st_size:,} bytes instead of {facts['bytes']:,}")
            digest = digest_of(path)
        except OSError as error:
            raise Damaged(f"{name}: cannot be read: {error.strerror}") from None
        if digest != facts["xxh3_128"]:
            raise Damaged(f"{name}: is damaged: its digest differs")


def digest_of(path: Path) -> str:
    """xxh3-128 of a file's content."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class Reader:
    """The tensors of a verified checkpoint, any part of any of them, whoever wrote which part."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.shapes: dict[str, list[int]] = manifest["parameters"]
        self.scalars: dict[str, dict[str, Any]] = manifest["scalars"]
        self._pieces: dict[tuple[str, str], list[tuple[tuple[int, ...], str, str]]] = defaultdict(list)
        self._open: dict[str, Any] = {}
        for name in manifest["files"]:
            try:
                self._open[name] = safe_open(folder / name, framework="pt")
                for key in self._open[name].keys():  # noqa: SIM118  it is no dict
                    kind, parameter, start = key.split("|")
                    self._pieces[kind, parameter].append((tuple(map(int, start.split(","))), name, key))
            except (SafetensorError, OSError, ValueError) as error:
                raise Damaged(f"{name}: is no shard of a checkpoint: {error}") from None
        for pieces in self._pieces.values():
            pieces.sort()

    def kinds(self, name: str) -> list[str]:
        """Of what is kept for a parameter, itself excepted."""
        return sorted(kind for kind, parameter in self._pieces if parameter == name and kind != "parameter")

    def names(self, kind: str) -> set[str]:
        return {parameter for found, parameter in self._pieces if found == kind}

    def part(self, piece: Piece) -> torch.Tensor:
        """The saved values of a piece, in its shape, on the CPU, however they were cut."""
        if isinstance(piece.start, int):
            return self.read(piece.kind, piece.name, piece.start, piece.tensor.numel())
        rows, *rest = zip(piece.start, piece.tensor.shape, strict=True)
        inner = self.shapes[piece.name][1:]
        whole_rows = self.read(piece.kind, piece.name, rows[0] * math.prod(inner), rows[1] * math.prod(inner))
        return whole_rows.view(-1, *inner)[(slice(None), *(slice(first, first + size) for first, size in rest))]

    def read(self, kind: str, name: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Elements [start, start + numel) of a flattened tensor, or all of them; [numel] on the CPU."""
        pieces = self._pieces[kind, name]
        if pieces and len(pieces[0][0]) > 1:
            return self._read_of_boxes(kind, name, start, numel)
        end = math.inf if numel is None else start + numel
        parts, reached = [], start
        for (first,), file, key in pieces:
            held = self._open[file].get_slice(key)
            last = first + held.get_shape()[0]
            if last > reached and first < end:
                if first > reached:
                    break
                parts.append(held[reached - first : int(min(end, last)) - first])
                reached = int(min(end, last))
        if not parts or (numel is not None and reached != end):
            raise Damaged(f"{kind} of {name}: elements {reached:,} to {end:,} are in no shard")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_of_boxes(self, kind: str, name: str, start: int, numel: int | None) -> torch.Tensor:
        """The same, of boxes: the rows that hold these elements are put together."""
        num_rows, *inner = self.shapes[name]
        width = math.prod(inner)
        end = num_rows * width if numel is None else start + numel
        first, last = start // width, -(-end // width)
        rows, num_filled = None, 0
        for corner, file, key in self._pieces[kind, name]:
            held = self._open[file].get_slice(key)
            top, bottom = max(first, corner[0]), min(last, corner[0] + held.get_shape()[0])
            if top < bottom:
                box = held[top - corner[0] : bottom - corner[0]]
                rows = torch.empty(last - first, *inner, dtype=box.dtype) if rows is None else rows
                columns = (slice(at, at + size) for at, size in zip(corner[1:], box.shape[1:], strict=True))
                rows[(slice(top - first, bottom - first), *columns)] = box
                num_filled += box.numel()
        if rows is None or num_filled != rows.numel():
            raise Damaged(f"{kind} of {name}: some of the elements {start:,} to {end:,} are in no shard")
        return rows.view(-1)[start - first * width : end - first * width]
