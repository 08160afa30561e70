"""Test the flags of src/launch.py: each is passed to Accelerate's launcher, or refused by name in one line."""

import re

import pytest

import launch as launch_script
from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.launch import topology


@pytest.fixture(autouse=True)
def no_machines(monkeypatch):
    for name in [*[name for names in topology.NODE_FLAGS.values() for name in names], topology.RANKS_PER_NODE]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)


def launched(monkeypatch, *arguments: str) -> list[str]:
    """Return the flags with which launch.py would start Accelerate's launcher."""
    given = []
    monkeypatch.setattr(launch_script.supervisor, "supervise", lambda flags, *_, **__: given.extend(flags) or 0)
    assert launch_script.main(list(arguments)) == 0
    return given


def test_flags_reach_the_launcher_in_its_spelling(monkeypatch):
    from accelerate.commands.launch import launch_command_parser

    flags = launched(
        monkeypatch, "ddp", "--num-processes=2", "--debug", "-q", "--tee=3", "--log_dir=a=b", "--multi_gpu"
    )
    assert flags[1:] == ["--num_processes=2", "--debug", "--quiet", "--tee=3", "--log_dir=a=b", "--multi_gpu"]
    parsed = launch_command_parser().parse_args([*flags, "src/train.py"])
    assert (parsed.num_processes, parsed.debug, parsed.tee, parsed.log_dir) == (2, True, "3", "a=b")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("single --num_processes=3", '--num_processes=3: 3 ranks, but distributed_type is "NO"; use 1'),
        ("ddp --lr=3", "--lr=3: unknown flag; a key of the recipe has no dashes: optim.lr=3"),
        ("ddp --rows", "--rows: unknown flag; a key of the recipe has no dashes: batch.rows=VALUE"),
        ("ddp --num_proceses=3", "--num_proceses=3: unknown flag; did you mean 'num_processes'?"),
        ("ddp --zzz=3", "--zzz=3: unknown flag; a key of the recipe is written as key.sub=value"),
        ("ddp --optim.lr=3", "--optim.lr=3: unknown flag; a key of the recipe has no dashes: optim.lr=3"),
        ("ddp --num_proc=3", "--num_proc=3: unknown flag; did you mean 'num_processes'?"),
        ("ddp --nproc_per_node=2", "--nproc_per_node=2: is a flag of torchrun; use --num_processes"),
        ("ddp --nnodes=2", "--nnodes=2: is a flag of torchrun; use --num_machines"),
        ("ddp --debug=1", "--debug=1: takes no value; write --debug"),
        ("ddp --num_processes", "--num_processes: write launcher flags as --num_processes=VALUE"),
        ("ddp -m", "-m: this command starts src/train.py; remove it"),
        ("ddp --config_file=a.yaml", "--config_file=a.yaml: the gear is the first argument; remove it"),
        ("ddp --num_processes=2 --num-processes=3", "--num-processes=3: --num_processes is given twice; keep one"),
        ("ddp --num_processes=", "--num_processes=: must be an integer >= 1, found ''"),
        ("zero3 --gradient_clipping=5", "--gradient_clipping=5: is set by the recipe (optim.max_grad_norm); remove it"),
        ("ddp --megatron_lm_pp_degree=2", "--megatron_lm_pp_degree=2: Megatron-LM is not supported"),
        ("ddp --num_machines=2 --machine_rank=0 --main_process_ip=a --main_process_port=9 --rdzv_backend=static",
         "--rdzv_backend: this command sets how several machines meet; remove it"),
    ],
)  # fmt: skip
def test_any_other_flag_is_refused_in_one_line(monkeypatch, line, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}") as caught:
        launched(monkeypatch, *line.split())
    assert "\n" not in str(caught.value)
