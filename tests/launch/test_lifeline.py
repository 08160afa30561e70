"""Test that a rank ends with its launcher from its first line, and that the launcher prints nothing after the rank."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gearbox import ROOT
from gearbox.launch import outcome
from support.cold import ENVIRONMENT, shell, small, survivors

pytestmark = pytest.mark.cold
REFUSED = "gearbox: command line: optim.lrr: unknown key; did you mean 'lr'?"
ELASTIC = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT | variables, text=True, capture_output=True, timeout=60
    )


@pytest.mark.parametrize("script", ["train", "doctor", "ask"])
def test_a_process_whose_parent_has_ended_exits_at_its_first_line(script):
    """The variable names another parent than the real one, as if the parent had ended before the first line."""
    ended = run(f"src/{script}.py", "--help", GEARBOX_PARENT="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
    assert run(f"src/{script}.py", "--help", GEARBOX_PARENT=str(os.getpid())).returncode == 0


def test_a_rank_whose_launcher_has_ended_exits_at_its_first_line(tmp_path):
    """Below src/launch.py the launcher is `accelerate launch`. Elsewhere, any Python process may be one."""
    ended = run("src/train.py", "--help", **ELASTIC, **{outcome.OUTCOME_FILE: str(tmp_path / "outcome")})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "gearbox: the launcher's end: nothing to save\n"
    assert run("src/train.py", "--help", **ELASTIC).returncode == 0


def test_a_rank_ends_with_its_launcher(tmp_path):
    """Kill the launcher while the rank still imports: Python cannot run a signal handler in that moment."""
    ready = tmp_path / "ready"
    rank = f"import gearbox.launch.lifeline, pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"],
        env=ENVIRONMENT | ELASTIC,
    )
    while not ready.exists():
        assert launcher.poll() is None
        time.sleep(0.02)
    ranks = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    assert len(ranks) == 1 and survivors(ranks) == []


def test_a_refusal_in_a_container_is_printed():
    """The shell script is process 1, so nothing can print after it."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs root and a process namespace")
    line = "accelerate launch --config_file accelerate_configs/single.yaml src/train.py optim.lrr=1; exit $?"
    ended = shell(f"unshare --pid --fork --mount-proc sh -c {shlex.quote(line)}")
    assert ended.returncode != 0
    assert [line for line in ended.stderr.splitlines() if line != "Terminated"] == [REFUSED]


def test_a_launcher_that_prints_elsewhere_is_left():
    """Torch's launcher with --tee prints what its ranks write to their log files."""
    line = "torchrun --nproc-per-node 1 --tee 3 src/train.py optim.lrr=1"
    ended = shell(line)
    assert ended.returncode == 1 and REFUSED in ended.stderr


def on_a_terminal(line: str, text: str, last: str) -> list[str]:
    """Run a command on a terminal, and press Ctrl-C when it shows the text.

    Return the lines that follow, until two seconds after `last`. The shell outlives the command, as a user's does.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.execvpe("sh", ["sh", "-c", f"trap : INT; {line}; sleep 60"], ENVIRONMENT | {"PATH": path})
    printed, pressed, deadline = b"", None, time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            printed += os.read(terminal, 65536)
            if pressed is not None and last.encode() in printed[pressed:]:
                deadline = min(deadline, time.monotonic() + 2)
        if pressed is None and text.encode() in printed:
            os.write(terminal, b"\x03")
            pressed = len(printed)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(terminal)
    assert pressed is not None, printed.decode()[-2000:]
    after = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", printed[pressed:].decode(errors="replace"))
    return [line for line in re.split(r"[\r\n]+", after) if line.strip() and "━" not in line]


@pytest.mark.parametrize(
    ("gear", "text", "last"),
    [
        ("single", "/2000  loss", ": stopped at step"),
        ("ddp --num_processes 2", "importing torch", "gearbox: SIGINT: nothing to save"),
    ],
)
def test_ctrl_c_leaves_no_traceback(tmp_path, chats, gear, text, last):
    name, *flags = gear.split()
    given = small(tmp_path, chats).replace("train.steps=2", "train.steps=2000")
    config = f"accelerate launch --config_file accelerate_configs/{name}.yaml"
    lines = on_a_terminal(f"{config} {' '.join(flags)} src/train.py {given}", text, last)
    assert not [line for line in lines if "Traceback" in line or "  File " in line], lines
    ours = [line for line in lines if line not in ("Killed", "Terminated")]
    assert ours[-1].removeprefix("saved").startswith(last), lines
