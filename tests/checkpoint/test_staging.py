"""Test that tensors reach a shard's file through any buffer, and that the memory for their copies is checked."""

import time
from itertools import pairwise

import pytest
import torch

from gearbox import processes
from gearbox.checkpoint import disk_space, staging
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.staging import HostReader, Staging
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.recipe import Save
from gearbox.planning.fit import Fit
from support.checkpoints import check
from support.faults import STEPS, count_steps
from support.world import SingleProcess


class Late:
    """A copy that is done only when it is waited for, as by a slow GPU."""

    def __init__(self, held, part):
        self.held, self.part = held, part
        held.fill_(0xEE)

    def synchronize(self):
        self.held.copy_(self.part)


@pytest.fixture(params=["device", "late"])
def through_buffers(request, monkeypatch):
    """Treat tensors of the CPU as those of another device, which copies at once or late."""
    monkeypatch.setattr(staging, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(staging, "PART_BYTES", 64)
    if request.param == "late":
        monkeypatch.setattr(HostReader, "_start_copy", lambda self, held, part: Late(held, part))


def some_shards():
    """Return tensors that fill no part, one, or several; one is a block of a larger tensor, one has no elements."""
    made = [torch.randn(n).to(dtype) for n, dtype in ((1, torch.float32), (16, torch.float32), (90, torch.bfloat16))]
    made += [torch.randn(9, 12)[2:7, 3:8], torch.empty(0), torch.randint(0, 9, (33,)), torch.randn(1000)]
    return [TensorShard("parameter", f"p{i}", 0, tensor) for i, tensor in enumerate(made)]


def written(place, shards, tmp_path):
    place.stage(shards)
    facts = place.write(tmp_path / "x")
    place.release()
    return facts, (tmp_path / "x").read_bytes()


def foreground():
    place = Staging()
    place.stay_in_foreground()
    return place


def test_every_way_writes_the_same_bytes(through_buffers, tmp_path, monkeypatch):
    shards = some_shards()
    found = [written(place, shards, tmp_path) for place in (Staging(), Staging(tmp_path), foreground())]
    monkeypatch.undo()
    found.append(written(Staging(), shards, tmp_path))
    assert all(one == found[-1] for one in found)


def test_a_buffer_is_filled_while_the_other_is_read(through_buffers):
    tensor = torch.arange(1000).to(torch.uint8)
    reader = HostReader()
    reader.prepare([tensor])
    places = [part.data_ptr() for part in reader.parts(tensor)]
    assert len(places) == 16 and len(set(places)) == 2 and all(one != two for one, two in pairwise(places))


def test_memory_that_is_not_free_is_not_taken(monkeypatch):
    """Linux would grant it, and end a process when it is used."""
    monkeypatch.setattr(processes, "free_memory", lambda: 2**20)
    assert len(staging.allocate(2**20)) == 2**20
    with pytest.raises(OSError, match="Cannot allocate memory") as short:
        staging.allocate(2**20 + 1)
    text = disk_space.explain_write_error(short.value, None, 2**30)
    assert text == "host memory: has 1.0 MiB free, but a copy of the checkpoint needs 1.00 GiB"
    monkeypatch.setattr(processes, "free_memory", lambda: 2**62)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        staging.allocate(2**60)


class TwoHosts(SingleProcess):
    """Four ranks on two machines; those of the second have `free` bytes left."""

    size = 4

    def __init__(self, free):
        self.free = free

    def gather(self, value):
        return [("one", 2**40), ("one", 2**40), ("two", self.free), ("two", self.free)]


def test_the_copies_of_all_ranks_of_a_machine_must_fit():
    save = Save()
    assert disk_space.memory_problem(save, 4 * 2**30, 0, TwoHosts(2 * 2**30)) == ""
    problem = disk_space.memory_problem(save, 4 * 2**30, 0, TwoHosts(2 * 2**30 - 1))
    assert problem == "2.00 GiB of host memory free on two, 2.00 GiB needed"
    assert "4.00 GiB needed" in disk_space.memory_problem(save, 4 * 2**30, 4 * 2**30, TwoHosts(2 * 2**30))
    assert disk_space.memory_problem(Save(stage="/fast"), 2**50, 0, TwoHosts(0)) == ""


def test_without_memory_training_waits_for_each_save(train, tmp_path, monkeypatch):
    usual, marks = Staging.write, tmp_path / "marks"

    def write(self, path):
        deadline, begun = time.monotonic() + 0.2, TrainState.now
        while TrainState.now == begun and time.monotonic() < deadline:  # training would advance
            time.sleep(0.01)
        facts = usual(self, path)
        with marks.open("a") as file:
            file.write(f"{TrainState.now - 1} {self.buffer.numel()}\n")
        return facts

    background = train("ddp", *STEPS, ranks=2)
    monkeypatch.setattr(processes, "free_memory", lambda: 2**20)
    monkeypatch.setattr(Fit, "problem", lambda fit: None)  # else the run is refused
    count_steps(monkeypatch)
    monkeypatch.setattr(Staging, "write", write)
    outcome = train("ddp", *STEPS, "run.name=y", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    needed = "saved in the foreground: 1.0 MiB of host memory free, 2.3 MiB needed"
    assert needed in " ".join(outcome.output.split())
    assert [line["saved"] for line in outcome.lines("saved")] == [2, 4, 6, 8]
    assert sorted(marks.read_text().splitlines()) == [f"{step} 0" for step in (2, 2, 4, 4, 6, 6, 8, 8)]
    digests = [check(run.folder / "checkpoints/step-8").files for run in (background, outcome)]
    assert digests[0] == digests[1], "both write the same bytes"
