"""Mount a folder as a disk that loses what was not synced when its power is cut.

    python tests/support/power.py FOLDER MOUNTPOINT DURABLE CUT_AT

It is the strictest disk that POSIX permits. A file's content survives if the file was synced, and a name survives if
its folder was synced; so does a rename or a deletion. CUT_AT is the number of the change before which the power fails:
every process that has changed something is killed, and the disk is gone. `restore` rebuilds what has survived.
"""

import ctypes
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import bucket

KIND = "fuseblk"  # unlike `fuse`, it is known to rename atomically


class Disk(bucket.Bucket):
    """The server. The folder has the current content, and `durable` a copy of each synced file."""

    def __init__(self, folder: Path, durable: Path, cut_at: int) -> None:
        super().__init__(folder, bucket.Behaviour())
        self.durable, self.cut_at = durable, cut_at
        self.numbers: dict[int, int] = {}
        """An own number for each file and folder, by inode. A new file may get the inode of a deleted one."""
        self.names: dict[int, dict[str, int]] = {}
        """The surviving names in each folder, by its number."""
        self.num_changes, self.changers = 0, set()
        for path in [*sorted(folder.rglob("*"), reverse=True), folder]:  # what was there before is durable
            self.sync(path)

    def number(self, path: Path) -> int:
        return self.numbers.setdefault(os.lstat(path).st_ino, len(self.numbers) + 1 + self.num_changes * 10**6)

    def sync(self, path: Path) -> None:
        if path.is_dir():
            self.names[self.number(path)] = {entry.name: self.number(entry) for entry in path.iterdir()}
        else:
            shutil.copyfile(path, self.durable / str(self.number(path)))

    def answer(self, name: str, node: int, body: bytes, process: int) -> bytes:
        if name in bucket.CHANGES | {"fsyncdir"}:
            self.num_changes += 1
            self.changers |= {process} - {0, os.getppid()}  # the kernel itself, and the test
            if self.num_changes == self.cut_at:
                self.cut()
        return super().answer(name, node, body, process)

    def cut(self, *_) -> None:
        """End at once, and kill the writers. The folder keeps what is lost."""
        (self.durable / "names.json").write_text(
            json.dumps({"numbers": self.numbers, "names": self.names, "changes": self.num_changes})
        )
        for process in self.changers:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os._exit(0)

    def fsync(self, path: str, body: bytes) -> bytes:
        handle = self.files[struct.unpack_from("<Q", body)[0]][0]
        copy = self.durable / str(self.numbers[os.fstat(handle).st_ino])
        shutil.copyfile(f"/proc/self/fd/{handle}", copy)
        return b""

    def fsyncdir(self, path: str, _: bytes) -> bytes:
        self.sync(self.at(path))
        return b""

    def create(self, path: str, body: bytes) -> bytes:
        is_new = not self.at(path).exists()
        answer = super().create(path, body)
        if is_new:
            self.renumber(path)
        return answer

    def mkdir(self, path: str, body: bytes) -> bytes:
        answer = super().mkdir(path, body)
        self.renumber(path)
        return answer

    def renumber(self, path: str) -> None:
        self.numbers.pop(os.lstat(self.at(path)).st_ino, None)
        self.number(self.at(path))

    def rename(self, path: str, body: bytes) -> bytes:
        old, new = body[8:].split(b"\0")[:2]
        source = bucket.join(path, old.decode())
        target = bucket.join(self.paths[struct.unpack_from("<Q", body)[0]], new.decode())
        self.at(source).rename(self.at(target))
        self.forget(target)
        for node, known in self.paths.items():
            if known == source or known.startswith(f"{source}/"):
                self.paths[node] = target + known[len(source) :]
        return b""


def restore(folder: Path, durable: Path, target: Path, draw: random.Random | None = None) -> None:
    """Rebuild what has survived a cut in a new folder.

    With `draw`, each folder keeps at random its synced names or its current ones: a disk may write names early. A file
    that was never synced is then empty.
    """
    state = json.loads((durable / "names.json").read_text())
    numbers = {int(inode): number for inode, number in state["numbers"].items()}
    names = {int(number): found for number, found in state["names"].items()}
    current: dict[int, dict[str, int]] = {}
    folders = set(names)
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            number = numbers[os.lstat(path).st_ino]
            folders.add(number)
            current[number] = {entry.name: numbers[os.lstat(entry).st_ino] for entry in path.iterdir()}

    def rebuild(number: int, where: Path) -> None:
        where.mkdir(parents=True)
        kept = names.get(number, {})
        if draw is not None and draw.random() < 0.5:
            kept = current.get(number, kept)
        for name, inside in kept.items():
            if inside in folders:
                rebuild(inside, where / name)
            elif (copy := durable / str(inside)).exists():
                shutil.copyfile(copy, where / name)
            else:
                (where / name).touch()

    rebuild(numbers[os.lstat(folder).st_ino], target)


@contextmanager
def mounted(work: Path, mountpoint: Path, cut_at: int = 0) -> Iterator[subprocess.Popen]:
    """Mount the folder work/disk, and yield the server: its end is the cut. SIGTERM cuts the power now."""
    disk, durable = work / "disk", work / "durable"
    for folder in (disk, mountpoint):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(durable, ignore_errors=True)
    durable.mkdir()
    image = work / "image"
    with image.open("wb") as file:
        file.truncate(2**20)
    device = subprocess.run(
        ["losetup", "--find", "--show", image], capture_output=True, text=True, check=True
    ).stdout.strip()  # the kind needs a device, which is not used
    command = [sys.executable, "-S", __file__, disk, mountpoint, durable, str(cut_at), device]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "mounted\n"
        yield server
    finally:
        ctypes.CDLL(None).umount2(bytes(mountpoint), bucket.MNT_DETACH)
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()
        subprocess.run(["losetup", "--detach", device], check=True)


def cut_and_restore(work: Path, draw: random.Random | None = None) -> None:
    """Replace work/disk by what has survived the cut."""
    restored = work / "restored"
    restore(work / "disk", work / "durable", restored, draw)
    shutil.rmtree(work / "disk")
    restored.rename(work / "disk")


def problems(run: Path, reference: Path) -> list[str]:
    """Return what a finished run lacks, compared with the folder of an undisturbed run."""
    import torch
    from safetensors.torch import load_file

    from gearbox.launch.outcome import read_outcome
    from gearbox.metrics import metrics_file
    from support import ledger

    def losses(folder: Path) -> list[float]:
        return [line["loss"] for line in metrics_file.read(folder / "metrics.jsonl").good if "rows_hash" in line]

    def weights(folder: Path) -> dict:
        return load_file(folder / "model" / "model.safetensors")

    def names(folder: Path) -> list[str]:
        return sorted(path.name for path in (folder / "model").iterdir())

    found = ledger.leftovers(run)
    if read_outcome(run / "status.json").get("outcome") != "done":
        return [*found, "status.json does not say done"]
    if not (run / "report.html").read_text().endswith("</html>\n"):
        found.append("report.html is incomplete")
    if losses(run) != losses(reference):
        found.append(f"metrics.jsonl has {len(losses(run))} losses, not the {len(losses(reference))} expected")
    if ledger.whole_checkpoint(run / "checkpoints") is None:
        found.append("no valid checkpoint")
    if names(run) != names(reference):
        return [*found, f"model has {names(run)}"]
    return found + [
        f"{name} differs" for name, tensor in weights(reference).items() if not torch.equal(tensor, weights(run)[name])
    ]


def missing() -> str:
    """Return why such a disk cannot be mounted here, or an empty string if it can."""
    return bucket.missing() or ("" if shutil.which("losetup") else "losetup is not installed")


if __name__ == "__main__":
    given, where, kept, at, block_device = sys.argv[1:]
    handle = bucket.mount(Path(where), KIND, block_device)
    server = Disk(Path(given), Path(kept), int(at))
    signal.signal(signal.SIGTERM, server.cut)
    print("mounted", flush=True)
    server.serve(handle)
