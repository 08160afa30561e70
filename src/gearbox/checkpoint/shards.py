"""The tensors of a checkpoint: shards as ranks hold them, and a reader for any part of any tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gearbox.checkpoint.manifest import CorruptCheckpoint

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class TensorShard:
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


class ShardReader:
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
                raise CorruptCheckpoint(f"{name}: is no shard of a checkpoint: {error}") from None
        for pieces in self._pieces.values():
            pieces.sort()

    def kinds(self, name: str) -> list[str]:
        """Of what is kept for a parameter, itself excepted."""
        return sorted(kind for kind, parameter in self._pieces if parameter == name and kind != "parameter")

    def names(self, kind: str) -> set[str]:
        return {parameter for found, parameter in self._pieces if found == kind}

    def read_shard(self, piece: TensorShard) -> torch.Tensor:
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
            raise CorruptCheckpoint(f"{kind} of {name}: elements {reached:,} to {end:,} are in no shard")
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
            raise CorruptCheckpoint(f"{kind} of {name}: some of the elements {start:,} to {end:,} are in no shard")
        return rows.view(-1)[start - first * width : end - first * width]
