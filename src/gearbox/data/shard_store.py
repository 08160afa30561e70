"""Fetch folders of files from a URL to this machine's cache ahead of their use, and verify them.

A folder in the cache is complete. A process that reads it holds a shared lock on `NAME.lock`, and only folders without
a reader are evicted. The first rank of a machine fetches, in a thread. Folders on a file system are read where they
are.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import xxhash

from gearbox import filesystem, processes
from gearbox.config.loader import is_url
from gearbox.errors import UserError, one_line_with_type

HTTP_SECONDS = 60  # without a byte
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 30.0
LOOK_SECONDS = 0.05
ROOM_SECONDS = 1.0  # between two looks for room, unless other folders are wanted meanwhile
GIVES_UP_AFTER = 0.5  # of the hang timeout
TRANSIENT_CODES = (408, 425, 429)  # and all from 500


class Facts(Protocol):
    """The size and digest of a file."""

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def xxh3_128(self) -> str:
        """Digest of the content."""
        ...


class Damaged(Exception):
    """A file that differs from what the index lists; the message names the file and the problem."""


def read_file(location: str, max_bytes: int, seconds: float, tell: Callable[[str], None]) -> bytes:
    """Return the content of a small file. Raise UserError if it cannot be read."""

    def read() -> bytes:
        with _opened(location) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise UserError(f"data.path: {location}: has more than {max_bytes:,} bytes")
        return content

    return _persist(read, location, seconds, tell)


@contextmanager
def _opened(location: str) -> Iterator[IO[bytes]]:
    """Open a file or a URL to read it."""
    if not is_url(location):
        with filesystem.open_regular(Path(location)) as file:
            yield file
    elif location.startswith(("http://", "https://")):
        with urllib.request.urlopen(location, timeout=HTTP_SECONDS) as answer:
            yield answer
    else:
        import fsspec

        with fsspec.open(location, "rb") as file:
            yield file


def _persist(work: Callable[[], bytes], location: str, seconds: float, tell: Callable[[str], None]) -> bytes:
    """Call `work`, and retry for so many seconds while the network fails. Raise UserError after that."""
    deadline, pause = time.monotonic() + seconds, FIRST_RETRY_SECONDS
    while True:
        try:
            return work()
        except (UserError, Damaged):
            raise
        except (ImportError, ValueError) as error:  # a scheme that fsspec has no package for, or does not know
            raise UserError(f"data.path: {location}: {one_line_with_type(error)}") from None
        except Exception as error:  # each file system of fsspec has its own types
            problem = one_line_with_type(error)
            if not _is_transient(error) or time.monotonic() + pause > deadline:
                raise UserError(f"data.path: {location}: cannot be read: {problem}") from None
        tell(f"WARNING: {location}: {problem}; trying again in {pause:.1f} s")
        time.sleep(pause)
        pause = min(2 * pause, LAST_RETRY_SECONDS)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in TRANSIENT_CODES
    lasting = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, TypeError, AttributeError)
    return isinstance(error, http.client.HTTPException) or not isinstance(error, lasting)


@dataclass
class ShardStore:
    """The folders that an index lists: on a file system, or at a URL and in the cache."""

    location: str
    cache: Path
    """The folder for these shards in the cache. The folder above it has those of all indexes."""
    folders: Mapping[str, Mapping[str, Facts]]
    """The files of each folder."""
    limit: int | None
    """The most bytes that all folders in the cache may have."""
    is_fetcher: bool
    seconds: float
    """Seconds after which a folder that is not there is an error."""
    tell: Callable[[str], None]
    _locks: dict[str, filesystem.Lock] = field(default_factory=dict)
    _wanted: list[str] = field(default_factory=list)
    _problem: Exception | None = None
    _is_full: bool = False
    """True if there was no room for the last folder that was to be fetched."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _fetching: threading.Thread | None = None

    @property
    def is_remote(self) -> bool:
        """True if folders are fetched to the cache."""
        return is_url(self.location)

    def want(self, names: Sequence[str]) -> None:
        """Fetch these folders in order, in a thread, as far as there is room."""
        if not self.is_remote or not self.is_fetcher:
            return
        with self._changed:
            self._wanted = list(names)
            self._changed.notify()
            if self._fetching is None:
                self._fetching = threading.Thread(target=self._fetch_wanted, name="shards", daemon=True)
                self._fetching.start()

    def open(self, name: str) -> Path:
        """Return a folder that stays until it is closed. Wait until it is fetched. Raise UserError if it cannot be."""
        if not self.is_remote:
            folder = Path(self.location, name)
            self._verify(folder, name)
            return folder
        if name not in self._wanted:
            self.want([name, *self._wanted])
        folder, launcher, since = self._place(name), os.getppid(), time.monotonic()
        filesystem.make_folder(self.cache)
        while True:
            lock = filesystem.Lock(self._lock_path(name), 0, shared=True)
            if not lock.is_taken and self._is_whole(name):
                self._locks[name] = lock
                os.utime(folder)
                return folder
            lock.release()
            if self._problem is not None:
                raise self._problem
            processes.check_launcher(launcher, folder)
            if time.monotonic() - since > self.seconds:
                full = "; the cache is full of shards that other runs read; raise data.cache_gb" * self._is_full
                raise UserError(f"data.path: {self.location}/{name}: was not fetched within {self.seconds:.0f} s{full}")
            time.sleep(LOOK_SECONDS)

    def close(self, name: str) -> None:
        """Let a folder be evicted."""
        if lock := self._locks.pop(name, None):
            lock.release()

    def _place(self, name: str) -> Path:
        return self.cache / name.replace("/", "-")

    def _is_whole(self, name: str) -> bool:
        """Return whether the cache has all files of a folder. A process may have been killed while it evicted them."""
        place = self._place(name)
        try:
            return all((place / file).stat().st_size == facts.bytes for file, facts in self.folders[name].items())
        except OSError:
            return False

    def _lock_path(self, name: str) -> Path:
        path = self._place(name)
        return path.with_name(f"{path.name}.lock")

    def _verify(self, folder: Path, name: str) -> None:
        """Raise UserError unless the files of a folder are those that the index lists."""
        for file, facts in self.folders[name].items():
            path = folder / file
            try:
                digest = partial(filesystem.digest_of, path)
                if path.stat().st_size == facts.bytes and filesystem.retry_transient(digest) == facts.xxh3_128:
                    continue
                problem = "is damaged or was changed"
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
            raise UserError(f"data.path: {path}: {problem}; restore it, or prepare the data again") from None

    def _fetch_wanted(self) -> None:
        """Fetch what is wanted, forever. A problem ends it, and is raised by `open`."""
        try:
            while True:
                with self._changed:
                    wanted = list(self._wanted)
                missing = [name for name in wanted if not self._is_whole(name)]
                if missing:
                    self._is_full = not self._fetch(missing[0], wanted[: wanted.index(missing[0])])
                if not missing or self._is_full:
                    with self._changed:
                        self._changed.wait(ROOM_SECONDS)
        except Exception as error:
            self._problem = error

    def _fetch(self, name: str, earlier: list[str]) -> bool:
        """Fetch a folder. Return False if the cache has no room for it now."""
        filesystem.make_folder(self.cache)
        lock = filesystem.Lock(self.cache.parent / "fetching.lock", self.seconds)
        try:
            if lock.is_taken:
                return False
            place = self._place(name)
            aside = place.with_name(f"{place.name}.partial")
            filesystem.remove(aside)  # by a process that was killed
            if not self._is_whole(name):
                filesystem.remove(place)
                if not self._make_room(sum(facts.bytes for facts in self.folders[name].values()), earlier):
                    return False
                aside.mkdir()
                try:
                    for file, facts in self.folders[name].items():
                        self._fetch_file(f"{self.location}/{name}/{file}", aside / file, facts)
                    filesystem.rename(aside, place)
                finally:
                    filesystem.remove(aside)
            return True
        except OSError as error:
            raise UserError(f"{self.cache}: cannot be written ({error.strerror}); set HF_DATASETS_CACHE") from None
        finally:
            lock.release()

    def _fetch_file(self, url: str, path: Path, facts: Facts) -> None:
        """Fetch a file, once more if it is damaged. Raise UserError if it still is."""

        def fetch() -> bytes:
            digest, num_bytes = xxhash.xxh3_128(), 0
            with _opened(url) as source, filesystem.new_file(path) as target:
                while num_bytes <= facts.bytes and (block := source.read(filesystem.CHUNK_BYTES)):
                    digest.update(block)
                    num_bytes += len(block)
                    target.write(block)
            if num_bytes < facts.bytes:
                raise http.client.IncompleteRead(b"", facts.bytes - num_bytes)
            if num_bytes > facts.bytes or digest.hexdigest() != facts.xxh3_128:
                raise Damaged(f"{url}: is damaged or was changed")
            return b""

        for is_last in (False, True):
            try:
                _persist(fetch, url, self.seconds * GIVES_UP_AFTER, self.tell)
                return
            except Damaged as error:
                if is_last:
                    raise UserError(f"data.path: {error}; restore it, or prepare the data again") from None
                self.tell(f"WARNING: {error}; fetching it again")

    def _make_room(self, num_bytes: int, earlier: list[str]) -> bool:
        """Evict folders that nobody reads until this fits: those not wanted, then those wanted later.

        `earlier` are the folders that are wanted more. Of folders not wanted, the least recently used goes first.
        """
        if self.limit is None:
            return True
        kept, wanted = ({self._place(name) for name in names} for names in (earlier, self._wanted))
        sizes = {path: _size(path) for path in self.cache.parent.glob("*/*") if path.suffix != ".lock"}
        used = sum(sizes.values())
        for path in sorted(sizes, key=lambda path: (path in wanted, path.stat().st_mtime)):
            if used + num_bytes <= self.limit:
                break
            if path in kept:
                continue
            lock = filesystem.Lock(path.with_name(f"{path.name.removesuffix('.partial')}.lock"), 0)
            if not (lock.is_taken or lock.problem):
                filesystem.remove(path)
                used -= sizes[path]
            lock.release()
        return used + num_bytes <= self.limit


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
