"""Drivers, GPUs and topologies of other machines are judged from the output of NVIDIA's tools."""

import torch

from gearbox.doctor import gpus


def test_drivers(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
    (tmp_path / "version").write_text(line + "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    assert gpus.driver_version(tmp_path / "version") == "580.95.05"
    assert gpus.driver_version(tmp_path / "none") is None
    assert gpus.torch_cuda() == torch.version.cuda

    def verdict(*given) -> tuple[str, str]:
        found = gpus.check_driver(*given)
        assert (found.colour == "green") == (not found.advice)
        return found.colour, found.text

    assert verdict("580.95.05", "13.0", 8) == ("green", "NVIDIA driver 580.95.05, torch's CUDA 13.0, 8 GPUs")
    assert verdict("550.144.03", "13.0", 0)[0] == "red" and "needs 580" in verdict("550.144.03", "13.0", 0)[1]
    assert verdict("550.144.03", "12.8", 8)[0] == "green"
    assert verdict("580.95.05", "13.0", 0)[0] == "red" and "sees no GPU" in verdict("580.95.05", "13.0", 0)[1]
    assert verdict("580.95.05", None, 0)[0] == "red"
    assert verdict(None, "13.0", 0)[0] == "green"


def test_gpus_that_are_in_use_broken_or_hot():
    row = "{}, NVIDIA H100 80GB HBM3, 81559, {}, {}, Not Active, {}\n"
    clean = "".join(row.format(i, 4, 0, "Not Active") for i in range(4))
    (found,) = gpus.check_gpus(clean)
    assert (found.colour, found.text) == ("green", "4 x NVIDIA H100 80GB HBM3 80 GiB, free")
    table = row.format(0, 70000, 0, "Not Active") + row.format(1, 4, 2, "Not Active") + row.format(2, 4, 0, "Active")
    colours = {finding.text: finding.colour for finding in gpus.check_gpus(table)}
    assert set(colours.values()) == {"yellow"}
    assert [*colours] == [
        "memory in use: 68.4 of 80 GiB on GPU 0",
        "GPU 1: 2 uncorrected ECC errors since the driver loaded",
        "GPU 2: clocks reduced by heat or power",
    ]
    (found,) = gpus.check_gpus("0, NVIDIA GeForce RTX 4090, 24564, 12, [N/A], Not Active, Not Active\n")
    assert found.colour == "green"


NVSWITCH = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
TWO_SOCKETS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tPHB\t16-31\t1
GPU3\tSYS\tSYS\tPHB\t X \t16-31\t1
"""


def test_topologies():
    (found,) = gpus.check_topology(NVSWITCH, 2)
    assert found.text == "NVLink between all 2 GPUs (NV18)"
    (found,) = gpus.check_topology(TWO_SOCKETS, 4)
    assert found.text.startswith(
        "pairs without NVLink: 4 over SYS (0-2, 0-3, 1-2, 1-3); 1 over PHB (2-3); SYS crosses CPU sockets"
    )
    assert [*gpus.check_topology(NVSWITCH, 1)] == [*gpus.check_topology("", 2)] == []
