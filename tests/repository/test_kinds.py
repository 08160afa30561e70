"""Check that all tests are collected, and that unit tests start neither ranks nor Python."""

import re
import subprocess
import sys

import pytest

from gearbox import ROOT
from support.ranks import fork_ranks


def test_a_unit_test_that_forks_ranks_is_stopped():
    with pytest.raises(AssertionError, match=r"a unit test starts ranks: mark it with pytest\.mark\.ranks"):
        fork_ranks(1, {}, lambda: None)


@pytest.mark.parametrize("line", [[sys.executable, "-c", ""], "cd src && python -c 1", "torchrun src/train.py"])
def test_a_unit_test_that_starts_python_is_stopped(line):
    with pytest.raises(
        AssertionError, match=r"a unit test starts a Python process, .*: mark it with pytest\.mark\.cold"
    ):
        subprocess.run(line, shell=isinstance(line, str), check=True)


def test_a_unit_test_may_start_other_programs():
    subprocess.run("true && echo python3-config", shell=True, check=True, capture_output=True)


@pytest.mark.cold
def test_a_cold_test_may_start_python():
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_every_file_with_tests_is_collected():
    files = [path for path in (ROOT / "tests").rglob("*.py") if re.search(r"^def test_", path.read_text(), re.M)]
    assert [path.name for path in files if not path.name.startswith("test_")] == []
    assert len(files) >= 60, "the folders have moved"


def test_what_a_make_target_asks_for_is_a_mark(pytestconfig):
    asked = re.findall(r"pytest -m (\w+)", (ROOT / "Makefile").read_text())
    assert sorted(asked) == ["cells", "clouds", "cluster", "commands", "extras", "image", "slurm", "unit"]
    assert {*asked} <= {line.split(":")[0] for line in pytestconfig.getini("markers")}
