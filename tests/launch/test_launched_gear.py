"""Test which gear a process finds: from the launcher's flags, or from its ranks without flags."""

import pytest

from gearbox.launch import launched_gear
from gearbox.launch.launched_gear import find_gear


@pytest.mark.parametrize(
    ("environment", "name", "ranks"),
    [
        ({}, "single", 1),
        ({"WORLD_SIZE": "1"}, "single", 1),
        ({"WORLD_SIZE": "3"}, "ddp", 3),
        ({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, "ddp", 1),  # torchrun's process group has one rank
    ],
)
def test_without_a_launcher_the_number_of_ranks_chooses_the_gear(monkeypatch, environment, name, ranks):
    for variable in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    gear = find_gear()
    assert (gear.name, gear.num_processes) == (name, ranks)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("accelerate launch --config_file a.yaml --num_processes 3 src/train.py", ("a.yaml", "3")),
        ("accelerate launch --config-file=a.yaml --num-processes=3 src/train.py", ("a.yaml", "3")),
        ("accelerate launch --config_file a.yaml src/train.py --num_processes=9", ("a.yaml", None)),
        ("python -m accelerate.commands.launch --config_file", ("", None)),
    ],
)
def test_launcher_flags_are_read_in_both_spellings_and_only_before_the_script(command, flags):
    found = launched_gear._launcher_flags(command.split())
    assert (found.get("config_file"), found.get("num_processes")) == flags
