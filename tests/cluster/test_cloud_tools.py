"""`make clouds-test`: SkyPilot and dstack read the files of cluster/ and the command lines of docs/clouds.md."""

import argparse
import copy
import re
import shlex

import pytest

from gearbox import ROOT
from gearbox.launch import outcome
from support import clouds

sky = pytest.importorskip("sky", reason="skypilot is not installed: make clouds-test")
pytest.importorskip("dstack", reason="dstack is not installed: make clouds-test")
pytestmark = [pytest.mark.long, pytest.mark.clouds, pytest.mark.unit]

DOCUMENT = (ROOT / "docs" / "clouds.md").read_text()


def lines(tool: str, path) -> list[str]:
    """Return the command lines of a tool in the document and in the comments of its file."""
    found = re.findall(rf"^(?:#   )?({tool} .+)$", f"{DOCUMENT}\n{path.read_text()}", re.M)
    return list(dict.fromkeys(found))


# ---------------------------------------------------------------------------- SkyPilot


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


def test_skypilot_reads_the_task(home):
    task = sky.Task.from_yaml(str(clouds.SKYPILOT))
    (resources,) = task.resources
    assert resources.use_spot and resources.accelerators == {"H100": 8} and task.num_nodes == 1
    ((path, bucket),) = task.storage_mounts.items()
    assert path == "/checkpoints" and bucket.mode == sky.StorageMode.MOUNT and bucket.persistent
    assert set(task.envs) >= {"GEAR", "RECIPE", "NAME", "OVERRIDES", "RANKS"} and "HF_TOKEN" in task.secrets
    assert sky.Task.from_yaml_config(task.to_yaml_config()).to_yaml_config()["run"] == task.run


def test_skypilot_refuses_a_misspelt_key(home):
    for change in (
        lambda config: config["resources"]["job_recovery"].update(recover_on_exit_codes=[300]),
        lambda config: config["resources"]["job_recovery"].update(recover_on_exit_codes="saved"),
        lambda config: config["resources"].update(use_spots=True),
        lambda config: config.update(file_mount={}),
        lambda config: config["file_mounts"]["/checkpoints"].update(mode="MOUNTED"),
    ):
        config = copy.deepcopy(clouds.load(clouds.SKYPILOT))
        change(config)
        with pytest.raises((ValueError, sky.exceptions.InvalidSkyPilotConfigError)):
            sky.Task.from_yaml_config(config)


@pytest.mark.parametrize(
    ("codes", "restarts"),
    [
        ([outcome.EXIT_SAVED], True),
        ([137, outcome.EXIT_SAVED], True),  # SkyPilot kills the other nodes when one has ended
        ([outcome.EXIT_USER_ERROR], False),
        ([outcome.EXIT_FAILED], False),
        ([outcome.EXIT_CRASHED, 137], False),
    ],
)
def test_the_controller_of_skypilot_recovers_what_was_saved(home, codes, restarts):
    from sky.jobs.recovery_strategy import StrategyExecutor

    executor = object.__new__(StrategyExecutor)
    (resources,) = sky.Task.from_yaml(str(clouds.SKYPILOT)).resources
    recovery = dict(resources.job_recovery)
    executor.recover_on_exit_codes = recovery.pop("recover_on_exit_codes")
    executor.max_restarts_on_errors = recovery.pop("max_restarts_on_errors", 0)
    executor.restart_cnt_on_failure = 0
    assert recovery == {"strategy": None}
    for _ in range(10):
        assert executor.should_restart_on_failure(codes) is restarts


def test_skypilot_sets_the_variables_that_the_command_reads():
    from sky.skylet import constants

    names = {value for name, value in vars(constants).items() if name.startswith("SKYPILOT_")}
    used = set(re.findall(r"\$\{?(SKYPILOT_\w+)", clouds.load(clouds.SKYPILOT)["run"]))
    assert used == {name for name in clouds.sky_environment(0, ["a"], 1) if name.startswith("SKYPILOT_")}
    assert len(used) == 4 and used <= names


@pytest.mark.parametrize("line", lines("sky", clouds.SKYPILOT))
def test_skypilot_accepts_the_line(home, line, monkeypatch):
    """Read each line with its own parser, and run nothing."""
    from sky.client.cli import command

    monkeypatch.setenv("HF_TOKEN", "hf_none")
    group, words = command.cli, shlex.split(line)[1:]
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context(group.name, words)


# ---------------------------------------------------------------------------- dstack


@pytest.mark.parametrize("path", [clouds.DSTACK, clouds.DSTACK_VOLUME], ids=lambda path: path.name)
def test_dstack_reads_the_file(path):
    from dstack._internal.core.errors import ConfigurationError
    from dstack._internal.core.models.configurations import parse_apply_configuration

    given = clouds.load(path)
    found = parse_apply_configuration(given)
    assert found.name == given["name"] and found.type == given["type"]
    with pytest.raises(ConfigurationError):
        parse_apply_configuration(given | {"nods": 2})
    if path == clouds.DSTACK:
        assert [event.value for event in found.retry.on_events] == given["retry"]["on_events"]
        assert found.commands == given["commands"] and found.volumes[0].name == "gearbox-runs"
        assert found.volumes[0].path == "/gearbox/runs" and found.resources.gpu.count.min == 8
        with pytest.raises(ConfigurationError):
            parse_apply_configuration(given | {"retry": {"on_events": ["saved"]}})


def test_dstack_takes_an_error_for_all_codes():
    """Show why the file does not retry errors: 2 and 93 would be repeated as 85 is."""
    from dstack._internal.core.models.profiles import RetryEvent
    from dstack._internal.core.models.runs import JobTerminationReason

    assert JobTerminationReason.CONTAINER_EXITED_WITH_ERROR.to_retry_event() == RetryEvent.ERROR
    assert JobTerminationReason.INTERRUPTED_BY_NO_CAPACITY.to_retry_event() == RetryEvent.INTERRUPTION


@pytest.mark.parametrize("line", lines("dstack", clouds.DSTACK))
def test_dstack_accepts_the_line(line):
    from dstack._internal.cli.commands.apply import ApplyCommand
    from dstack._internal.cli.commands.stop import StopCommand
    from dstack._internal.cli.services.configurators.run import TaskConfigurator
    from dstack._internal.cli.services.configurators.volume import VolumeConfigurator

    words = shlex.split(line)[1:]
    parser = argparse.ArgumentParser(exit_on_error=False)
    subparsers = parser.add_subparsers()
    ApplyCommand.register(subparsers)
    StopCommand.register(subparsers)
    known, rest = parser.parse_known_args(words)
    if words[0] == "apply":
        configurator = VolumeConfigurator if "volume" in known.configuration_file else TaskConfigurator
        own = argparse.ArgumentParser(exit_on_error=False)
        configurator.register_args(own)
        rest = own.parse_known_args(rest)[1]
    assert rest == []
