"""Test that a user error prints one line and exits with code 2."""

import gc
import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from gearbox import ROOT
from gearbox.launch import cli
from support.cold import last_line, shell, small

pytestmark = pytest.mark.cold


@pytest.mark.parametrize("gear", ["single", "fsdp", "zero3"])
def test_a_user_error_is_the_only_line(tmp_path, gear):
    """The rank prints it at once, and ends its launcher, which would print 14 to 60 lines more."""
    line = (
        f"accelerate launch --config_file accelerate_configs/{gear}.yaml src/train.py optim.lrr=1 run.dir={tmp_path}/r"
    )
    outcome = shell(line + " 2>&1")
    assert outcome.returncode != 0
    others = r"Killed|Terminated|W\d{4} .*|.*\[WARNING\] \[real_accelerator.*"  # the shell's; warnings at the start
    lines = [each for each in outcome.stdout.splitlines() if not re.fullmatch(others, each)]
    assert lines == ["gearbox: command line: optim.lrr: unknown key; did you mean 'lr'?"]
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py optim.lrr=1", "command line: optim.lrr: unknown key; did you mean 'lr'?"),
        ("train.py recipes/tinny.yaml", "recipes/tinny.yaml: no such file; did you mean 'tiny.yaml'?"),
        (
            "train.py model.name=nobody/no-such-model model.init=pretrained",
            "is not on this machine and the Hub cannot be reached",
        ),
        ("train.py run.resume=latest run.name=none", "contains no run 'none'"),
        ("train.py 'model.add_tokens=[<|end|>]'", "'<|end|>' is already a token of recipes/tiny; remove it"),
        ("launch.py zero2 optim.name=adamw_8bit", "use adamw or paged_adamw, or the fsdp gear"),
        ("launch.py fsdpp", "fsdpp: unknown gear; did you mean 'fsdp'?"),
        ("launch.py", "usage: python src/launch.py GEAR [--doctor] ["),
        ("launch.py ddp --num_processes 3", "write launcher flags as --num_processes=VALUE"),
        ("launch.py zero2 --lr=3", "--lr=3: unknown flag; a key of the recipe has no dashes: optim.lr=3"),
        ("launch.py zero2 optim.max_grad_norm=x", "optim.max_grad_norm: input should be a valid number"),
        ("ask.py /nowhere hello", "/nowhere: contains no model"),
    ],
)
def test_a_command_reports_a_user_error_in_one_line_with_code_2(tmp_path, line, said):
    outcome = shell(f"python src/{line}" + ("" if "=" not in line else f" run.dir={tmp_path}/r"))
    assert outcome.returncode == 2
    assert len(outcome.stderr.strip().splitlines()) == 1, outcome.stderr
    assert outcome.stderr.startswith("gearbox: ")
    assert said in outcome.stderr
    assert not list(tmp_path.glob("r/*"))


def test_launch_reports_an_error_that_only_the_ranks_can_find(tmp_path, chats):
    """An error that all ranks find after torch has started still prints one line and exits with code 2."""
    lines = [*chats.read_text().splitlines(), "no JSON"]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(lines))
    outcome = shell(f"python src/launch.py ddp --num_processes=2 {small(tmp_path, data)}")
    assert outcome.returncode == 2
    said = f"gearbox: {data}:{len(lines)}: is not JSON: Expecting value at column 1"
    assert last_line(outcome.stderr) == said
    assert not (tmp_path / "runs").exists(), "a half-written folder is left"


def test_out_of_memory_suggests_what_to_change():
    """The command raises torch's error itself, because the tests have no GPU to fill."""
    outcome = shell(
        "cd src && python -c 'import torch; from gearbox.launch import cli\n"
        'def main(_): raise torch.OutOfMemoryError("CUDA out of memory")\n'
        "cli.run(main)'"
    )
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("gearbox: out of GPU memory: lower batch.micro_rows")
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "src").glob("*.py")))
def test_help_is_the_docstring(tmp_path, script):
    """The help explains each flag, on stdout, without importing torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit(77)\n")
    code = (ROOT / "src" / script).read_text()
    flag = "-h" if len(script) % 2 else "--help"  # one way for all scripts; a start takes a second
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    ended = subprocess.run(
        [sys.executable, f"src/{script}", "x", flag], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    for part in ("\nUsage: ", "\nExit codes", *re.findall(r'add_argument\("(--[\w-]+)"', code)):
        assert part in ended.stdout, part
    assert "RECIPE" not in ended.stdout or "\nExample" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optim.lrr=1"], "gearbox: command line: optim.lrr: unknown key; did you mean 'lr'?"),
        (["recipes/tny.yaml"], "gearbox: recipes/tny.yaml: no such file; did you mean 'tiny.yaml'?"),
        (["--lrr", "1"], "gearbox: --lrr 1: expected [RECIPE] [key.sub=value ...], such as optim.lr=1e-5"),
        (["--lr", "1"], "gearbox: --lr: write optim.lr=1, without dashes"),
    ],
)
def test_a_user_error_ends_the_script_without_importing_torch(tmp_path, arguments, said):
    for name in ("torch", "transformers", "accelerate"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(77)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    script = [sys.executable, "src/train.py"]
    ended = subprocess.run([*script, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (2, said + "\n", "")
    if not said.endswith("1e-5"):
        return
    right = subprocess.run(script, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert right.returncode == 77, "a valid recipe must import the fake torch"


def test_imports_are_not_interrupted_by_garbage_collection(capfd):
    for failure in (None, ImportError):
        with suppress(ImportError), cli.importing("torch"):
            assert not gc.isenabled()
            if failure:
                raise failure
        assert gc.isenabled() and gc.get_freeze_count()
        gc.unfreeze()
    assert capfd.readouterr().out == "importing torch\n" * 2
