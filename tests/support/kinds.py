"""What kind of test runs. Unit tests start neither ranks nor Python processes: one that does fails, and says so.

A mark on the test or its file says its kind; without one the fixtures that it uses do; without those it is a unit test.
"""

import os
import re
import sys

KINDS = ("unit", "ranks", "cold")
BY_FIXTURE = {  # the first of them that a test uses
    "slurm": "cold",
    "mounted": "cold",
    "train": "ranks",
    "examine": "ranks",
    "compare": "ranks",
}
NEED_ROOT = {"slurm", "mounted"}
PYTHON = re.compile(r"(^|[/\s])(python[\d.]*|accelerate|torchrun)(\s|$)")

running: str | None = None  # the kind of the test that runs now; conftest.py sets it


def kind_of(fixtures: set[str]) -> str:
    return next((kind for fixture, kind in BY_FIXTURE.items() if fixture in fixtures), "unit")


def refuse_in_unit_tests(what: str, kind: str) -> None:
    """Called before anything is started that a unit test must not start."""
    if running == "unit":
        raise AssertionError(f"a unit test starts {what}: mark it with pytest.mark.{kind}")


def watch_processes() -> None:
    """See every process that is started from here on. For good: an audit hook stays."""

    def watch(event: str, arguments: tuple) -> None:
        if event == "subprocess.Popen" and running == "unit":
            line = " ".join(map(os.fsdecode, arguments[1]))
            if PYTHON.search(line):
                refuse_in_unit_tests(f"a Python process, {line[:200]}", "cold")

    sys.addaudithook(watch)
