"""Represent the tensor shards of a rank, and read any part of any tensor in a checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from gearbox.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest
from gearbox.errors import one_line

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

NAMED_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
WEIGHT_DTYPES = [name for dtype, name in DTYPES.items() if dtype.is_floating_point]
KEY = re.compile(r"([^|]+)\|([^|]+)\|([0-9]{1,18}(?:,[0-9]{1,18}){0,15})")
MOMENTS = {"exp_avg", "exp_avg_sq"}  # torch's AdamW needs both, also for the weights that Muon leaves to it

Scalar = float | dict[str, float]
"""A number in the optimizer state. A tensor without dimensions is stored as {dtype: number}."""


FILE_DTYPES = DTYPES | {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
"""Names in files. Checkpoints have no tensors of 8-bit floats, but a published model may."""


def file_header(tensors: Mapping[str, torch.Tensor], **metadata: str) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file with these tensors, in this order, and where each starts in the file."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    starts, at = {}, 0
    for name, tensor in tensors.items():
        starts[name], dtype = at, FILE_DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at := at + tensor.nbytes]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def scalars_to_json(state: Mapping[str, object]) -> dict[str, Scalar]:
    """Return the numbers in the optimizer state of a tensor."""
    scalars: dict[str, Scalar] = {}
    for kind, value in state.items():
        if isinstance(value, torch.Tensor) and not value.dim():
            scalars[kind] = {str(value.dtype).removeprefix("torch."): value.item()}
        elif isinstance(value, int | float):
            scalars[kind] = value
    return scalars


def scalars_from_json(saved: Mapping[str, Scalar], device: torch.device) -> dict[str, float | torch.Tensor]:
    """Return saved numbers in the form that the optimizer uses. A fused step reads them on the weights' device."""
    state: dict[str, float | torch.Tensor] = {}
    for kind, value in saved.items():
        if isinstance(value, dict):
            ((dtype, number),) = value.items()
            state[kind] = torch.tensor(number, dtype=NAMED_DTYPES[dtype], device=device)
        else:
            state[kind] = value
    return state


@dataclass(frozen=True)
class TensorShard:
    """A rank's part of a tensor: a range of the flattened tensor, or a block (a rectangular part)."""

    kind: str
    name: str
    """Name of the parameter."""
    start: int | tuple[int, ...]
    """Index of the first element in the full flattened tensor, or a block's offset in each dimension."""
    tensor: torch.Tensor
    """The range ([n]) or the block. It is a view: writing to it changes the trained tensor."""

    @property
    def key(self) -> str:
        """The key of this shard in the checkpoint's files."""
        start = str(self.start) if isinstance(self.start, int) else ",".join(map(str, self.start))
        return f"{self.kind}|{self.name}|{start}"


class _SavedShard(NamedTuple):
    """The location of a saved shard. Shards sort by their offsets."""

    offsets: tuple[int, ...]
    """One number for a range of the flattened tensor, or one per dimension for a block."""
    file: str
    key: str
    shape: tuple[int, ...]


class ShardReader:
    """A reader for any part of any tensor in a verified checkpoint, whichever ranks wrote it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Open all files of a checkpoint. Raise CorruptCheckpoint if a file is not a shard or contradicts the others.

        This checks names, shapes and types. It reads no tensor.
        """
        self.folder = folder
        self.shapes: dict[str, list[int]] = manifest.parameters
        self.scalars: dict[str, dict[str, Scalar]] = manifest.scalars
        self._shards: dict[tuple[str, str], list[_SavedShard]] = defaultdict(list)
        self._kinds: dict[str, set[str]] = defaultdict(set)
        self._files: dict[str, Any] = {}
        for file in manifest.files:
            try:
                self._files[file] = safe_open(folder / file, framework="pt")
                for key in self._files[file].keys():  # noqa: SIM118  not a dict
                    self._add(file, key)
            except (SafetensorError, OSError, ValueError) as error:
                raise CorruptCheckpoint(f"{file}: is not a checkpoint shard: {one_line(error)}") from None
        for (kind, name), shards in self._shards.items():
            shards.sort()
            self._kinds[name].add(kind)
            if name in self.shapes and "@" not in kind:
                _check_whole(kind, name, self.shapes[name], shards)
        needs_moments = manifest.recipe.get("optim", {}).get("name") in ("adamw", "muon")
        for name in self.shapes:
            self._check_state(name, needs_moments)

    def _add(self, file: str, key: str) -> None:
        """Add a tensor of a file. Raise ValueError if it can be no part of a parameter."""
        found, saved = KEY.fullmatch(key), self._files[file].get_slice(key)
        if found is None:
            raise ValueError(f"{key[:200]!r} is not a key of the form kind|parameter|first")
        kind, name, start = found.groups()
        if kind != "buffer" and name not in self.shapes:
            raise ValueError(f"{key[:200]!r} belongs to no parameter of {MANIFEST}")
        if (dtype := saved.get_dtype()) not in (WEIGHT_DTYPES if kind == "parameter" else DTYPES.values()):
            raise ValueError(f"{key[:200]!r} has the type {dtype}")
        shard = _SavedShard(tuple(map(int, start.split(","))), file, key, tuple(saved.get_shape()))
        if len(shard.offsets) != len(shard.shape):
            raise ValueError(f"{key[:200]!r} has the shape {list(shard.shape)}")
        self._shards[kind, name].append(shard)

    def _check_state(self, name: str, needs_moments: bool) -> None:
        """Raise CorruptCheckpoint if a parameter lacks its weights, or a number or tensor that its optimizer needs."""
        kinds, numbers = self._kinds[name], self.scalars.get(name, {})
        if "parameter" not in kinds and 0 not in self.shapes[name]:
            raise CorruptCheckpoint(f"parameter of {name}: no shard contains it")
        if odd := sorted({*numbers} & kinds):
            raise CorruptCheckpoint(f"{odd[0]} of {name}: is both a number and a tensor")
        if lost := sorted((MOMENTS | {"step"}) - kinds - {*numbers}) if needs_moments and kinds & MOMENTS else []:
            raise CorruptCheckpoint(f"{lost[0]} of {name}: is missing; the optimizer needs it")
        for kind, number in numbers.items():
            if isinstance(number, dict) and not {*number} <= {*NAMED_DTYPES}:
                raise CorruptCheckpoint(f"{kind} of {name}: has the unknown type {next(iter(number))[:200]}")

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of tensors saved for a parameter, other than the parameter itself."""
        return sorted(self._kinds[name] - {"parameter"})

    def read_shard(self, shard: TensorShard) -> torch.Tensor:
        """Return the saved values of a shard, in its shape, on the CPU. The saved sharding may differ."""
        if isinstance(shard.start, int):
            return self.read(shard.kind, shard.name, shard.start, shard.tensor.numel())
        rows, *inner = zip(shard.start, shard.tensor.shape, strict=True)  # (offset, size) of each dimension
        row_shape = self.shapes[shard.name][1:]
        row_numel = math.prod(row_shape)
        full_rows = self.read(shard.kind, shard.name, rows[0] * row_numel, rows[1] * row_numel).view(-1, *row_shape)
        return full_rows[(slice(None), *(slice(offset, offset + size) for offset, size in inner))]

    def read(self, kind: str, name: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return elements [start, start + numel) of a flattened tensor, or all elements: [numel] on the CPU.

        Raise CorruptCheckpoint if any of these elements is missing.
        """
        shards = self._shards[kind, name]
        if shards and len(shards[0].offsets) > 1:
            return self._read_blocks(kind, name, start, numel)
        end = math.inf if numel is None else start + numel
        parts, reached = [], start
        for (first,), file, key, (length,) in shards:
            saved, last = self._files[file].get_slice(key), first + length
            if last > reached and first < end:
                if first > reached:
                    break
                parts.append(saved[reached - first : int(min(end, last)) - first])
                reached = int(min(end, last))
        if not parts or (numel is not None and reached != end):
            raise CorruptCheckpoint(f"{kind} of {name}: no shard contains elements {reached:,} to {end:,}")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_blocks(self, kind: str, name: str, start: int, numel: int | None) -> torch.Tensor:
        """Read a range of a tensor that was saved in blocks, by assembling the rows that contain it."""
        full_rows, *row_shape = self.shapes[name]
        row_numel = math.prod(row_shape)
        end = full_rows * row_numel if numel is None else start + numel
        first, last = start // row_numel, -(-end // row_numel)
        rows, filled = None, torch.zeros(last - first, *row_shape, dtype=torch.bool)
        for (row, *offsets), file, key, (num_rows, *_) in self._shards[kind, name]:
            top, bottom = max(first, row), min(last, row + num_rows)
            if top < bottom:
                block = self._files[file].get_slice(key)[top - row : bottom - row]
                rows = torch.empty(last - first, *row_shape, dtype=block.dtype) if rows is None else rows
                columns = (slice(at, at + size) for at, size in zip(offsets, block.shape[1:], strict=True))
                place = (slice(top - first, bottom - first), *columns)
                rows[place], filled[place] = block, True
        if rows is None or not filled.all():
            raise CorruptCheckpoint(f"{kind} of {name}: no shard contains some of the elements {start:,} to {end:,}")
        return rows.view(-1)[start - first * row_numel : end - first * row_numel]


def _check_whole(kind: str, name: str, shape: list[int], shards: list[_SavedShard]) -> None:
    """Raise CorruptCheckpoint unless the sorted shards of a tensor fill it, and no shard is outside of it."""
    is_flat = len(shards[0].offsets) == 1
    full = [math.prod(shape)] if is_flat else shape
    for shard in shards:
        ends = [start + length for start, length in zip(shard.offsets, shard.shape, strict=True)]
        if len(ends) != len(full) or any(end > most for end, most in zip(ends, full, strict=True)):
            raise CorruptCheckpoint(f"{shard.file}: {shard.key[:200]} is outside of the shape {shape}")
    if sum(math.prod(shard.shape) for shard in shards) != math.prod(full):
        raise CorruptCheckpoint(f"{kind} of {name}: its shards do not have the {math.prod(full):,} elements of {shape}")
    reached = 0
    for shard in shards if is_flat else ():
        if shard.offsets[0] != reached:
            raise CorruptCheckpoint(f"{kind} of {name}: its shards overlap at element {shard.offsets[0]:,}")
        reached += shard.shape[0]
