"""Test the question to the saved model: it ends with the run, and a stop leaves a run that is done."""

import json
from contextlib import suppress

import psutil
import pytest

from gearbox import ROOT, processes
from gearbox.planning.fit import Fit
from gearbox.training import finish
from support.cold import survivors

ASK = """
import sys; sys.path.insert(0, {src!r})
import gearbox.launch.lifeline, os, pathlib, signal, time
pathlib.Path({pid!r}).write_text(str(os.getpid()))
os.kill(os.getppid(), signal.{signal})
time.sleep(120)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGKILL", -9)])
def test_a_signal_while_the_saved_model_is_asked(train, tmp_path, monkeypatch, name, code):
    """A script in the place of src/ask.py sends the signal to the run, and then takes long to answer."""
    pid = tmp_path / "pid"
    (tmp_path / "src").mkdir()
    (tmp_path / "src/ask.py").write_text(ASK.format(src=str(ROOT / "src"), pid=str(pid), signal=name))
    monkeypatch.setattr(finish, "ROOT", tmp_path)
    outcome = train("single", "run.name=x", load_back="cold")
    assert outcome.codes == [code], outcome.output
    asking = int(pid.read_text())
    with suppress(psutil.NoSuchProcess):
        assert survivors([psutil.Process(asking)]) == []
    assert (outcome.folder / "model/model.safetensors").is_file()
    if name == "SIGTERM":
        status = json.loads((outcome.folder / "status.json").read_text())
        assert status["outcome"] == "done"
        left = "stopped before the saved model was asked; run: python "
        assert status["text"].startswith(left) and left in outcome.output
        assert status["text"].endswith(f"{outcome.folder}/model Hello")


@pytest.mark.parametrize(("method", "needed"), [("none", "0.4 MiB"), ("lora", "0.5 MiB")])
def test_a_model_that_does_not_fit_in_memory_twice_is_not_asked(train, monkeypatch, method, needed):
    monkeypatch.setattr(finish, "ask_saved", lambda *_: pytest.fail("it would be loaded"))
    monkeypatch.setattr(processes, "free_memory", lambda: 2**18)
    monkeypatch.setattr(Fit, "problem", lambda fit: None)  # else the run is refused
    outcome = train("single", f"adapter.method={method}", "run.name=x", load_back="cold")
    assert outcome.codes == [0], outcome.output
    status = json.loads((outcome.folder / "status.json").read_text())
    why = f"the saved model was not asked: 0.2 MiB of host memory free, {needed} needed; run: python "
    assert status["outcome"] == "done" and status["text"].startswith(why) and why in outcome.output
