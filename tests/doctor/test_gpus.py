"""Drivers, GPUs and topologies of other machines are judged from the output of NVIDIA's tools."""

import json
import sys

import pytest
import torch

from gearbox.doctor import gpus, nvidia_smi


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


NVIDIA_SMI = """\
#!{python}
import json, sys
gpus = json.load(open({gpus!r}))
if sys.argv[1].startswith("--query-gpu="):
    fields = sys.argv[1].partition("=")[2].split(",")
    for field in fields:
        if field not in gpus[0]:
            sys.exit(print(f'Field "{{field}}" is not a valid field to query.') or 2)
    for gpu in gpus:
        print(", ".join(gpu[field] for field in fields))
"""
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "memory.used": "4",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "clocks_throttle_reasons.sw_thermal_slowdown": "Not Active",
    "compute_cap": "9.0",
}


@pytest.fixture
def install_gpus(tmp_path, monkeypatch):
    """Install an nvidia-smi that prints the fields of these GPUs, and refuses others as the real one does."""

    def install(*gpus: dict[str, str]) -> None:
        described = [{"index": str(index), **gpu} for index, gpu in enumerate(gpus)]
        (tmp_path / "gpus.json").write_text(json.dumps(described))
        path = tmp_path / "nvidia-smi"
        path.write_text(NVIDIA_SMI.format(python=sys.executable, gpus=str(tmp_path / "gpus.json")))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def test_gpus_that_are_in_use_broken_or_hot(install_gpus):
    install_gpus(*[H100] * 4)
    (found,) = gpus.check_gpus(nvidia_smi.query_gpus(gpus.FIELDS))
    assert (found.colour, found.text) == ("green", "4 x NVIDIA H100 80GB HBM3 80 GiB, free")
    install_gpus(
        H100 | {"memory.used": "70000"},
        H100 | {"ecc.errors.uncorrected.volatile.total": "2"},
        H100 | {"clocks_throttle_reasons.sw_thermal_slowdown": "Active"},
    )
    colours = {finding.text: finding.colour for finding in gpus.check_gpus(nvidia_smi.query_gpus(gpus.FIELDS))}
    assert set(colours.values()) == {"yellow"}
    assert [*colours] == [
        "memory in use: 68.4 of 80 GiB on GPU 0",
        "GPU 1: 2 uncorrected ECC errors since the driver loaded",
        "GPU 2: clocks reduced by heat or power",
    ]
    install_gpus(H100 | {"name": "NVIDIA GeForce RTX 4090", "ecc.errors.uncorrected.volatile.total": "[N/A]"})
    (found,) = gpus.check_gpus(nvidia_smi.query_gpus(gpus.FIELDS))
    assert found.colour == "green"


def test_a_field_that_a_driver_dropped_hides_only_itself(install_gpus):
    for dropped in gpus.FIELDS:
        left = {field: value for field, value in H100.items() if field != dropped}
        install_gpus(left, left)
        (found,) = gpus.check_gpus(nvidia_smi.query_gpus(gpus.FIELDS))
        assert found.colour == "green" and found.text.endswith(f", free; nvidia-smi lacks {dropped}")
    left = {field: value for field, value in H100.items() if field not in gpus.SLOWDOWNS}
    install_gpus(left, left | {"memory.used": "70000"})
    (found,) = gpus.check_gpus(nvidia_smi.query_gpus(gpus.FIELDS))
    assert found.text == "memory in use: 68.4 of 80 GiB on GPU 1"


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
    (found,) = gpus.check_topology(NVSWITCH, [0, 1])
    assert found.text == "NVLink between all 2 GPUs (NV18)"
    (found,) = gpus.check_topology(TWO_SOCKETS, range(4))
    assert found.text.startswith(
        "pairs without NVLink: 4 over SYS (0-2, 0-3, 1-2, 1-3); 1 over PHB (2-3); SYS crosses CPU sockets"
    )
    (found,) = gpus.check_topology(TWO_SOCKETS, [3, 1])
    assert found.text.startswith("pairs without NVLink: 1 over SYS (1-3);")
    assert [*gpus.check_topology(NVSWITCH, [1])] == [*gpus.check_topology("", [0, 1])] == []


PEERS = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tTNS\t
 GPU1\tOK\tX\tCNS\t
 GPU2\tTNS\tCNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def test_pairs_without_peer_access():
    (found,) = gpus.check_peers(PEERS, [0, 1])
    assert (found.colour, found.text) == ("green", "every GPU reads the memory of every other")
    (found,) = gpus.check_peers(PEERS, [0, 1, 2])
    assert found.colour == "yellow"
    assert "0-2 not supported by the topology; 1-2 not supported by the chipset" in found.text
    assert [*gpus.check_peers(PEERS, [1])] == []


def test_gpus_without_bf16():
    def verdicts(*capabilities: str) -> list[tuple[str, str]]:
        rows = [{"index": str(index), "compute_cap": text} for index, text in enumerate(capabilities)]
        return [(found.colour, found.text) for found in gpus.check_bf16(rows)]

    assert verdicts("9.0", "8.0", "10.0") == [("green", "compute capability 10.0, 8.0, 9.0")]
    ((colour, text),) = verdicts("8.6", "7.5")
    assert colour == "yellow" and text.startswith("compute capability of GPU 1 (7.5) is below 8.0")
    assert verdicts("[N/A]") == [*gpus.check_bf16([{"index": "0"}])] == []


LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1f2a0000-0000-0000-0000-000000000000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1f2b0000-0000-0000-0000-000000000000)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-77770000-0000-0000-0000-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-aaaa0000-0000-0000-0000-000000000000)
  MIG 3g.20gb     Device  1: (UUID: MIG-aaab0000-0000-0000-0000-000000000000)
"""


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1gpu", [1]),
        ("0,3,1", [0]),  # there is no GPU 3, and the list ends there
        ("0,-1,1", [0]),
        ("0,GPU-7777", [0]),
        ("1,1", []),
        ("GPU-1f2b,GPU-7777", [1, 2]),
        ("GPU-1f2", []),  # the first characters of two GPUs
        ("GPU-7777,GPU-none,GPU-1f2a", [2]),
        ("GPU-7777,0", [2]),
        ("GPU-7777,GPU-77770", []),
        ("MIG-aaab0000-0000-0000-0000-000000000000", [2]),
        ("MIG-aaaa,MIG-aaab", [2]),
        ("MIG-aaa", []),
        ("none", []),
    ],
)
def test_only_the_gpus_that_cuda_shows(chosen, visible):
    assert nvidia_smi.visible_gpus(LISTING, chosen) == visible
