"""The doctor checks InfiniBand, the address that other machines get, and access to the Hub."""

import ctypes.util
import threading

import pytest

from gearbox.doctor import network


@pytest.mark.parametrize(
    ("resolved", "environment", "colour", "words"),
    [
        (["127.0.1.1"], {}, "red", "node1 resolves to 127.0.1.1: gloo would give 1 other machines a wrong address"),
        (["127.0.0.1", "::1"], {}, "red", "node1 resolves to 127.0.0.1"),
        ([], {}, "red", "node1 does not resolve"),
        (["10.9.9.9"], {}, "red", "node1 resolves to 10.9.9.9"),  # no interface has this address
        (["127.0.1.1", "10.0.0.5"], {}, "green", "node1 is 10.0.0.5 on eth1"),
        (["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth1"}, "green", "eth1"),
        (
            ["10.0.0.5"],
            {"GLOO_SOCKET_IFNAME": "^lo"},
            "red",
            "GLOO_SOCKET_IFNAME=^lo is not an interface; gloo needs a full name",
        ),
        (["10.0.0.5"], {"NCCL_SOCKET_IFNAME": "ib"}, "red", "NCCL_SOCKET_IFNAME=ib matches none"),
        (["10.0.0.5"], {"NCCL_SOCKET_IFNAME": "eth"}, "green", "eth1"),
        (["10.0.0.5"], {"NCCL_SOCKET_IFNAME": "=eth"}, "red", "matches none"),
    ],
)
def test_the_address_that_other_machines_get(resolved, environment, colour, words):
    interfaces = {"lo": ["127.0.0.1"], "eth1": ["10.0.0.5"]}
    addresses = network.HostAddresses("node1", resolved, interfaces, way_out="10.0.0.5")
    found = network.check_address(addresses, 2, 8, environment)
    assert found.colour == colour and words in found.text
    if colour == "red":
        assert "GLOO_SOCKET_IFNAME=eth1" in found.advice  # the interface on the route to the first machine
    alone = network.check_address(addresses, 1, 8, environment)
    assert alone.colour == "green"


def test_infiniband_without_its_library(tmp_path):
    assert network.rdma_devices(tmp_path / "none") == network.rdma_devices(tmp_path) == []
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    devices = network.rdma_devices(tmp_path)
    assert network.check_rdma([], "libnone.so.1").colour == "green"
    found = network.check_rdma(devices, "libnone.so.1")
    assert found.colour == "yellow"
    assert found.text.startswith("mlx5_0, mlx5_1 cannot be used without libnone.so.1; NCCL between machines falls back")
    assert network.check_rdma(devices, ctypes.util.find_library("c")).colour == "green"
    assert network.RDMA_PACKAGES in found.advice


def test_the_hub_never_blocks_and_is_never_red(monkeypatch):
    assert network.check_hub({"HF_HUB_OFFLINE": "1"}).colour == "green"
    found = network.check_hub({"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert found.colour == "yellow" and "http://127.0.0.1:9" in found.text
    monkeypatch.setattr(network, "HUB_SECONDS", 0.1)
    assert network.in_background(lambda: threading.Event().wait())().colour == "yellow"
