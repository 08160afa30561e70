"""Test the clock of a step's parts on a device whose events pass late, and what a step waits for and sends."""

import time
from collections import Counter

import pytest
import torch

from gearbox.metrics import clock
from gearbox.metrics.clock import StepClock
from support.faults import patch_step

CPU = torch.device("cpu")


class LateEvent:
    """An event of a GPU that runs behind: it has passed once `device_time` has reached it. Waiting is an error."""

    device_time = host_time = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        LateEvent.host_time += 1
        self.at = LateEvent.host_time

    def query(self) -> bool:
        return self.at <= LateEvent.device_time

    def elapsed_time(self, end: "LateEvent") -> float:
        return 1000 * (end.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


def test_each_part_ends_where_the_next_begins():
    timed = StepClock(CPU, frozenset(["communication"]))
    for part in ("data", "forward", "communication", "backward", "forward", "backward", ""):
        timed.begin(part)
        time.sleep(0.01)
    timed.add("forward", 1.0)
    found = timed.read()
    assert set(found) == {"seconds_data", "seconds_forward", "seconds_backward"}
    assert found["seconds_forward"] > 1.02 > 1.0 > found["seconds_backward"] > 0.02
    assert timed.read() == {}


def test_events_are_read_when_the_device_has_passed_them(monkeypatch):
    monkeypatch.setattr(clock, "_cuda_event", LateEvent)
    LateEvent.device_time = LateEvent.host_time = 0.0
    timed = StepClock(torch.device("cuda"))
    for part in ("data", "forward", "backward", "optimizer", ""):
        timed.begin(part)
    LateEvent.device_time = 4
    assert timed.read() == {f"seconds_{part}": 1.0 for part in ("data", "forward", "backward")}
    LateEvent.device_time = 5
    timed.begin("data")
    assert timed.read() == {"seconds_optimizer": 1.0}, "the optimizer of the step before"
    assert len(timed._spare) == 3, "events are used again"


@pytest.mark.parametrize(("gear", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_more_micro_batches_wait_and_send_no_more(train, tmp_path, monkeypatch, gear, ranks):
    """A step has as many reads of single numbers, for which a GPU's host waits, and all-reduces for 1 as for 3."""
    counted = []
    for rows in (ranks, 3 * ranks):
        folder = tmp_path / f"{rows}"
        folder.mkdir()

        def count(step, folder=folder):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step.take()
            names = Counter(event.name for event in profile.events())
            (folder / f"{step.number}-{step.rank}").write_text(f"{names['aten::item']} {names['c10d::allreduce_']}")

        with monkeypatch.context() as patched:
            patch_step(patched, count)
            outcome = train(gear, f"batch.rows={rows}", "train.steps=2", f"run.name=n{rows}", ranks=ranks)
        assert outcome.codes == [0] * ranks, outcome.output
        counted.append((folder / "2-0").read_text())
    assert counted[0] == counted[1]
