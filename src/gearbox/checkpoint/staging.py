"""Stage a rank's shard in host memory or on a local disk, so that training continues while it is written."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from gearbox import filesystem, processes
from gearbox.checkpoint.disk_space import HOST_MEMORY
from gearbox.checkpoint.manifest import CorruptCheckpoint, ShardFacts
from gearbox.checkpoint.shards import TensorShard, file_header
from gearbox.filesystem import CHUNK_BYTES

PART_BYTES = 64 * 2**20
"""Size of a pinned buffer. torch rounds pinned memory up to a power of two, so a large buffer would waste much."""


class HostReader:
    """A reader of tensors in parts that are in host memory.

    Tensors of another device pass through two small pinned buffers: while one is filled, the other is read.
    """

    def __init__(self) -> None:
        """Create a reader without buffers."""
        self._buffers: dict[torch.device, list[torch.Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Allocate what reading these tensors needs. Call it in the thread that chose the device."""
        for device in {tensor.device for tensor in tensors if not is_on_host(tensor)} - self._buffers.keys():
            pin = device.type != "cpu"
            self._streams[device] = torch.get_device_module(device).Stream()
            self._buffers[device] = [torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]

    def parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bytes of a tensor in order. A part is valid until the next one."""
        parts = torch.split(tensor.detach().reshape(-1).view(torch.uint8), PART_BYTES)
        if is_on_host(tensor):
            yield from parts
            return
        module, stream = torch.get_device_module(tensor.device), self._streams[tensor.device]
        stream.wait_stream(module.current_stream(tensor.device))  # the tensor may not be computed yet
        started: deque[tuple[torch.Tensor, Any]] = deque()
        for part, buffer in zip(parts, itertools.cycle(self._buffers[tensor.device])):
            held = buffer[: len(part)]
            started.append((held, self._start_copy(held, part)))
            if len(started) == 2:
                yield _when_done(*started.popleft())
        while started:
            yield _when_done(*started.popleft())

    def _start_copy(self, held: torch.Tensor, part: torch.Tensor) -> Any:  # noqa: ANN401  each device has its class
        """Copy a part to a buffer without waiting for it. Return an event to wait for."""
        module, stream = torch.get_device_module(part.device), self._streams[part.device]
        with module.stream(stream):
            held.copy_(part, non_blocking=True)
        event = module.Event()
        event.record(stream)
        return event


def _when_done(held: torch.Tensor, event: Any) -> torch.Tensor:  # noqa: ANN401  each device has its class
    """Wait for a copy and return it."""
    event.synchronize()
    return held


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is in host memory."""
    return tensor.device.type == "cpu"


def allocate(num_bytes: int) -> torch.Tensor:
    """Return host memory. Raise OSError if it is not free, because the system would end a process to make room."""
    with suppress(MemoryError, RuntimeError):  # torch raises RuntimeError
        if num_bytes <= processes.free_memory():
            return torch.empty(num_bytes, dtype=torch.uint8)
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), HOST_MEMORY)


class Staging:
    """A shard in its file layout: in a reusable buffer in host memory, or on a local disk; or only its tensors.

    The file on the local disk has no name and disappears with the process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Stage to a folder on a local disk, or to memory. Raise OSError if the folder is not writable."""
        self.in_foreground = False
        """True if nothing is copied: the tensors must not change until they are written."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.header = b""
        self.num_bytes = self.num_written = 0
        self.disk: IO[bytes] | None = None
        self.digest = ""
        """Digest of the bytes written to the local disk."""
        self._reader = HostReader()
        self._tensors: list[torch.Tensor] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.disk = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  open until the run ends

    def stage(self, shards: Iterable[TensorShard]) -> None:
        """Copy the tensors, which may change afterwards. Raise OSError if memory is short or a local disk is full."""
        ordered = sorted(shards, key=lambda shard: -shard.tensor.element_size())  # so that each tensor is aligned
        self.num_bytes = sum(shard.tensor.nbytes for shard in ordered)
        self.header, _ = file_header({shard.key: shard.tensor for shard in ordered})
        self._tensors = [shard.tensor for shard in ordered]
        self._reader.prepare(self._tensors)
        if self.in_foreground:
            return
        if self.disk is None:
            self._to_memory()
        else:
            self._to_disk(self.disk)
        self._tensors = []

    def stay_in_foreground(self) -> None:
        """Copy nothing from now on, and free the buffer."""
        self.in_foreground = True
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def _parts(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of all tensors in order."""
        for tensor in self._tensors:
            yield from self._reader.parts(tensor)

    def _to_memory(self) -> None:
        if self.buffer.numel() < self.num_bytes:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating a larger one
            self.buffer = allocate(self.num_bytes)
        at = 0
        for part in self._parts():
            self.buffer[at : at + len(part)].copy_(part)
            at += len(part)

    def _to_disk(self, disk: IO[bytes]) -> None:
        digest = xxhash.xxh3_128()

        def append(part: memoryview) -> None:
            digest.update(part)
            while part:
                part = part[disk.write(part) :]

        disk.truncate(0)
        disk.seek(0)
        append(memoryview(self.header))
        for part in self._parts():
            append(part.numpy().data)
        self.digest = digest.hexdigest()

    def _file_content(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the file in order."""
        if self.disk is not None:
            self.disk.seek(0)
            while part := self.disk.read(CHUNK_BYTES):
                yield part
            return
        yield self.header
        if self.in_foreground:
            yield from (part.numpy().data for part in self._parts())
            return
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
        """Free the space on the local disk, and forget the tensors. Keep the memory buffer for the next save."""
        self._tensors = []
        if self.disk is not None:
            self.disk.truncate(0)
