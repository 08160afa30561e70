"""Mount a folder as a bucket: a FUSE file system, without a library, that behaves like an object store.

    python tests/support/bucket.py FOLDER MOUNTPOINT '{"refuses": ["rename"], ...}'

`Behaviour` sets what it refuses, and when it fails or kills its caller. It needs root and /dev/fuse.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

OPCODES = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 14: "open",
    15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush", 26: "init", 27: "opendir",
    28: "readdir", 29: "releasedir", 30: "fsyncdir", 31: "lock", 32: "lock", 33: "lock", 35: "create",
}  # fmt: skip
HEADER = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, user, group, process, ...
MAX_WRITE = 2**20
ATOMIC_O_TRUNC, BIG_WRITES, FLOCK_LOCKS, MAX_PAGES = 1 << 3, 1 << 5, 1 << 10, 1 << 22
MNT_DETACH = 2


@dataclass
class Behaviour:
    """Differences from a disk. Operations have the names of OPCODES; `append` and `seek` are two more."""

    refuses: dict[str, int] = field(default_factory=dict)
    """Operations that always fail, with their error number."""
    kind: str = "bucket"
    """The file system type in /proc/mounts is `fuse.KIND`, or `fuse` if this is empty."""
    lag: float = 0.0
    """Seconds until a name that was created elsewhere becomes visible in this mount."""
    fails: list = field(default_factory=list)
    """A list of [operation, path pattern, error number, count]: fail that many matching operations."""
    kills: list = field(default_factory=list)
    """A list of [operation, path pattern]: kill the caller there. A write is half done by then."""
    kills_in_turn: bool = False
    """Whether to kill the n-th process that changes something at its n-th change."""


LIKE_S3 = {
    "rename": errno.ENOSYS, "append": errno.EPERM, "seek": errno.EINVAL, "fsyncdir": errno.EINVAL, "lock": errno.ENOLCK,
}  # fmt: skip
CHANGES = {"create", "write", "mkdir", "unlink", "rmdir", "rename", "fsync", "setattr"}


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


class Bucket:
    """The server. It answers one request at a time, in one thread."""

    def __init__(self, folder: Path, behaviour: Behaviour) -> None:
        self.folder, self.behaviour = folder, behaviour
        self.paths = {1: ""}  # by node; a deleted and recreated name gets a new node
        self.mine: set[str] = set()
        self.files: dict[int, tuple[int, str]] = {}
        self.changes: dict[int, int] = {}
        self.next_node, self.next_file = 2, 1

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, MAX_WRITE + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # unmounted
            length, opcode, unique, node, _, _, process, *_ = HEADER.unpack_from(request)
            name = OPCODES.get(opcode)
            if name is None and opcode in (2, 36, 42):  # forget and interrupt need no answer
                continue
            code, answer = errno.ENOSYS, b""
            if name is not None:
                try:
                    code, answer = 0, self.answer(name, node, request[HEADER.size : length], process)
                except OSError as error:
                    code = error.errno or errno.EIO
            body = b"" if code else answer
            with suppress(FileNotFoundError):  # the caller is gone
                os.write(device, struct.pack("<IiQ", 16 + len(body), -code, unique) + body)

    def answer(self, name: str, node: int, body: bytes, process: int) -> bytes:
        if node not in self.paths and node:
            raise OSError(errno.ESTALE, "")
        path = self.paths.get(node, "")
        if name in ("lookup", "mkdir", "unlink", "rmdir", "create"):
            skip = {"mkdir": 8, "create": 16}.get(name, 0)
            path = join(path, body[skip:].split(b"\0")[0].decode())
        elif name in ("write", "read", "fsync") and len(body) >= 8:
            path = self.files[struct.unpack_from("<Q", body)[0]][1]
        if name in self.behaviour.refuses:
            raise OSError(self.behaviour.refuses[name], "")
        for entry in self.behaviour.fails:
            operation, pattern, number, times = entry
            if operation == name and re.search(pattern, path) and times:
                entry[3] -= 1
                raise OSError(number, "")
        dies = any(operation == name and re.search(pattern, path) for operation, pattern in self.behaviour.kills)
        if name in CHANGES and self.behaviour.kills_in_turn:
            self.changes[process] = self.changes.get(process, 0) + 1
            dies = self.changes[process] == list(self.changes).index(process) + 1
        if dies:
            if name == "write":
                size = struct.unpack_from("<QQI", body)[2] // 2
                self.write(path, body[:16] + struct.pack("<I", size) + body[20:])
            os.kill(process, signal.SIGKILL)
            raise OSError(errno.EINTR, "")
        return getattr(self, name)(path, body)

    def at(self, path: str) -> Path:
        return self.folder / path if path else self.folder

    def attributes(self, path: str, node: int) -> bytes:
        found = os.lstat(self.at(path))
        seconds = [int(found.st_atime), int(found.st_mtime), int(found.st_ctime)]
        return struct.pack(
            "<6Q10I", node, found.st_size, found.st_blocks, *seconds, 0, found.st_mtime_ns % 10**9, 0, found.st_mode,
            found.st_nlink, 0, 0, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        node = next((node for node, known in self.paths.items() if known == path), 0)
        if not node:
            node, self.next_node = self.next_node, self.next_node + 1
            self.paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self.attributes(path, node)

    def is_seen(self, path: str) -> bool:
        found = os.lstat(self.at(path))
        return path in self.mine or time.time() - max(found.st_ctime, found.st_mtime) >= self.behaviour.lag

    def init(self, _: str, body: bytes) -> bytes:
        flags = ATOMIC_O_TRUNC | BIG_WRITES | MAX_PAGES | (FLOCK_LOCKS if "lock" in self.behaviour.refuses else 0)
        return struct.pack(
            "<4I2H2I2H8I", 7, 31, 2**17, flags & struct.unpack_from("<4I", body)[3], 12, 9, MAX_WRITE, 1,
            MAX_WRITE // 4096, 0, *[0] * 8,
        )  # fmt: skip

    def lookup(self, path: str, _: bytes) -> bytes:
        if not self.is_seen(path):
            raise OSError(errno.ENOENT, "")
        return self.entry(path)

    def getattr(self, path: str, _: bytes) -> bytes:
        node = next(node for node, known in self.paths.items() if known == path)
        return struct.pack("<QII", 0, 0, 0) + self.attributes(path, node)

    def setattr(self, path: str, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & 8:
            if "seek" in self.behaviour.refuses and size:
                raise OSError(errno.EINVAL, "")
            os.truncate(self.at(path), size)
        return self.getattr(path, b"")

    def statfs(self, _: str, __: bytes) -> bytes:
        found = os.statvfs(self.folder)
        blocks = found.f_blocks, found.f_bfree, found.f_bavail
        return struct.pack("<5Q10I", *blocks, 0, 0, found.f_bsize, 255, found.f_frsize, *[0] * 7)

    def mkdir(self, path: str, _: bytes) -> bytes:
        self.mine.add(path)  # visible from now on, even if mkdir fails because it exists
        self.at(path).mkdir()
        return self.entry(path)

    def rmdir(self, path: str, _: bytes) -> bytes:
        self.at(path).rmdir()
        return self.forget(path)

    def unlink(self, path: str, _: bytes) -> bytes:
        self.at(path).unlink()
        return self.forget(path)

    def forget(self, path: str) -> bytes:
        self.paths = {node: known for node, known in self.paths.items() if known != path}
        return b""

    def opened(self, path: str, flags: int) -> bytes:
        handle = self.next_file
        self.next_file += 1
        self.files[handle] = (os.open(self.at(path), flags & ~os.O_APPEND & ~os.O_EXCL, 0o644), path)
        return struct.pack("<QII", handle, 0, 0)

    def create(self, path: str, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0]
        opened = self.opened(path, flags | os.O_CREAT)
        self.mine.add(path)
        return self.entry(path) + opened

    def open(self, path: str, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0]
        if flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_TRUNC and "append" in self.behaviour.refuses:
            raise OSError(self.behaviour.refuses["append"], "")
        return self.opened(path, flags)

    def read(self, _: str, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(self.files[handle][0], size, offset)

    def write(self, _: str, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        file = self.files[handle][0]
        if "seek" in self.behaviour.refuses and offset != os.fstat(file).st_size:
            raise OSError(self.behaviour.refuses["seek"], "")
        return struct.pack("<II", os.pwrite(file, body[40 : 40 + size], offset), 0)

    def fsync(self, _: str, __: bytes) -> bytes:
        return b""

    def flush(self, _: str, __: bytes) -> bytes:
        return b""

    def release(self, _: str, body: bytes) -> bytes:
        os.close(self.files.pop(struct.unpack_from("<Q", body)[0])[0])
        return b""

    def opendir(self, _: str, __: bytes) -> bytes:
        return bytes(16)

    def readdir(self, path: str, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        names = sorted(
            (found.name for found in self.at(path).iterdir()), reverse=True
        )  # reversed, because buckets promise no order
        names = [".", "..", *(name for name in names if self.is_seen(join(path, name)))]
        answer = b""
        for number, name in enumerate(names[offset:], start=offset + 1):
            kind = stat.S_IFDIR if number <= 2 or self.at(join(path, name)).is_dir() else stat.S_IFREG
            encoded = name.encode()
            record = struct.pack("<QQII", 2**32 + number, number, len(encoded), kind >> 12) + encoded
            record += bytes(-len(record) % 8)
            if len(answer) + len(record) > size:
                break
            answer += record
        return answer

    def releasedir(self, _: str, __: bytes) -> bytes:
        return b""

    def fsyncdir(self, _: str, __: bytes) -> bytes:
        return b""

    def rename(self, path: str, body: bytes) -> bytes:
        """Rename as object stores do: copy a folder file by file."""
        old, new = body[8:].split(b"\0")[:2]
        source, target = join(path, old.decode()), join(self.paths[struct.unpack_from("<Q", body)[0]], new.decode())
        if self.at(source).is_dir():
            shutil.copytree(self.at(source), self.at(target))
            shutil.rmtree(self.at(source))
        else:
            self.at(source).replace(self.at(target))
        self.mine.add(target)
        self.forget(target)
        return self.forget(source)


def mount(mountpoint: Path, kind: str, source: str = "bucket") -> int:
    """Mount, and return the device's file descriptor; do not serve yet. Raise OSError if the mount fails."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(source.encode(), bytes(mountpoint), kind.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    return device


@contextmanager
def mounted(folder: Path, mountpoint: Path, **behaviour) -> Iterator[Path]:
    """Yield the mount point of a bucket, and unmount it afterwards."""
    folder.mkdir(exist_ok=True)
    mountpoint.mkdir(exist_ok=True)
    asked = json.dumps(asdict(Behaviour(**behaviour)))
    server = subprocess.Popen(
        [sys.executable, "-S", __file__, str(folder), str(mountpoint), asked], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout.readline() == "mounted\n"
        yield mountpoint
    finally:
        ctypes.CDLL(None).umount2(bytes(mountpoint), MNT_DETACH)
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def missing() -> str:
    """Return why a bucket cannot be mounted here, or an empty string if it can."""
    if os.geteuid():
        return "needs root to mount"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return ""


if __name__ == "__main__":
    given, where, asked = sys.argv[1:]
    ways = Behaviour(**json.loads(asked))
    handle = mount(Path(where), f"fuse.{ways.kind}" if ways.kind else "fuse")
    print("mounted", flush=True)
    Bucket(Path(given), ways).serve(handle)
