"""Stage a rank's shard in host memory or on a local disk, so that training continues while it is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import torch
import xxhash

from gearbox import filesystem
from gearbox.checkpoint.manifest import CorruptCheckpoint, ShardFacts
from gearbox.checkpoint.shards import DTYPES, TensorShard
from gearbox.filesystem import CHUNK_BYTES


class Staging:
    """A shard in its file layout: in a reusable buffer in host memory, or on a local disk.

    The file on the local disk has no name and disappears with the process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Stage to a folder on a local disk, or to memory. Raise OSError if the folder is not writable."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.header = b""
        self.num_bytes = self.num_written = 0
        self.disk: IO[bytes] | None = None
        self.digest = ""
        """Digest of the bytes written to the local disk."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.disk = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  open until the run ends

    def stage(self, shards: Iterable[TensorShard]) -> None:
        """Copy the tensors, which may change afterwards. Raise OSError if a local disk is full."""
        ordered = sorted(shards, key=lambda shard: -shard.tensor.element_size())  # so that each tensor is aligned
        self.num_bytes = sum(shard.tensor.nbytes for shard in ordered)
        entries, at = {}, 0
        for shard in ordered:
            end = at + shard.tensor.nbytes
            dtype, shape = DTYPES[shard.tensor.dtype], list(shard.tensor.shape)
            entries[shard.key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        size = self.num_bytes if self.disk is None else min(CHUNK_BYTES, self.num_bytes)
        if self.buffer.numel() < size:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating a larger one
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        if self.disk is None:
            self._to_memory(ordered)
        else:
            self._to_disk(self.disk, ordered)

    def _to_memory(self, ordered: list[TensorShard]) -> None:
        at = 0
        for shard in ordered:
            tensor, end = shard.tensor, at + shard.tensor.nbytes
            self.buffer[at:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            at = end
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _to_disk(self, disk: IO[bytes], ordered: list[TensorShard]) -> None:
        """Copy chunk by chunk through a small buffer."""
        digest = xxhash.xxh3_128()

        def append(part: memoryview) -> None:
            digest.update(part)
            while part:
                part = part[disk.write(part) :]

        self.release()
        disk.seek(0)
        append(memoryview(self.header))
        for shard in ordered:
            flat = shard.tensor.reshape(-1)
            for chunk in torch.split(flat, max(1, CHUNK_BYTES // flat.element_size())):
                held = self.buffer[: chunk.nbytes]
                held.view(chunk.dtype).copy_(chunk)
                append(held.numpy().data)
        self.digest = digest.hexdigest()

    def _file_content(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the file in order."""
        if self.disk is not None:
            self.disk.seek(0)
            while part := self.disk.read(CHUNK_BYTES):
                yield part
            return
        yield self.header
        data = self.buffer.numpy().data[: self.num_bytes]
        yield from (data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES))

    def write(self, path: Path) -> ShardFacts:
        """Write the file sequentially and sync it. Return its size and digest."""
        digest = xxhash.xxh3_128()
        self.num_written = 0
        with filesystem.new_file(path) as file:
            for part in self._file_content():
                digest.update(part)
                file.write(part)
                self.num_written += len(part)
        size = len(self.header) + self.num_bytes
        if self.disk is not None and (digest.hexdigest(), self.num_written) != (self.digest, size):
            raise CorruptCheckpoint("save.stage: data read from the local disk differs from the data written")
        return {"bytes": size, "xxh3_128": digest.hexdigest()}

    def release(self) -> None:
        """Free the space on the local disk. Keep the memory buffer for the next save."""
        if self.disk is not None:
            self.disk.truncate(0)
