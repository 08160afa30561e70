"""A checkpoint: a folder of safetensors and JSON that is whole or not there, by parameter name and not by rank.

step-N/
    shard-00000.safetensors   one a rank: pieces, each under "kind|parameter|first element" (of the flattened tensor)
                              or, where it is cut in other dimensions than the first, "kind|parameter|row,column"
    manifest.json             every shard with size and digest, what resumes, shapes, recipe, gear, versions

Kinds are `parameter`, `buffer` and what the optimizer keeps (`exp_avg`, ...). No pickle is written or read: a digest
is a guard against damage, and not the guard against code. This module knows files, not ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from gearbox.redact import redacted

FORMAT = 1
MANIFEST = "manifest.json"
SHARD = re.compile(r"shard-\d{5}\.safetensors")
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


class Staging:
    """A shard in the host's memory, in a buffer that is used again: laid out as the file, so it is written as it is."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.header = b""
        self.num_bytes = self.num_written = 0

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy the pieces in. Afterwards they may change."""
        ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())  # so that each is aligned
        self.num_bytes = sum(piece.tensor.nbytes for piece in ordered)
        if self.buffer.numel() < self.num_bytes:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # never two of them
            self.buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        entries, at = {}, 0
        for piece in ordered:
            tensor, end = piece.tensor, at + piece.tensor.nbytes
            self.buffer[at:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            entries[piece.key] = {
                "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end],
            }  # fmt: skip
            at = end
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text

    def write(self, path: Path) -> dict[str, Any]:
        """Write the shard and see it to the disk; returns its size and digest."""
        data = self.buffer.numpy()[: self.num_bytes]
        digest = xxhash.xxh3_128()
        self.num_written = 0
        with path.open("wb") as file:
            for part in (self.header, *(data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES))):
                digest.update(part)
                file.write(part)
                self.num_written += len(part)
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": len(self.header) + self.num_bytes, "xxh3_128": digest.hexdigest()}


def render_manifest(content: dict[str, Any]) -> str:
    """The content with its own digest, so that a changed byte of it is noticed too."""
    body = json.dumps(content, sort_keys=True, indent=1)
    digest = xxhash.xxh3_128(body.encode()).hexdigest()
    return json.dumps({"digest": digest, "manifest": content}, sort_keys=True, indent=1) + "\n"


def commit(aside: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Make a checkpoint of a folder whose shards are on the disk: the manifest, then one rename."""
    with (aside / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(render_manifest(redacted(manifest) | {"format": FORMAT}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(aside)
    if folder.exists():  # a damaged one of the same step, which was passed over
        remove(folder)
    aside.rename(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """See the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Delete a checkpoint. A kill on the way leaves a temporary folder, and not half a checkpoint."""
    aside = folder.with_name(f"{folder.name}.tmp-removed")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)  # what stays is swept


def sweep(parent: Path) -> None:
    """Delete what dead runs left half written. Only for whoever holds the run's lock."""
    for leftover in parent.glob("*.tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()


def prune(parent: Path, keep: int) -> None:
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
    for step, folder in steps(parent):
        if step not in kept and step < max(kept, default=0):
            remove(folder)


# --------------------------------------------------------------------------- reading


def steps(parent: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, whole or not, newest first."""
    found = [(STEP.fullmatch(path.name), path) for path in parent.glob("step-*")]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


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
