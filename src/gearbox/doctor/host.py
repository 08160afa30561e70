"""Check one machine: package versions, shared memory, limits, memory, disk and compilers.

This takes seconds and needs no torch. Checks take the values they judge as arguments, so that a test can describe any
machine.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import time
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from gearbox import ROOT, filesystem, processes
from gearbox.config.gear import Gear
from gearbox.console import format_bytes_short
from gearbox.doctor.finding import Finding, shorten
from gearbox.doctor.gpus import inspect_gpus
from gearbox.doctor.network import check_hub, check_rdma, in_background, inspect_address, rdma_devices

if TYPE_CHECKING:
    from gearbox.doctor.rank_registry import RankRegistry

MiB, GiB = 2**20, 2**30
JOINED = ("torch", "accelerate", "transformers", "peft", "deepspeed", "bitsandbytes")  # what this project combines
SHM_PER_RANK = 64 * MiB
"""NCCL's segment between two GPUs without peer access takes 7 to 10 MiB (NVIDIA/nccl 290, 342; torchtitan 853). A ring
has one in each direction, on two to four channels."""
FILES_PER_RANK = 16  # per other rank: one socket in each process group of the gear
MEMORY_PER_RANK = 2 * GiB  # mostly the imported libraries
WRITTEN = 4 * MiB
SLOW_DISK = 10 * MiB  # bytes per second; the 84 GB of a 7B checkpoint would take more than two hours
SLOW_SYNC = 2.0  # seconds
SHARED_SECONDS = 10.0  # a network file system may show another machine's new file late


def inspect_host(
    gear: Gear | None, runs: Path, num_local_ranks: int, world_size: int, num_machines: int
) -> list[Finding]:
    """Run all checks of this machine that involve no other rank."""
    hub = in_background(lambda: check_hub(os.environ))
    gpus, num_gpus = inspect_gpus(num_local_ranks)
    rdma = rdma_devices()
    ranks = max(num_local_ranks, num_gpus if world_size == 1 else 1)  # a single rank checks for one rank per GPU
    return [
        *package_versions(installed(), ROOT / "pyproject.toml", ROOT / "constraints.txt"),
        *gpus,
        shared_memory(Path("/dev/shm"), ranks, num_gpus),
        *limits(world_size, has_rdma=bool(rdma)),
        memory(ranks),
        disk(runs),
        *(operations(gear, num_gpus) if gear is not None else []),
        check_rdma(rdma),
        inspect_address(num_machines, num_gpus),
        hub(),
    ]


def installed() -> dict[str, str]:
    """Return the versions of Python and of those required packages that are installed."""
    found = {"python": platform.python_version()}
    for requirement in _required(ROOT / "pyproject.toml"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[requirement.name] = importlib.metadata.version(requirement.name)
    return found


def package_versions(found: dict[str, str], pyproject: Path, constraints: Path) -> Iterator[Finding]:
    """Check versions: red if outside pyproject.toml's bounds, yellow if one of JOINED is not the tested version."""
    wrong = []
    for requirement in _required(pyproject):
        version = found.get(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
            if requirement.name == "torch" and Version(version) < Version("2.10"):
                wrong[-1] += " (below 2.10 a checkpoint can run code: GHSA-63cw-57p8-fm3p)"
    tested = dict(line.strip().split("==") for line in _read(constraints).splitlines() if "==" in line)
    other = [
        f"{name} {found[name]} (tested: {tested[name]})"
        for name in JOINED
        if name in found and name in tested and Version(found[name]).public != Version(tested[name]).public
    ]
    if wrong:
        yield Finding("red", "versions", "; ".join(wrong), "run `make setup`, or use the Docker image")
    if other:
        again = "run `make setup` for the tested versions, or `make test` to check these"
        yield Finding("yellow", "versions", "; ".join(other), again)
    if not wrong and not other:
        summary = ", ".join(f"{name} {found[name]}" for name in ("python", *JOINED) if name in found)
        yield Finding("green", "versions", summary)


def _required(pyproject: Path) -> list[Requirement]:
    text = _read(pyproject)
    return [Requirement(line) for line in tomllib.loads(text)["project"]["dependencies"]] if text else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # an image may contain only the code
        return ""


def shared_memory(path: Path, num_ranks: int, num_gpus: int) -> Finding:
    """Check the size of /dev/shm. NCCL uses it between GPUs without peer access."""
    if not path.is_dir():
        size = 0
    else:
        room = os.statvfs(path)
        size = room.f_blocks * room.f_frsize
    needed = SHM_PER_RANK * num_ranks
    summary = f"{path} has {format_bytes_short(size)}"
    if num_ranks == 1 or size >= needed:
        return Finding("green", "shm", summary)
    advice = (
        f"raise to {format_bytes_short(max(GiB, needed))}: docker run --shm-size; in Kubernetes, an emptyDir with "
        f"medium: Memory on {path}"
    )
    if num_gpus == 0:
        return Finding("yellow", "shm", f"{summary}; gloo needs none, NCCL with {num_ranks} ranks needs more", advice)
    return Finding("red", "shm", f"{summary}; NCCL may need {format_bytes_short(needed)} for {num_ranks} ranks", advice)


def limits(world_size: int, has_rdma: bool) -> Iterator[Finding]:
    """Check the ulimits: open files, locked memory, processes."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    needed = 512 + FILES_PER_RANK * world_size
    few = []
    if 0 <= files < needed:
        few.append((f"{files} open files; {world_size} ranks may need {needed}", f"ulimit -n {max(65536, needed)}"))
    if has_rdma and locked != resource.RLIM_INFINITY:
        few.append((f"{format_bytes_short(locked)} of locked memory; InfiniBand needs more", "ulimit -l unlimited"))
    if 0 <= processes < 4096:
        few.append((f"{processes} processes and threads", "ulimit -u 65536"))
    for text, advice in few:
        more = " (docker run --ulimit; for Slurm LimitMEMLOCK= and LimitNOFILE= of slurmd)"
        yield Finding("yellow", "limits", text, advice + more)
    if not few:
        memlock = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes_short(locked)
        yield Finding("green", "limits", f"{files:,} open files, {memlock} of locked memory")


def memory(num_ranks: int) -> Finding:
    """Check the free memory of the host, or below the container's limit if that is less."""
    free, limited = psutil.virtual_memory().available, ""
    room = processes.cgroup_room()
    if room is not None and room < free:
        free, limited = room, " below the container's limit"
    summary = f"{format_bytes_short(free)} free{limited}"
    if free >= MEMORY_PER_RANK * num_ranks:
        return Finding("green", "memory", summary)
    text = f"{summary}; {num_ranks} ranks take {format_bytes_short(MEMORY_PER_RANK)} each to start"
    advice = "end other processes (ps aux --sort -rss), raise the container's limit, or start fewer ranks"
    return Finding("yellow", "memory", text, advice)


def disk(runs: Path) -> Finding:
    """Check that the folder of runs is writable, how fast it is, and how much space is free."""
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    try:
        free = shutil.disk_usage(folder).free
        for _ in range(3):  # retry: another process may be writing
            rate, sync = _write_speed(folder)
            slow = rate < SLOW_DISK or sync > SLOW_SYNC
            if not slow:
                break
    except OSError as error:
        advice = "free some space there, change its owner, or set run.dir=FOLDER"
        return Finding("red", "disk", f"{runs} cannot be written: {error.strerror}", advice)
    summary = f"{runs}: {format_bytes_short(free)} free, {rate / MiB:,.0f} MiB/s, fsync in {sync * 1000:.0f} ms"
    if free < 10 * GiB:
        return Finding(
            "yellow", "disk", summary, "free some space: a checkpoint has 12 bytes per trained weight, 84 GB for 7B"
        )
    if slow:
        return Finding("yellow", "disk", summary, "checkpoints will take long: use a local disk, or save less often")
    return Finding("green", "disk", summary)


def _write_speed(folder: Path) -> tuple[float, float]:
    """Return the write speed in bytes per second, fsync included, and the seconds of a small fsync."""
    path = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        with path.open("wb", buffering=0) as file:
            began = time.perf_counter()
            left = memoryview(os.urandom(WRITTEN))  # random bytes: compression gains nothing
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
            written = time.perf_counter()
            file.write(b"x")
            os.fsync(file.fileno())
            return WRITTEN / (written - began), time.perf_counter() - written
    finally:
        path.unlink(missing_ok=True)


def check_shared_folder(registry: RankRegistry, runs: Path) -> Finding:
    """Check that all machines see the same folder of runs; checkpoints need it. All ranks call this."""
    probe = None
    if registry.rank == 0:
        probe = _probe_path(runs, f".doctor-{uuid.uuid4().hex[:8]}")
        try:
            probe.touch()
        except OSError:
            probe = None
    name = registry.gather("a marker in the folder", probe.name if probe else None)[0]
    sees = True  # if no file could be made, the finding `disk` reports it
    if name is not None and registry.local_rank == 0:
        sees = filesystem.wait_for_path(_probe_path(runs, name), SHARED_SECONDS)
    all_see = registry.gather("the folder's marker", sees)
    if probe is not None:
        probe.unlink(missing_ok=True)
    blind = list(dict.fromkeys(registry.hosts[rank] for rank, seen in enumerate(all_see) if not seen))
    if name is None or not blind:
        return Finding("green", "folder", f"{runs} is the same folder on all machines" if name else f"{runs}: see disk")
    text = f"{runs} on {shorten(blind)} is not the same folder as on {registry.hosts[0]}"
    return Finding("red", "folder", text, "mount a shared folder on all machines, and set run.dir to it")


def _probe_path(runs: Path, name: str) -> Path:
    return (runs if runs.is_dir() else runs.absolute().parent) / name


def operations(gear: Gear, num_gpus: int) -> Iterator[Finding]:
    """Check that DeepSpeed can compile the operations that this gear needs at startup."""
    for name in gear.compiled:
        missing = [
            tool
            for tool, is_there in (
                ("C++ compiler", shutil.which(os.environ.get("CXX", "g++"))),
                ("ninja", shutil.which("ninja") or importlib.util.find_spec("ninja")),
                ("libaio headers", name != "async_io" or _header("libaio.h")),
                ("nvcc", num_gpus == 0 or shutil.which("nvcc") or os.environ.get("CUDA_HOME")),
            )
            if not is_there
        ]
        built = _built(name)
        if built:
            yield Finding("green", "operations", f"{name} is compiled: {built}")
        elif missing:
            text = f"{gear.name} needs DeepSpeed to compile {name}; missing: {', '.join(missing)}"
            toolkit = ", and the CUDA toolkit" if "nvcc" in missing else ""
            yield Finding("red", "operations", text, f"apt-get install g++ ninja-build libaio-dev{toolkit}")
        else:
            yield Finding("green", "operations", f"{name} can be compiled; this adds minutes to the first start")


def _header(name: str) -> bool:
    folders = [*os.environ.get("CPATH", "").split(":"), "/usr/include", "/usr/local/include"]
    folders += [flag[2:] for flag in os.environ.get("CFLAGS", "").split() if flag.startswith("-I")]
    return any(Path(folder, name).is_file() for folder in folders if folder)


def _built(name: str) -> Path | None:
    """Return the path of the compiled operation in torch's build folder or the installed package, if any."""
    home = os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions")
    folders = [Path(home)]
    if (spec := importlib.util.find_spec("deepspeed")) and spec.origin:
        folders.append(Path(spec.origin).parent / "ops")
    return next((path for folder in folders for path in folder.rglob(f"{name}*.so")), None)
