"""What a file system can do, and how to write where it can do less than a disk: NFS, FUSE, object stores."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TypeVar
from uuid import uuid4

import xxhash

Result = TypeVar("Result")
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The file system has no such operation.
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ENOLCK}
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO, errno.EAGAIN}
RETRY_SECONDS = (1, 2, 4, 8, 16, 32)  # between attempts, in a thread that nobody waits for
SEEN_SECONDS = 75.0  # NFS and the mounts of object stores cache what they know of a name, for 60 s by default
LOOK_SECONDS = 0.5
CHUNK_BYTES = 16 * 2**20  # written, hashed or read at once


def rename_problem(folder: Path) -> str:
    """Return why renaming a folder in this one is not atomic, or an empty string if it is.

    The probe is a folder with a file in it: an empty one can be renamed in object stores too. Some of them copy a
    renamed folder file by file, without an error; so renames of every FUSE mount count as not atomic. Raise OSError
    where nothing can be written.
    """
    probe = folder / f"probe.tmp-{uuid4().hex[:8]}"
    renamed = probe.with_name(f"{probe.name}-renamed")
    try:
        probe.mkdir(parents=True)
        (probe / "file").write_bytes(b"x")
        try:
            probe.rename(renamed)
            (renamed / "file").read_bytes()
        except OSError as error:
            return f"here a folder cannot be renamed: {error.strerror}"
    finally:
        for leftover in (probe, renamed):
            shutil.rmtree(leftover, ignore_errors=True)
    kind = file_system(folder)
    return f"{kind} may rename a folder file by file" if kind == "fuse" or kind.startswith("fuse.") else ""


def file_system(path: Path) -> str:
    """Return the type of a path's file system, such as nfs4 or fuse.s3fs; empty where Linux does not say."""
    resolved, kind, longest = path.resolve(), "", -1
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
            if resolved.is_relative_to(point) and len(point.parts) >= longest:  # the last one is on top
                kind, longest = after.split()[0], len(point.parts)
    return kind


def sync(file: IO[bytes] | IO[str]) -> None:
    """Write a file to the disk (fsync). Where there is no fsync, closing the file has to do."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the file system has fsync for folders."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def retry_transient(work: Callable[[], Result]) -> Result:
    """Retry for a minute while the storage is out of reach. Raise OSError where it stays so."""
    for seconds in RETRY_SECONDS:
        try:
            return work()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
        time.sleep(seconds)
    return work()


def wait_for_size(path: Path, num_bytes: int, seconds: float) -> bool:
    """Return whether a file of that size, which another machine wrote, is here or appears in time."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError), path.open("rb") as file:  # opened: that is when NFS asks its server
            if os.fstat(file.fileno()).st_size == num_bytes:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS)


def wait_for_path(path: Path, seconds: float) -> bool:
    """Return whether this machine sees, now or in time, what another one may have made just now."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def atomic_write(path: Path, text: str) -> None:
    """Replace a small file by a rename. Where that is refused, write it in place: a kill may then truncate it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(aside, text)
        try:
            aside.replace(path)
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EIO}:
                raise
            _write(path, text)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


@contextmanager
def atomic_folder(folder: Path, aside: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes this one in one step: `aside` is filled and renamed.

    Where a folder cannot be renamed, one on the machine's own disk (TMPDIR) is filled and then copied. Mounted object
    stores may only take files that are written from the first byte to the last, and safetensors writes otherwise.
    """
    if not rename_problem(folder.parent):
        shutil.rmtree(aside, ignore_errors=True)
        yield aside
        aside.rename(folder)
        return
    with TemporaryDirectory() as made:
        yield Path(made)
        folder.mkdir()
        for path in sorted(Path(made).rglob("*")):
            copy = folder / path.relative_to(made)
            copy.mkdir() if path.is_dir() else shutil.copyfile(path, copy)


class Lock:
    """A file that one process holds until it releases it, or ends.

    It excludes the processes that share its flock(2): on all machines with NFS (version 4, or 3 with lockd), CephFS and
    Lustre (mounted with flock), only on this machine with most FUSE mounts.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        """Try to take it for that many seconds."""
        self.is_taken = False
        """Whether another process holds it."""
        self.problem = ""
        """Why no process can hold it; empty where one can."""
        self._handle = -1
        deadline = time.monotonic() + seconds
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            while self._is_taken():
                if time.monotonic() >= deadline:
                    self.is_taken = True
                    break
                time.sleep(LOOK_SECONDS / 10)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.problem = error.strerror or ""
        if self.is_taken or self.problem:
            self.release()

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return True
        return False

    def release(self) -> None:
        """Let other processes take it; do nothing where it is not held."""
        if self._handle >= 0:
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # a forked child may have the handle too
            os.close(self._handle)
            self._handle = -1


def digest_of(path: Path) -> str:
    """Return the xxh3-128 digest of a file's content, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
