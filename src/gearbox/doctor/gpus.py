"""The GPUs of this machine, as the driver and nvidia-smi tell of them. Imports torch only where there is a driver."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from gearbox.doctor.finding import Finding

DRIVER = Path("/proc/driver/nvidia/version")
# CUDA's major version to the oldest driver that runs it (NVIDIA's table of minor version compatibility).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
TAKEN_MIB = 1024  # of a GPU that nobody uses the driver keeps a few hundred
SMI_SECONDS = 10
ASKED = (
    "index", "name", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown",
)  # fmt: skip


def inspect_gpus(num_ranks: int) -> tuple[list[Finding], int]:
    """What there is to say, and how many GPUs torch can use here."""
    driver, cuda = driver_version(), torch_cuda()
    if driver is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return [check_driver(driver, cuda, 0)], 0
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings = [check_driver(driver, cuda, num_gpus)]
    if num_gpus < num_ranks and num_gpus:
        text = f"{num_ranks} ranks here, but {num_gpus} GPUs"
        findings.append(Finding("red", "gpus", text, f"give --num_processes {num_gpus} for each machine"))
    try:
        findings += check_gpus(_smi(f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"))
        findings += check_topology(_smi("topo", "-m"), num_gpus)
    except (OSError, subprocess.SubprocessError) as error:
        found = "is not there" if isinstance(error, FileNotFoundError) else f"fails: {error}"
        advice = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; else look at dmesg for Xid errors"
        findings.append(Finding("yellow", "gpus", f"nvidia-smi {found}", advice))
    if cuda is not None and num_gpus:
        findings += check_quantizer(cuda)
    return findings, num_gpus


def driver_version(path: Path = DRIVER) -> str | None:
    """Of the NVIDIA driver that is loaded, such as 580.95.05."""
    try:
        found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def torch_cuda() -> str | None:
    """The CUDA that torch is built for, such as 13.0; read from its folder, which is faster than importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return found[1] if found else None


def check_driver(driver: str | None, cuda: str | None, num_gpus: int) -> Finding:
    """Whether the driver runs the CUDA that torch brings, and torch sees a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("green", "driver", "CUDA_VISIBLE_DEVICES hides all GPUs: a rehearsal on the CPU")
    if driver is None:
        return Finding("green", "driver", "no NVIDIA driver: a rehearsal on the CPU")
    if cuda is None:
        return Finding(
            "red", "driver", f"NVIDIA driver {driver}, but torch is a build without CUDA",
            "install torch from PyPI for GPUs, or hide them with CUDA_VISIBLE_DEVICES= (empty)",
        )  # fmt: skip
    major = int(cuda.split(".")[0])
    oldest = OLDEST_DRIVER.get(major)
    if oldest is not None and int(driver.split(".")[0]) < oldest:
        return Finding(
            "red", "driver", f"NVIDIA driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest}",
            f"install driver {oldest} or newer, or a torch for an older CUDA",
        )  # fmt: skip
    if num_gpus == 0:
        return Finding(
            "red", "driver", f"NVIDIA driver {driver}, CUDA {cuda}, but torch sees no GPU",
            "give the container its GPUs (docker run --gpus all; nvidia.com/gpu in Kubernetes; --gres in Slurm); then "
            "look at nvidia-smi, and at CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    return Finding("green", "driver", f"NVIDIA driver {driver}, torch's CUDA {cuda}, {num_gpus} GPUs")


def check_gpus(table: str) -> Iterator[Finding]:
    """Rows of nvidia-smi --query-gpu with the columns of ASKED."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == len(ASKED)]
    taken, broken, slowed = [], [], []
    for index, _, total, used, errors, *slowdowns in rows:
        if used.isdigit() and int(used) > TAKEN_MIB:
            taken.append(f"{int(used) / 1024:.1f} of {int(total) / 1024:.0f} GiB of GPU {index}")
        if errors.isdigit() and int(errors) > 0:
            broken.append(f"GPU {index}: {errors} uncorrected ECC errors since the start")
        if "Active" in slowdowns:
            slowed.append(index)
    if taken:
        advice = "see whose with nvidia-smi, or fuser -v /dev/nvidia* where it shows no process, and end it"
        yield Finding("yellow", "gpus", f"taken already: {', '.join(taken)}", advice)
    if broken:
        advice = "reset the GPU or restart the machine; take it out of service if they come again"
        yield Finding("yellow", "gpus", "; ".join(broken), advice)
    if slowed:
        text = f"GPU {', '.join(slowed)} is slowed down by heat or power"
        yield Finding("yellow", "gpus", text, "nvidia-smi -q -d PERFORMANCE says why; look at cooling and power supply")
    if rows and not (taken or broken or slowed):
        kinds = [f"{name} {int(total) / 1024:.0f} GiB" if total.isdigit() else name for _, name, total, *_ in rows]
        yield Finding("green", "gpus", ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds)) + ", free")


def check_topology(matrix: str, num_gpus: int) -> Iterator[Finding]:
    """How the GPUs are joined, by `nvidia-smi topo -m`: NV# is NVLink, SYS the way from one CPU to another."""
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in matrix.splitlines()]  # it underlines the head
    head = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    names = [name for name in head if re.fullmatch(r"GPU\d+", name)]
    ways = {row[0]: row[1 : 1 + len(names)] for row in rows if row and row[0] in names and "X" in row}
    if num_gpus < 2 or len(ways) < 2:
        return
    kinds: dict[str, list[str]] = {}
    for (i, a), (j, b) in combinations(enumerate(names), 2):
        kinds.setdefault(ways[a][j] if a in ways else ways[b][i], []).append(f"{a[3:]}-{b[3:]}")
    linked = [kind for kind in kinds if kind.startswith("NV")]
    if len(linked) == len(kinds):
        text = f"NVLink between all {len(names)} GPUs ({', '.join(sorted(linked))})"
    else:
        others = {kind: pairs for kind, pairs in kinds.items() if kind not in linked}
        said = [f"{len(pairs)} by {kind} ({', '.join(pairs[:6])}{', ...' if len(pairs) > 6 else ''})"
                for kind, pairs in others.items()]  # fmt: skip
        text = f"pairs without NVLink: {'; '.join(said)}"
        if "SYS" in others:
            text += "; SYS crosses CPUs, the slowest way: keep tp and sp groups off it"
    yield Finding("green", "topology", text)


def check_quantizer(cuda: str) -> Iterator[Finding]:
    """bitsandbytes brings its kernels for some CUDA versions, and takes another minor one, but no other major one."""
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        return
    names = [path.name for path in Path(spec.origin).parent.glob("libbitsandbytes_cuda*.so")]
    majors = {re.sub(r"\D", "", name)[:2] for name in names}
    if cuda.split(".")[0] not in majors:
        text = f"bitsandbytes has no kernels for CUDA {cuda}; QLoRA and 8-bit optimizers will not run"
        yield Finding("yellow", "quantizer", text, "install a newer bitsandbytes, or torch for another CUDA")


def _smi(*arguments: str) -> str:
    return subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS, check=True
    ).stdout
