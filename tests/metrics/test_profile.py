"""Test the recording of steps: traces of every rank, figures that can be checked by hand, and steps that do not fit."""

import gzip
import json
import time
from types import SimpleNamespace

import pytest
import torch

from gearbox import ROOT, filesystem
from gearbox.config.loader import load_recipe
from gearbox.console import make_console
from gearbox.errors import UserError
from gearbox.metrics.profile import Profiler, summarize

PROFILE = "run.profile={steps: [2, 3]}"


@pytest.mark.parametrize(("gear", "ranks"), [("single", 1), ("ddp", 2), ("zero3", 2), ("pp", 2)])
def test_every_rank_writes_a_trace_and_figures(train, gear, ranks):
    outcome = train(gear, "train.steps=4", PROFILE, ranks=ranks)
    assert outcome.codes == [0] * ranks, outcome.output
    assert [line["step"] for line in outcome.lines("loss")] == [1, 2, 3, 4]
    assert outcome.output.count("steps 2 to 3 on rank ") == outcome.output.count("exposed communication: ") == 1
    folder = outcome.folder / "profile"
    for rank in range(ranks):
        trace = json.loads(gzip.decompress((folder / f"steps-2-3.rank-{rank}.json.gz").read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"step 2", "step 3", "aten::mm"} <= names and not {"step 1", "step 4"} & names
        found = json.loads((folder / f"steps-2-3.rank-{rank}.summary.json").read_text())
        assert len(found["operations"]) == 10 and found["rank"] == rank
        assert 0 < sum(one["share"] for one in found["operations"]) <= 1.001
        has_any = found["communication_seconds"] > 0
        assert has_any == (ranks > 1) and 0 <= found["exposed_seconds"] <= found["communication_seconds"]
    assert len([*folder.iterdir()]) == 2 * ranks, "no unfinished file is left"


def event(name: str, begin: float, end: float, own: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=begin, end=end), self_cpu_time_total=own,
        device_type=SimpleNamespace(name="CPU"), is_user_annotation=False,
    )  # fmt: skip


def test_exposed_communication_is_what_no_computation_hides():
    events = [
        event("aten::mm", 0, 4e6, 4e6),
        event("gloo:all_reduce", 1e6, 6e6),  # the last 2 s are exposed, but for half a second of another operation
        event("gloo:all_reduce", 5e6, 6e6),
        event("aten::add", 4.5e6, 5e6, 0.5e6),
        event("step 2", 0, 6e6, 9e6),
        event("aten::mm", 6e6, 8e6, 2e6),
    ]
    found = summarize(events, (2, 2), 0, "cpu", 8.0)
    assert (found.communication_seconds, found.exposed_seconds, found.exposed_share) == (5.0, 1.5, 0.1875)
    assert [(one.name, one.calls, one.seconds) for one in found.operations] == [
        ("aten::mm", 2, 6.0), ("gloo:all_reduce", 2, 6.0), ("aten::add", 1, 0.5),
    ]  # fmt: skip
    assert found.lines()[-1] == "exposed communication: 18.8% of the time (5.000 s of communication in all)"


def profiler(folder, steps: str, num_steps: int = 20, *more: str) -> Profiler:
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml", [f"run.profile={{steps: {steps}}}", *more])
    place = (0, torch.device("cpu"))
    return Profiler(folder / "profile", recipe.run, num_steps, make_console(speaks=True), place)


@pytest.mark.parametrize(
    ("steps", "at", "why"),
    [("[10, 13]", 13, "step 13 was taken before"), ("[30, 31]", 0, "the run ends at 20")],
)
def test_steps_that_are_not_taken_are_named(tmp_path, capsys, steps, at, why):
    idle = profiler(tmp_path, steps)
    idle.open(at)
    idle.after(at + 1)
    idle.close()
    assert f"are not recorded, because {why}" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_a_resumed_run_records_what_is_left_and_an_early_end_what_there_was(tmp_path):
    for at, taken, name in ((11, [12], "steps-12-12"), (18, [19, 20], "steps-19-20")):
        resumed = profiler(tmp_path, "[10, 30]")
        resumed.open(at)
        for step in taken:
            torch.ones(3).sum()
            resumed.after(step)
        resumed.close()
        assert (tmp_path / "profile" / f"{name}.rank-0.json.gz").is_file()


def test_a_full_disk_is_reported_and_stops_nothing(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem, "rename", fail)
    full, ended = profiler(tmp_path, "[1, 1]"), []
    full.on_end = lambda: ended.append(time.time())
    full.open(0)
    full.after(1)
    assert "profile cannot be written: No space left on device" in capsys.readouterr().out
    assert len(ended) == 1 and not [*(tmp_path / "profile").iterdir()]
    full.after(2)


def test_recording_ends_where_nothing_can_be_written(tmp_path, capsys):
    """A recorder that went on would fill the memory."""
    (tmp_path / "profile").touch()
    stuck = profiler(tmp_path, "[1, 1]")
    stuck.open(0)
    assert torch.autograd._profiler_enabled()
    stuck.after(1)
    assert not torch.autograd._profiler_enabled()
    assert "profile cannot be written" in capsys.readouterr().out


def test_a_snapshot_needs_a_gpu(tmp_path, capsys):
    Profiler.open(profiler(tmp_path, "[5, 6]", 20, "run.memory_snapshot=true"), 0)
    assert "run.memory_snapshot: there is no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["{steps: [3, 2]}", "{steps: [0, 2]}", "{steps: 3}", "{step: [1, 2]}", "[1, 2]"])
def test_wrong_steps_are_refused(value):
    with pytest.raises(UserError, match=r"run\.profile"):
        load_recipe(ROOT / "recipes" / "tiny.yaml", [f"run.profile={value}"])
