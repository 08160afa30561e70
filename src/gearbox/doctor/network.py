"""This machine's place in the network: the address that the others are told, and the way to the hub. No torch."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping

import psutil

from gearbox.doctor.finding import Finding

HUB_SECONDS = 3.0


def network(num_machines: int, num_gpus: int) -> Finding:
    """Which address the other machines will be told."""
    host = socket.gethostname()
    try:
        resolved = sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
    except OSError:
        resolved = []
    interfaces = {
        name: [a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return interface(host, resolved, interfaces, num_machines, num_gpus, os.environ, _way_out())


def interface(
    host: str,
    resolved: list[str],
    interfaces: dict[str, list[str]],
    num_machines: int,
    num_gpus: int,
    environment: Mapping[str, str],
    way_out: str | None,
) -> Finding:
    """gloo listens on GLOO_SOCKET_IFNAME, else at what the host's name resolves to, else, silently, on the loopback.

    `interfaces` are this machine's, with their addresses; `way_out` is the address from which it reaches the first
    machine. NCCL takes any interface but the loopback by itself.
    """
    if num_machines == 1:
        return Finding("green", "address", "one machine: ranks talk within it")
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    usual = next((name for name, addresses in interfaces.items() if way_out in addresses), "eth0")
    advice = f"export GLOO_SOCKET_IFNAME={usual} NCCL_SOCKET_IFNAME={usual} on {host}, or mend its /etc/hosts"
    if chosen is not None:
        missing = [name for name in chosen.split(",") if name not in interfaces]
        if missing:
            there = ", ".join(sorted(interfaces))
            text = f"GLOO_SOCKET_IFNAME={chosen}, but the interfaces here are {there}; gloo wants a whole name"
            return Finding("red", "address", text, advice)
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    if num_gpus and wanted and not wanted.startswith("^") and not _matching(wanted, interfaces):
        text = f"NCCL_SOCKET_IFNAME={wanted} fits none of {', '.join(sorted(interfaces))}"
        return Finding("red", "address", text, advice)
    if chosen is not None:
        return Finding("green", "address", f"gloo listens on {chosen}, as GLOO_SOCKET_IFNAME says")
    own = {address: name for name, addresses in interfaces.items() for address in addresses}
    found = [address for address in resolved if address in own and not _is_loopback(address)]
    if found:
        return Finding("green", "address", f"{host} is {found[0]} on {own[found[0]]}")
    said = f"resolves to {', '.join(resolved)}" if resolved else "does not resolve"
    text = f"{host} {said}: gloo would tell {num_machines - 1} other machines an address that is not this one's"
    return Finding("red", "address", text, advice)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _matching(wanted: str, interfaces: dict[str, list[str]]) -> bool:
    """As NCCL reads it: beginnings of names, or with = whole names."""
    names = wanted.removeprefix("=").split(",")
    whole = wanted.startswith("=")
    return any(name == found if whole else found.startswith(name) for name in names for found in interfaces)


def _way_out() -> str | None:
    """This machine's address on the way to the first one. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), int(os.environ.get("MASTER_PORT", "9")) or 9))
            return found.getsockname()[0]
    except (OSError, ValueError):
        return None


def hub_reachable(environment: Mapping[str, str]) -> Finding:
    """Whether models and data can be fetched. Never red: they may be here already."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return Finding("green", "hub", f"{name} is set: nothing is fetched")
    address = environment.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_SECONDS)
        return Finding("green", "hub", f"{address} answers")
    except urllib.error.HTTPError:  # it answers, if only to refuse this
        return Finding("green", "hub", f"{address} answers")
    except (OSError, ValueError) as error:
        return _no_hub(address, str(getattr(error, "reason", error)))


def _no_hub(address: str, why: str) -> Finding:
    advice = "fetch models beforehand and set HF_HUB_OFFLINE=1, or name folders in model.name and data.path"
    return Finding("yellow", "hub", f"{address} does not answer: {why}", advice)


def in_background(work: Callable[[], Finding]) -> Callable[[], Finding]:
    """Begin the work; the call that is returned waits for it, but never long: a resolver can block for a minute."""
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    deadline = time.monotonic() + HUB_SECONDS

    def wait() -> Finding:
        thread.join(max(0.0, deadline - time.monotonic()))
        return found[0] if found else _no_hub("the hub", f"not within {HUB_SECONDS:g} s")

    return wait
