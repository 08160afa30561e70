"""Find the gear that this process was launched with."""

from __future__ import annotations

import os
from pathlib import Path

from gearbox import ROOT
from gearbox.config.gear import Gear, load_gear
from gearbox.config.gear_keys import BARE_FLAGS, SHORT_FLAGS
from gearbox.launch.environment import LaunchEnvironment
from gearbox.processes import launcher_command

LAUNCHERS = {"accelerate-launch", "accelerate.commands.launch", "launch.py"}


def find_gear() -> Gear:
    """Return this process's gear. Raise UserError with every problem."""
    return load_gear(*gear_file())


def gear_file() -> tuple[Path, dict[str, str]]:
    """Return the file of this process's gear, and the launcher's flags.

    It is the config file on the launcher's command line, or Accelerate's default file.

    Without Accelerate's launcher, the gear is single. Under torchrun it is ddp, even with one rank, because an elastic
    job may have more ranks later.
    """
    command = launcher_command()
    flags = _launcher_flags(command) if command else {}
    if "config_file" in flags:
        return Path(flags["config_file"]), flags
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    default = Path(os.environ.get("HF_HOME", cache / "huggingface"), "accelerate", "default_config.yaml").expanduser()
    if command and default.is_file():
        return default, flags
    launched = LaunchEnvironment.read()
    name = "ddp" if launched.is_elastic or launched.size != 1 else "single"
    return ROOT / "accelerate_configs" / f"{name}.yaml", {"num_processes": str(launched.size)} | flags


def _launcher_flags(command: list[str]) -> dict[str, str]:
    """Return the flags of a launcher's command line by name, up to the script. A flag without a value is "true"."""
    names = [Path(word).name for word in command]
    start = next((i for i, name in enumerate(names) if name in LAUNCHERS or (name == "launch" and i > 0)), 0)
    words = iter(command[start + 1 :])
    flags = {}
    for word in words:
        if not word.startswith("-") or word == "--":
            break  # the remaining arguments belong to the script
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")  # Accelerate accepts both spellings
        name = SHORT_FLAGS.get(name, name)
        flags[name] = value if equals else "true" if name in BARE_FLAGS else next(words, "")
    return flags
