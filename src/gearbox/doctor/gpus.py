"""Check this machine's GPUs through the driver and nvidia-smi. Import torch only if a driver is present."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gearbox.doctor import nvidia_smi
from gearbox.doctor.finding import Finding

if TYPE_CHECKING:
    import torch

DRIVER = Path("/proc/driver/nvidia/version")
# CUDA major version -> oldest driver that supports it (from NVIDIA's table of minor version compatibility).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
TAKEN_MIB = 1024  # on an idle GPU the driver itself uses a few hundred MiB
SLOWDOWNS = ("clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown")
FIELDS = (
    "name",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    *SLOWDOWNS,
    "compute_cap",
)
BF16_CAPABILITY = (8, 0)
NO_PEER_ACCESS = {
    "CNS": "not supported by the chipset",
    "GNS": "not supported by the GPUs",
    "TNS": "not supported by the topology",
    "DR": "disabled in the driver",
}
"""Status in `nvidia-smi topo -p2p` -> its meaning."""


def inspect_gpus(num_ranks: int) -> tuple[list[Finding], int]:
    """Return the findings, and the number of GPUs that torch can use on this machine."""
    driver, cuda = driver_version(), torch_cuda()
    if driver is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return [check_driver(driver, cuda, 0)], 0
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings = [check_driver(driver, cuda, num_gpus)]
    if num_gpus < num_ranks and num_gpus:
        text = f"{num_ranks} ranks on this machine, but {num_gpus} GPUs"
        findings.append(Finding("red", "gpus", text, f"use --num_processes {num_gpus} per machine"))
    try:
        visible = nvidia_smi.visible_gpus(nvidia_smi.run("-L"), os.environ.get("CUDA_VISIBLE_DEVICES"))
        rows = [row for row in nvidia_smi.query_gpus(FIELDS) if int(row["index"]) in visible]
        findings += check_gpus(rows)
        findings += check_bf16(rows)
        findings += check_topology(nvidia_smi.run("topo", "-m"), visible)
        findings += check_peers(nvidia_smi.run("topo", "-p2p", "r"), visible)
    except (OSError, subprocess.SubprocessError) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"failed: {error}"
        advice = "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; elsewhere look for Xid errors in dmesg"
        findings.append(Finding("yellow", "gpus", f"nvidia-smi {problem}", advice))
    if cuda is not None and num_gpus:
        findings += check_quantizer(cuda)
    return findings, num_gpus


def driver_version(path: Path = DRIVER) -> str | None:
    """Return the version of the loaded NVIDIA driver, such as 580.95.05, or None without a driver."""
    try:
        found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def torch_cuda() -> str | None:
    """Return the CUDA version of the torch build, such as 13.0. Read it from a file: importing torch is slow."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return found[1] if found else None


def check_driver(driver: str | None, cuda: str | None, num_gpus: int) -> Finding:
    """Check that the driver supports torch's CUDA, and that torch sees a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("green", "driver", "CUDA_VISIBLE_DEVICES hides all GPUs; training runs on the CPU")
    if driver is None:
        return Finding("green", "driver", "no NVIDIA driver; training runs on the CPU")
    if cuda is None:
        text = f"NVIDIA driver {driver}, but torch is a build without CUDA"
        advice = "install torch with CUDA from PyPI, or hide the GPUs with CUDA_VISIBLE_DEVICES= (empty)"
        return Finding("red", "driver", text, advice)
    major = int(cuda.split(".")[0])
    oldest = OLDEST_DRIVER.get(major)
    if oldest is not None and int(driver.split(".")[0]) < oldest:
        text = f"NVIDIA driver {driver} is too old: torch's CUDA {cuda} needs {oldest}"
        return Finding("red", "driver", text, f"install driver {oldest} or newer, or torch for an older CUDA")
    if num_gpus == 0:
        advice = (
            "request GPUs (docker run --gpus all; nvidia.com/gpu in Kubernetes; --gres in Slurm); "
            "then check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        return Finding("red", "driver", f"NVIDIA driver {driver}, CUDA {cuda}, but torch sees no GPU", advice)
    return Finding("green", "driver", f"NVIDIA driver {driver}, torch's CUDA {cuda}, {num_gpus} GPUs")


def check_gpus(rows: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Check memory, ECC errors and slowdowns in the rows of nvidia_smi.query_gpus(FIELDS)."""
    taken, broken, slowed = [], [], []
    for row in rows:
        index, used = row["index"], row.get("memory.used", "")
        errors = row.get("ecc.errors.uncorrected.volatile.total", "")
        if used.isdigit() and int(used) > TAKEN_MIB:
            of_total = f" of {_gib(row)}" if _gib(row) else " GiB"
            taken.append(f"{int(used) / 1024:.1f}{of_total} on GPU {index}")
        if errors.isdigit() and int(errors) > 0:
            broken.append(f"GPU {index}: {errors} uncorrected ECC errors since the driver loaded")
        if "Active" in (row.get(field) for field in SLOWDOWNS):
            slowed.append(index)
    if taken:
        advice = "find the process with nvidia-smi (or fuser -v /dev/nvidia* if it lists none), and end it"
        yield Finding("yellow", "gpus", f"memory in use: {', '.join(taken)}", advice)
    if broken:
        advice = "reset the GPU or restart the machine; replace the GPU if the errors return"
        yield Finding("yellow", "gpus", "; ".join(broken), advice)
    if slowed:
        text = f"GPU {', '.join(slowed)}: clocks reduced by heat or power"
        yield Finding(
            "yellow", "gpus", text, "run nvidia-smi -q -d PERFORMANCE for the cause; check cooling and power supply"
        )
    if rows and not (taken or broken or slowed):
        unknown = [field for field in FIELDS if field not in rows[0]]
        text = f"{_count_kinds(rows)}, free" + (f"; nvidia-smi lacks {', '.join(unknown)}" if unknown else "")
        yield Finding("green", "gpus", text)


def _count_kinds(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the GPUs by kind, such as `4 x NVIDIA H100 80GB HBM3 80 GiB`."""
    kinds = Counter(f"{row.get('name', 'GPU')} {_gib(row)}".strip() for row in rows)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _gib(row: Mapping[str, str]) -> str:
    total = row.get("memory.total", "")
    return f"{int(total) / 1024:.0f} GiB" if total.isdigit() else ""


def check_bf16(rows: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Check that the GPUs compute in bf16, as most gears do."""
    capability_of = {row["index"]: row.get("compute_cap", "") for row in rows}
    known = {index: text for index, text in capability_of.items() if re.fullmatch(r"\d+\.\d+", text)}
    old = {index: text for index, text in known.items() if tuple(map(int, text.split("."))) < BF16_CAPABILITY}
    if old:
        of_gpus = ", ".join(f"{index} ({text})" for index, text in old.items())
        text = f"compute capability of GPU {of_gpus} is below 8.0: bf16 is slow, and attention by document is off"
        yield Finding("yellow", "bf16", text, "use GPUs from 8.0 on, such as A100, A10, L4, RTX 30 or newer")
    elif known:
        yield Finding("green", "bf16", f"compute capability {', '.join(sorted({*known.values()}))}")


def check_topology(matrix: str, visible: Sequence[int]) -> Iterator[Finding]:
    """Report how visible GPUs are linked, from `nvidia-smi topo -m`: NV# is NVLink, SYS crosses CPU sockets."""
    pairs_by_link = nvidia_smi.parse_matrix(matrix, visible)
    if not pairs_by_link:
        return
    nvlinks = sorted(link for link in pairs_by_link if link.startswith("NV"))
    others = {link: pairs for link, pairs in pairs_by_link.items() if link not in nvlinks}
    if not others:
        gpus = {gpu for pairs in pairs_by_link.values() for pair in pairs for gpu in pair}
        yield Finding("green", "topology", f"NVLink between all {len(gpus)} GPUs ({', '.join(nvlinks)})")
        return
    counts = [f"{len(pairs)} over {link} ({_shown(pairs)})" for link, pairs in others.items()]
    text = f"pairs without NVLink: {'; '.join(counts)}"
    if "SYS" in others:
        text += "; SYS crosses CPU sockets and is slowest: keep tp and sp groups off it"
    yield Finding("green", "topology", text)


def check_peers(matrix: str, visible: Sequence[int]) -> Iterator[Finding]:
    """Check which visible GPUs read each other's memory, from `nvidia-smi topo -p2p r`."""
    pairs_by_status = nvidia_smi.parse_matrix(matrix, visible)
    without = {status: pairs for status, pairs in pairs_by_status.items() if status != "OK"}
    if without:
        problems = [f"{_shown(pairs)} {NO_PEER_ACCESS.get(status, status)}" for status, pairs in without.items()]
        text = f"no access between GPUs: {'; '.join(problems)}; NCCL copies through host memory"
        advice = "turn off ACS and the IOMMU in the BIOS; in a virtual machine ask its operator; GeForce GPUs have none"
        yield Finding("yellow", "peers", text, advice)
    elif pairs_by_status:
        yield Finding("green", "peers", "every GPU reads the memory of every other")


def _shown(pairs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in pairs[:6]) + (", ..." if len(pairs) > 6 else "")


def take_device(local_rank: int) -> torch.device:
    """Return this rank's GPU and make it current; return the CPU if there are no GPUs."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the device's name, such as `cuda:1 NVIDIA H100 80GB HBM3` or `cpu`."""
    import torch

    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def check_quantizer(cuda: str) -> Iterator[Finding]:
    """Check that bitsandbytes has kernels for torch's major CUDA version; the minor version may differ."""
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        return
    names = [path.name for path in Path(spec.origin).parent.glob("libbitsandbytes_cuda*.so")]
    majors = {re.sub(r"\D", "", name)[:2] for name in names}
    if cuda.split(".")[0] not in majors:
        text = f"bitsandbytes has no kernels for CUDA {cuda}; QLoRA and 8-bit optimizers will not run"
        yield Finding("yellow", "quantizer", text, "install a newer bitsandbytes, or torch for another CUDA version")
