"""Probe what a file system can do, and write safely on NFS, FUSE mounts and object stores."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeVar
from uuid import uuid4

import xxhash

Result = TypeVar("Result")
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Errors of file systems that lack an operation.
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ENOLCK}
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO, errno.EAGAIN}
RETRY_SECONDS = (1, 2, 4, 8, 16, 32)  # between attempts, in a background thread
SEEN_SECONDS = 75.0  # NFS and mounted object stores cache names for 60 s by default
LOOK_SECONDS = 0.5
MAX_JSON_BYTES = 64 * 2**20
CHUNK_BYTES = 16 * 2**20  # read, hashed or written at once
MAX_SMALL_BYTES = 2**18  # of a file that people may edit, such as status.json


def rename_problem(folder: Path) -> str:
    """Return the reason why renaming a folder in `folder` is not atomic, or an empty string if it is atomic.

    The probe is a folder that contains a file, because object stores can rename empty folders too. Some stores copy a
    renamed folder file by file, without an error, so no FUSE mount counts as atomic. Raise OSError if the folder is
    not writable.
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
            return f"folders cannot be renamed here: {error.strerror}"
    finally:
        for leftover in (probe, renamed):
            shutil.rmtree(leftover, ignore_errors=True)
    return f"{file_system(folder)} may rename a folder file by file" if is_fuse(folder) else ""


def is_fuse(path: Path) -> bool:
    """Return True on a FUSE mount, as mounted buckets are."""
    kind = file_system(path)
    return kind == "fuse" or kind.startswith("fuse.")


def file_system(path: Path) -> str:
    """Return the type of a path's file system, such as nfs4 or fuse.s3fs, or an empty string if it is unknown."""
    resolved, kind, longest = path.resolve(), "", -1
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
            if resolved.is_relative_to(point) and len(point.parts) >= longest:  # the last mount covers earlier ones
                kind, longest = after.split()[0], len(point.parts)
    return kind


def _fsync(handle: int) -> None:
    """Flush an open file or folder to disk. File systems without fsync rely on closing the file."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk. The name of `path` itself is in the folder above it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    except PermissionError:  # the folder of another user, who has made it long ago
        return
    try:
        _fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush everything in a folder to disk: files first, then the folders that name them."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def sync_names(path: Path) -> None:
    """Flush the name of a path, and of each folder above it on its file system, to disk."""
    path = path.resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
        sync(path)


def make_folder(folder: Path) -> None:
    """Create a folder, and the missing folders above it, whose names survive a power cut."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    for one in reversed(missing):
        one.mkdir(exist_ok=True)  # other ranks may create it too
        sync(one.parent)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder whose content is on disk. The new name survives a power cut."""
    old.replace(new)
    sync(new.parent)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield an empty file to write; its content is on disk afterwards."""
    with path.open("wb") as file:
        yield file
        file.flush()
        _fsync(file.fileno())


def write(path: Path, content: str | bytes) -> None:
    """Write a file in place and flush it to disk. A kill or a power cut may truncate it."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def retry_transient(work: Callable[[], Result]) -> Result:
    """Call `work`, and retry for a minute while the storage is unreachable. Raise OSError after that."""
    for seconds in RETRY_SECONDS:
        try:
            return work()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
        time.sleep(seconds)
    return work()


def open_regular(path: Path, follows_links: bool = True) -> IO[bytes]:
    """Open a file to read it. Raise OSError for a folder, a pipe or a device: reading might never return."""
    status = path.stat() if follows_links else path.lstat()
    if stat.S_ISREG(status.st_mode):
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return os.fdopen(handle, "rb")
        os.close(handle)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file that anyone may have written. Raise OSError if it is not regular, or too large."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return content


def wait_for_size(path: Path, num_bytes: int, seconds: float) -> bool:
    """Return whether a file that another machine writes appears with this size in time."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError), path.open("rb") as file:  # opening makes NFS ask its server
            if os.fstat(file.fileno()).st_size == num_bytes:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS)


def wait_for_path(path: Path, seconds: float) -> bool:
    """Return whether a path that another machine may have just created appears in time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file. Raise ValueError with a text that names the file."""
    try:
        raw = read_limited(path, max_bytes)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        content = json.loads(raw.decode())  # from bytes it would also read UTF-16 and a BOM, as transformers does not
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        text = " ".join(str(error).split())[:100]
        raise ValueError(f"{path} is not valid JSON: {text}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object, but {type(content).__name__}")
    return content


def append(path: Path, content: bytes) -> None:
    """Append the complete content or nothing, without flushing it to disk. Recreate the folder if it was removed."""
    make_folder(path.parent)
    with path.open("ab", buffering=0) as file:
        before, left = file.tell(), content
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(before)
            raise


def aside_of(path: Path, kind: str = "tmp") -> Path:
    """Return a new name in the same folder, for content that is renamed when it is complete."""
    return path.with_name(f"{path.name}.{kind}-{uuid4().hex[:8]}")


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace a small file by a rename. If renames fail, write it in place."""
    aside = aside_of(path)
    try:
        write(aside, content)
        try:
            rename(aside, path)
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EIO}:
                raise
            write(path, content)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which then becomes `folder` in one step: it is flushed to disk and renamed.

    If folders cannot be renamed, yield one on the local disk (TMPDIR) and copy it afterwards. Mounted object stores may
    accept only sequential writes, and safetensors does not write sequentially. Raise OSError if `folder` exists.
    """
    if rename_problem(folder.parent):
        with TemporaryDirectory() as made:
            yield Path(made)
            shutil.copytree(made, folder, copy_function=shutil.copyfile)
        sync_tree(folder)
        sync(folder.parent)
        return
    aside = aside_of(folder)
    aside.mkdir()
    try:
        yield aside
        sync_tree(aside)
        rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder with its content, as far as that is possible. Flush it to disk."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)
        sync(path.parent)


class Lock:
    """A lock file that one process holds, or several if it is shared, until they release the lock or end.

    The lock uses flock(2). It works across machines on NFS (version 4, or 3 with lockd), CephFS and Lustre (mounted
    with flock). On most FUSE mounts it works only within one machine.
    """

    def __init__(self, path: Path, seconds: float, shared: bool = False) -> None:
        """Try to take the lock for this many seconds."""
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self.is_taken = False
        """True if another process holds the lock."""
        self.problem = ""
        """The reason why the file system cannot lock; empty if it can."""
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
            fcntl.flock(self._handle, self._kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return True
        return False

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._handle >= 0:
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # a forked child may share the handle
            os.close(self._handle)
            self._handle = -1


def digest_of(path: Path) -> str:
    """Return the hexadecimal xxh3-128 digest of a file's content."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
