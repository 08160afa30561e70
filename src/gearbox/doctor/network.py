"""Check this machine's network: InfiniBand, the address that other machines get, and the Hub. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from gearbox.doctor.finding import Finding, shorten
from gearbox.launch.environment import LaunchEnvironment

HUB_SECONDS = 3.0
RDMA_DEVICES = Path("/sys/class/infiniband")
RDMA_LIBRARY = "libibverbs.so.1"  # the name that NCCL opens
RDMA_PACKAGES = "libibverbs1 ibverbs-providers librdmacm1"


@dataclass(frozen=True)
class HostAddresses:
    """The name and the addresses of this machine."""

    host: str
    resolved: list[str]
    """The addresses that its name resolves to."""
    interfaces: dict[str, list[str]]
    """The addresses of each network interface."""
    way_out: str | None
    """Its address on the route to the first machine."""


def rdma_devices(folder: Path = RDMA_DEVICES) -> list[str]:
    """Return the names of this machine's InfiniBand and RoCE devices, such as mlx5_0."""
    return sorted(path.name for path in folder.glob("*"))


def check_rdma(devices: Sequence[str], library: str = RDMA_LIBRARY) -> Finding:
    """Check that the library opens through which NCCL uses these devices."""
    if not devices:
        return Finding("green", "rdma", "no InfiniBand or RoCE device")
    try:
        ctypes.CDLL(library)
    except OSError:
        text = f"{shorten(devices)} cannot be used without {library}; NCCL between machines falls back to sockets"
        return Finding("yellow", "rdma", text, f"apt-get install {RDMA_PACKAGES}, or use the Docker image")
    return Finding("green", "rdma", f"{shorten(devices)}; {library} opens")


def inspect_address(num_machines: int, num_gpus: int) -> Finding:
    """Check which address of this machine the other machines get."""
    host = socket.gethostname()
    try:
        resolved = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError:
        resolved = []
    interfaces = {
        name: [a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    addresses = HostAddresses(host, resolved, interfaces, _way_out())
    return check_address(addresses, num_machines, num_gpus, os.environ)


def check_address(
    addresses: HostAddresses, num_machines: int, num_gpus: int, environment: Mapping[str, str]
) -> Finding:
    """Check the interface that gloo listens on, and NCCL's if the environment sets one.

    gloo listens on GLOO_SOCKET_IFNAME, else on the address of the host's name, else silently on the loopback. NCCL
    picks any interface except the loopback.
    """
    if num_machines == 1:
        return Finding("green", "address", "one machine; no other machine needs its address")
    host, resolved, interfaces = addresses.host, addresses.resolved, addresses.interfaces
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    usual = next((name for name, own in interfaces.items() if addresses.way_out in own), "eth0")
    advice = f"export GLOO_SOCKET_IFNAME={usual} NCCL_SOCKET_IFNAME={usual} on {host}, or fix its /etc/hosts"
    if chosen is not None:
        missing = [name for name in chosen.split(",") if name not in interfaces]
        if missing:
            there = ", ".join(sorted(interfaces))
            text = f"GLOO_SOCKET_IFNAME={chosen} is not an interface; gloo needs a full name: {there}"
            return Finding("red", "address", text, advice)
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    if num_gpus and wanted and not wanted.startswith("^") and not _matching(wanted, interfaces):
        text = f"NCCL_SOCKET_IFNAME={wanted} matches none of {', '.join(sorted(interfaces))}"
        return Finding("red", "address", text, advice)
    if chosen is not None:
        return Finding("green", "address", f"gloo listens on {chosen} (GLOO_SOCKET_IFNAME)")
    interface_of = {address: name for name, own in interfaces.items() for address in own}
    usable = [address for address in resolved if address in interface_of and not _is_loopback(address)]
    if usable:
        return Finding("green", "address", f"{host} is {usable[0]} on {interface_of[usable[0]]}")
    problem = f"resolves to {', '.join(resolved)}" if resolved else "does not resolve"
    text = f"{host} {problem}: gloo would give {num_machines - 1} other machines a wrong address"
    return Finding("red", "address", text, advice)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _matching(wanted: str, interfaces: dict[str, list[str]]) -> bool:
    """Return whether NCCL finds an interface: it matches prefixes, or with a leading = full names."""
    names = wanted.removeprefix("=").split(",")
    whole = wanted.startswith("=")
    return any(name == found if whole else found.startswith(name) for name in names for found in interfaces)


def _way_out() -> str | None:
    """Return this machine's address on the route to the first machine, without sending a packet."""
    launched = LaunchEnvironment.read()
    host = launched.store_host if launched.is_rank else "192.0.2.1"  # a documentation address (TEST-NET-1)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, launched.store_port or 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def check_hub(environment: Mapping[str, str]) -> Finding:
    """Check that models and data can be downloaded. Never red: they may be on disk already."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return Finding("green", "hub", f"{name} is set; nothing is downloaded")
    address = environment.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_SECONDS)
    except urllib.error.HTTPError:
        pass  # an error status is an answer too
    except (OSError, ValueError) as error:
        return _no_hub(address, str(getattr(error, "reason", error)))
    return Finding("green", "hub", f"{address} answers")


def _no_hub(address: str, why: str) -> Finding:
    advice = "download models first and set HF_HUB_OFFLINE=1, or use local folders in model.name and data.path"
    return Finding("yellow", "hub", f"{address} does not answer: {why}", advice)


def in_background(work: Callable[[], Finding]) -> Callable[[], Finding]:
    """Start the work; return a function that waits at most HUB_SECONDS for it. A resolver can block for a minute."""
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    deadline = time.monotonic() + HUB_SECONDS

    def wait() -> Finding:
        thread.join(max(0.0, deadline - time.monotonic()))
        return found[0] if found else _no_hub("the Hub", f"no answer within {HUB_SECONDS:g} s")

    return wait
