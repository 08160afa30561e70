"""Test the process of a tracker whose library is broken, ends the process, hangs, or prints."""

import threading

import pytest

from gearbox import filesystem
from gearbox.metrics.tracker_process import RemoteTracker, TrackerError
from gearbox.metrics.tracker_start import Description

pytestmark = pytest.mark.cold
TRACKIO = """
import pathlib, time
print("chatter of a library")
class Run:
    def log(self, values, step=None):
        if step == 2:
            pathlib.Path("{folder}/hangs").touch()
            time.sleep(600)
        pathlib.Path("{folder}/logged").open("a").write(f"{{step}} {{values['loss']}}\\n")
    def finish(self):
        print("more chatter")
        pathlib.Path("{folder}/finished").touch()
def init(project, **options):
    return Run()
class config:
    update = staticmethod(lambda values, **options: None)
"""


@pytest.fixture
def tracker(tmp_path, monkeypatch):
    """Return a function that makes a tracker whose library has this code."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))

    def make(name: str, code: str) -> RemoteTracker:
        (tmp_path / "library").mkdir()
        (tmp_path / "library" / f"{name}.py").write_text(code)
        return RemoteTracker(name, Description(tmp_path, {"gear": "single"}))

    return make


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ImportError('a broken\\ninstallation')", "ImportError: a broken installation"),
        ("import os; os._exit(7)", "its process ended with exit code 7; see run.log"),
    ],
)
def test_a_library_that_cannot_be_imported_raises_in_one_line(tracker, code, problem):
    broken = tracker("wandb", code)
    with pytest.raises(TrackerError) as caught:
        broken.open("f" * 32, False, -1)
    assert str(caught.value) == problem
    broken.abandon()


def test_a_tracker_finishes_after_its_training_process_was_killed(tracker, tmp_path):
    kept = tracker("trackio", TRACKIO.format(folder=tmp_path))
    kept.open("f" * 32, False, -1)
    kept.log({"loss": 0.5}, 1)
    process = kept.process
    process.stdin.close()  # what the kernel does when a process is killed
    assert process.wait(timeout=300) == 0
    assert (tmp_path / "finished").exists() and (tmp_path / "logged").read_text() == "1 0.5\n"
    log = (tmp_path / "run.log").read_text()
    assert "chatter of a library" in log and "more chatter" in log


def test_a_tracker_that_hangs_can_be_left_from_another_thread(tracker, tmp_path):
    kept = tracker("trackio", TRACKIO.format(folder=tmp_path))
    kept.open("f" * 32, False, -1)
    process, raised = kept.process, []

    def log():
        try:
            kept.log({"loss": 0.5}, 2)
        except TrackerError as error:
            raised.append(str(error))

    thread = threading.Thread(target=log)
    thread.start()
    assert filesystem.wait_for_path(tmp_path / "hangs", 300)
    kept.abandon()
    thread.join(timeout=300)
    assert raised == ["its process ended with exit code -9; see run.log"]
    assert process.poll() == -9 and not (tmp_path / "finished").exists()
