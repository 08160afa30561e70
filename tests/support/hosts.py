"""Create two hosts on this machine: network namespaces on a bridge, with their own hostnames and shared files."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from string import ascii_lowercase

PAIRS = count()


def why_not() -> str | None:
    """Return why hosts cannot be created here, or None if they can."""
    if os.geteuid() != 0:
        return "two hosts in network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]:
        return f"two hosts need {', '.join(missing)}: apt-get install iproute2 util-linux hostname"
    name = f"gb{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True)
class Host:
    """A host: a network namespace, its address and its link to the bridge."""

    name: str
    address: str
    namespace: str
    cable: str
    """The end of its link at the bridge."""

    def command(self, *argv: str) -> list[str]:
        """Return a command line that runs `argv` on this host."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.namespace, *named, *argv]

    def start(self, *argv: str, output: Path, environment: dict[str, str] | None = None) -> subprocess.Popen:
        with output.open("a") as file:
            return subprocess.Popen(self.command(*argv), stdout=file, stderr=file, env=os.environ | (environment or {}))

    def link(self, is_up: bool) -> None:
        """Connect or disconnect the host."""
        ip("link", "set", self.cable, "up" if is_up else "down")

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self) -> None:
        """Kill all processes on the host, like a power cut."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def remove_leftovers() -> None:
    """Remove the hosts of killed test runs."""
    known = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for bridge, pid in {match.groups() for match in re.finditer(r"^(gb(\d+)[a-z])-\d\b", known, re.M)}:
        if not Path("/proc", pid).exists():
            for i in (1, 2):
                _remove(Host(f"node{i}", "", f"{bridge}-{i}", f"{bridge}{i}"))
            subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _remove(host: Host) -> None:
    host.kill()
    subprocess.run(
        ["ip", "link", "del", host.cable], capture_output=True, check=False
    )  # a closed socket may keep it alive
    subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
    shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)


@contextmanager
def two_hosts(*names: str, domain: str = "") -> Iterator[tuple[Host, Host]]:
    """Yield two connected hosts, node1 and node2 by default. This machine is address 1 of their network."""
    remove_leftovers()
    pid, pair = os.getpid(), next(PAIRS)
    network = f"10.{70 + (pid // 250 + pair) % 50}.{pid % 250}"
    bridge = f"gb{pid}{ascii_lowercase[pair % 26]}"
    named = enumerate(names or ("node1", "node2"), start=1)
    hosts = [Host(name, f"{network}.{10 + i}", f"{bridge}-{i}", f"{bridge}{i}") for i, name in named]
    folders = [Path("/etc/netns") / host.namespace for host in hosts]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", f"{network}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host, folder in zip(hosts, folders, strict=True):
            ip("netns", "add", host.namespace)
            ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            ip("link", "set", host.cable, "master", bridge)
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.namespace, "link", "set", device, "up")
            host.link(is_up=True)
            folder.mkdir(parents=True)  # `ip netns exec` mounts its files over those in /etc
            known = [f"{one.address} {f'{one.name}.{domain} ' if domain else ''}{one.name}" for one in hosts]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known]) + "\n")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            _remove(host)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
