"""List what a plan needs to know of GPUs: memory, rates and links, each with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gearbox.errors import UserError, nearest

GIB = 2**30
ANY_MEMORY = 2**62  # of a GPU that nobody has named


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str
    memory: int
    """Bytes, as nvidia-smi lists them."""
    tflops: float | None = None
    """Peak of dense products in bf16, or in fp16 on older GPUs, in 10^12 operations a second. None if unknown."""
    bandwidth: float = 0.0
    """Memory bandwidth, in 10^9 bytes a second."""
    link: float = 0.0
    """What it sends to others of its machine in one direction, in 10^9 bytes a second."""
    capability: float | None = None
    """Compute capability; bf16 is fast from 8.0 on."""
    source: str = ""


NVIDIA = "https://www.nvidia.com/en-us/data-center/"
# Memory by nvidia-smi. Rates without sparsity. Links: half of NVLink's rate for both directions, else of the PCI bus.
GPUS = [
    Gpu("T4", 15_360 * 2**20, 65, 320, 16, 7.5, NVIDIA + "tesla-t4/"),
    Gpu("V100-16GB", 16_384 * 2**20, 125, 900, 150, 7.0, NVIDIA + "v100/"),
    Gpu("V100-32GB", 32_768 * 2**20, 125, 900, 150, 7.0, NVIDIA + "v100/"),
    Gpu("A10", 23_028 * 2**20, 125, 600, 32, 8.6, NVIDIA + "products/a10-gpu/"),
    Gpu("A10G", 23_028 * 2**20, 70, 600, 32, 8.6, "https://aws.amazon.com/ec2/instance-types/g5/"),
    Gpu("L4", 23_034 * 2**20, 121, 300, 32, 8.9, NVIDIA + "l4/"),
    Gpu("L40S", 46_068 * 2**20, 362, 864, 32, 8.9, NVIDIA + "l40s/"),
    Gpu("A6000", 49_140 * 2**20, 155, 768, 56, 8.6, "https://www.nvidia.com/en-us/design-visualization/rtx-a6000/"),
    Gpu("RTX-3090", 24_576 * 2**20, 71, 936, 32, 8.6, "NVIDIA Ampere GA102 whitepaper, fp32 accumulation"),
    Gpu("RTX-4090", 24_564 * 2**20, 165, 1008, 32, 8.9, "NVIDIA Ada GPU architecture whitepaper, fp32 accumulation"),
    Gpu("RTX-5090", 32_607 * 2**20, 209, 1792, 64, 12.0, "NVIDIA RTX Blackwell whitepaper, fp32 accumulation"),
    Gpu("A100-40GB", 40_960 * 2**20, 312, 1555, 300, 8.0, NVIDIA + "a100/"),
    Gpu("A100-80GB", 81_920 * 2**20, 312, 2039, 300, 8.0, NVIDIA + "a100/"),
    Gpu("H100", 81_559 * 2**20, 989, 3350, 450, 9.0, NVIDIA + "h100/"),
    Gpu("H100-PCIe", 81_559 * 2**20, 756, 2000, 64, 9.0, NVIDIA + "h100/"),
    Gpu("H200", 143_771 * 2**20, 989, 4800, 450, 9.0, NVIDIA + "h200/"),
    Gpu("B200", 183_359 * 2**20, 2250, 8000, 900, 10.0, NVIDIA + "dgx-b200/"),
]
NAMES = {gpu.name.lower(): gpu for gpu in GPUS} | {"a100": GPUS[12], "a100-40g": GPUS[11], "a100-80g": GPUS[12]}
NAMES |= {gpu.name.lower().removeprefix("rtx-"): gpu for gpu in GPUS}
NAMES |= dict.fromkeys(("h100-80gb", "h100-sxm"), NAMES["h100"])
NETWORK = 25.0  # 10^9 bytes a second to other machines for each GPU: a 200 Gbit/s adapter
HOST_LINK = 25.0  # 10^9 bytes a second between a GPU and host memory: PCIe 4.0 x16, less its overhead


def kind_of(device_name: str) -> Gpu | None:
    """Return the GPU whose name is in a device's, such as "NVIDIA A100-SXM4-80GB". The longest name counts."""
    words = re.split(r"[\s-]+", device_name.lower())
    found = [gpu for gpu in GPUS if {*gpu.name.lower().split("-")} <= {*words}]
    return max(found, key=lambda gpu: len(gpu.name), default=None)


def gpu_named(text: str) -> Gpu:
    """Return the GPU that a name or a size such as 24GB means. Raise UserError for anything else."""
    wanted = re.sub(r"[\s_]+", "-", text.strip()).lower()
    if wanted in NAMES:
        return NAMES[wanted]
    if size := re.fullmatch(r"(\d{1,4}(?:\.\d+)?)-?g(?:i?b)?", wanted):
        if float(size[1]) > 0:
            return Gpu(text.strip(), round(float(size[1]) * GIB))
        raise UserError(f"--gpu: {text}: must be above 0; give a size such as 24GB")
    raise UserError(
        f"--gpu: {text!r} is unknown{nearest(wanted, list(NAMES))}; give one of "
        f"{', '.join(gpu.name for gpu in GPUS)}, or a size such as 24GB"
    )
