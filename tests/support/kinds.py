"""Determine the kind of each test, and fail a unit test that starts ranks or Python processes.

A mark on the test or its file sets the kind. Without a mark the fixtures decide. All other tests are unit tests.
"""

import os
import re
import sys

KINDS = ("unit", "ranks", "cold")
BY_FIXTURE = {  # the first fixture in this order that a test uses decides
    "slurm": "cold",
    "mounted": "cold",
    "train": "ranks",
    "examine": "ranks",
    "compare": "ranks",
}
NEED_ROOT = {"slurm", "mounted"}
PYTHON = re.compile(r"(^|[/\s])(python[\d.]*|accelerate|torchrun)(\s|$)")

running: str | None = None  # the kind of the current test, set by conftest.py


def kind_of(fixtures: set[str]) -> str:
    return next((kind for fixture, kind in BY_FIXTURE.items() if fixture in fixtures), "unit")


def refuse_in_unit_tests(what: str, kind: str) -> None:
    """Fail a unit test. Call this before starting anything that a unit test must not start."""
    if running == "unit":
        raise AssertionError(f"a unit test starts {what}: mark it with pytest.mark.{kind}")


def watch_processes() -> None:
    """Check every process started from now on. An audit hook cannot be removed."""

    def watch(event: str, arguments: tuple) -> None:
        if event == "subprocess.Popen" and running == "unit":
            line = " ".join(map(os.fsdecode, arguments[1]))
            if PYTHON.search(line):
                refuse_in_unit_tests(f"a Python process, {line[:200]}", "cold")

    sys.addaudithook(watch)
