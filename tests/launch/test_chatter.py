"""Test that libraries print into the run's log, and this program's lines, errors and crashes appear on the screen."""

import os
import subprocess
import sys

import pytest

from gearbox import ROOT

SCRIPT = """
import logging, os, sys, warnings
from pathlib import Path
from gearbox import console
from gearbox.errors import UserError
from gearbox.launch import chatter, cli

def main(arguments):
    folder, ending = Path(arguments[0]), arguments[1]
    print("early print")
    os.write(2, b"early C library\\n")
    console.make_console(speaks=True).print("our line")
    if "early" in ending:
        raise KeyError("crash")
    problem = chatter.keep_in(folder)
    if problem:
        console.report(problem)
    print("late print, HF_TOKEN is", os.environ["HF_TOKEN"])
    os.write(1, b"late C library\\n")
    warnings.warn("a warning")
    logging.getLogger("lib").warning("logged warning")
    logging.getLogger("lib").error("logged %s", "error")
    if ending == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        print("lost"), sys.stdout.flush()
    if ending == "refuse":
        raise UserError("a refusal")
    if ending == "crash":
        raise KeyError("crash")
    if ending == "abort":
        os.abort()
    return 0

cli.run(main, diverts=True)
"""
PATH = os.pathsep.join([str(ROOT / "src")])


def run_script(folder, ending: str, **environment: str) -> subprocess.CompletedProcess:
    secret = {"HF_TOKEN": "hf_abcdefghijklmnop", "PYTHONPATH": PATH}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), ending],
        env=os.environ | secret | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.cold
def test_the_screen_shows_our_lines_and_errors_and_the_log_has_the_rest(tmp_path):
    done = run_script(tmp_path, "full")
    assert (done.returncode, done.stdout) == (0, "our line\n")
    assert done.stderr == "gearbox: error of lib: logged error\n"
    log = (tmp_path / "run.log").read_text()
    wanted = ["early print", "early C library", "late print", "late C library", "a warning", "logged error"]
    assert [text for text in wanted if text not in log] == []
    assert "hf_abcdefghijklmnop" not in log and "lost" not in log
    other = run_script(tmp_path, "", RANK="3", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", WORLD_SIZE="4")
    assert other.returncode == 0 and other.stderr == ""
    assert "[rank 3] late print" in (tmp_path / "run-machine1.log").read_text()


@pytest.mark.cold
@pytest.mark.parametrize(
    ("ending", "code", "shown"),
    [
        ("refuse", 2, "gearbox: a refusal"),
        ("crash", 1, "KeyError: 'crash'\ngearbox: what libraries printed is in "),
        ("early crash", 1, "KeyError: 'crash'\ngearbox: libraries printed before:\nearly print\nearly C library"),
        ("abort", -6, "Fatal Python error: Aborted"),
    ],
)
def test_a_crash_is_visible(tmp_path, ending, code, shown):
    done = run_script(tmp_path, ending)
    assert done.returncode == code and shown in done.stderr


@pytest.mark.cold
def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "run.log").mkdir()
    done = run_script(tmp_path, "")
    assert done.returncode == 0 and "run.log cannot be written: Is a directory" in done.stderr


@pytest.mark.cold
def test_a_program_without_standard_streams_runs(tmp_path):
    code = "import os, sys; os.close(1); os.close(2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    arguments = [sys.executable, "-c", code, "-c", SCRIPT, str(tmp_path), ""]
    environment = os.environ | {"HF_TOKEN": "hf_abcdefghijklmnop", "PYTHONPATH": PATH}
    assert subprocess.run(arguments, env=environment, timeout=120, check=False).returncode == 0
    assert "late C library" in (tmp_path / "run.log").read_text()
