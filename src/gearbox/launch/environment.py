"""The environment variables that torch's launcher sets for a rank. No other module reads these names."""

from __future__ import annotations

import os
from dataclasses import dataclass

# How the names begin that torch's, accelerate's and our own launcher set.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC"),
    *("OMP_", "ACCELERATE", "FSDP_", "GEARBOX_"),
)


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among the ranks of its launcher. A process without a launcher has the defaults."""

    rank: int = 0
    size: int = 1
    """Ranks of the whole run."""
    local_rank: int = 0
    local_size: int = 1
    """Ranks of this machine."""
    num_launchers: int = 1
    """Launchers that have met, one for each machine; two of them can share a host."""
    restart_count: int = 0
    """How often torch's launcher has restarted the ranks."""
    is_rank: bool = False
    """Whether a launcher started this process, even as the only rank."""
    is_elastic: bool = False
    """Whether that launcher is torch's agent, which accelerate's and torchrun's are."""
    store_host: str = "127.0.0.1"
    """The host of the store where the ranks meet."""
    store_port: int = 0
    """0 where none is given, or no number: Kubernetes gives a service named `master` this name too."""
    agent_has_store: bool = False
    """Whether the first machine's launcher already keeps that store."""

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Read the environment of this process as it is now."""

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        port = os.environ.get("MASTER_PORT", "")
        return cls(
            rank=number("RANK", 0),
            size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_size=number("LOCAL_WORLD_SIZE", 1),
            num_launchers=number("GROUP_WORLD_SIZE", 1),
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
            is_rank="RANK" in os.environ,
            is_elastic="TORCHELASTIC_RUN_ID" in os.environ,
            store_host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            store_port=int(port) if port.isdecimal() else 0,
            agent_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def without_launcher() -> dict[str, str]:
    """Return this process's environment without what a launcher gives its ranks, for a process that is not one."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
