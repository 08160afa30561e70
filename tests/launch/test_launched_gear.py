"""Test which gear a process finds: from the launcher's flags, or from its ranks without flags."""

import os
import re

import pytest

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.launch import environment, launched_gear
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
        (
            "/bin/accelerate launch -m --debug -t 3 --num_processes 3 --config_file a.yaml src.train",
            ("a.yaml", "3"),
        ),
        (
            "python -m accelerate.commands.accelerate_cli launch -q --config_file a.yaml src/x.py",
            ("a.yaml", None),
        ),
        ("accelerate-launch --config_file launch.py --num_processes 3 src/train.py", ("launch.py", "3")),
        (
            "accelerate launch --main_process_ip a.py --config_file a.yaml -- a.py --num_processes 3",
            ("a.yaml", None),
        ),
        ("accelerate launch --no_python --config_file a.yaml python --num_processes 3", ("a.yaml", None)),
    ],
)
def test_launcher_flags_are_read_in_both_spellings_and_only_before_the_script(command, flags):
    found = launched_gear._launcher_flags(command.split())
    assert (found.get("config_file"), found.get("num_processes")) == flags


COMMANDS = {
    "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 src/train.py":
        "--use_fsdp: does not fit this gear, whose distributed_type is MULTI_GPU",
    "accelerate launch --num_processes 3 --gradient_accumulation_steps 4 src/train.py":
        "--gradient_accumulation_steps=4: follows from the recipe (batch.rows, batch.micro_rows)",
    "accelerate launch --config_file accelerate_configs/fsdp.yaml --use_deepspeed src/train.py":
        "--use_deepspeed: does not fit this gear, whose distributed_type is FSDP",
    "accelerate launch --dynamo-backend inductor --num_processes 2 src/train.py":
        "--dynamo_backend=inductor: is decided by the recipe (perf.compile); remove it",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_that_the_run_would_not_honour_is_refused(monkeypatch, tmp_path, command):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launched_gear, "launcher_command", command.split)
    with pytest.raises(UserError, match=f"^{re.escape(COMMANDS[command])}"):
        find_gear()


def test_a_launcher_that_starts_fewer_ranks_than_asked_is_noticed(monkeypatch, tmp_path):
    """Accelerate starts one process if it finds no GPU and no config file, even with --num_processes 2."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(launched_gear, "launcher_command", "accelerate launch --num_processes 2 src/train.py".split)
    with pytest.raises(UserError, match=r"^--num_processes=2: 2 ranks, but distributed_type is"):
        find_gear()


@pytest.mark.parametrize(("variable", "folder"), [("HF_HOME", "."), ("XDG_CACHE_HOME", "huggingface")])
def test_the_default_file_is_the_one_that_accelerate_reads(monkeypatch, tmp_path, variable, folder):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / folder / "accelerate").mkdir(parents=True)
    default = tmp_path / folder / "accelerate" / "default_config.yaml"
    default.write_text((ROOT / "accelerate_configs/fsdp.yaml").read_text())
    monkeypatch.setattr(launched_gear, "launcher_command", "accelerate launch src/train.py".split)
    assert find_gear().path.resolve() == default.resolve()


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", None])
def test_the_allocator_of_a_gpu_grows_its_segments_unless_the_user_sets_it(monkeypatch, given):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    environment.let_segments_grow()
    found = {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert found == ({given: "max_split_size_mb:64"} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
