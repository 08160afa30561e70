"""Test that optimizer state is saved exactly, by parameter name, and refused where it cannot be resharded."""

from types import SimpleNamespace

import pytest
import torch

from gearbox.checkpoint import shards
from gearbox.config.recipe_values import Optim
from gearbox.model.optimizer import make_optimizer
from gearbox.sharding import sharded_state
from support.world import SingleProcess


def test_optimizer_state_in_blocks_fits_only_its_own_sharding():
    """The block scales of 8-bit AdamW (bitsandbytes) are restored exactly into the same sharding, else refused."""
    from bitsandbytes.optim import AdamW

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(64, 128, bias=False)
        optimizer = AdamW(model.parameters(), optim_bits=8)
        group = optimizer.param_groups[0]
        optimizer.init_state(group, group["params"][0], 0, 0)
        for tensor in optimizer.state[group["params"][0]].values():
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8:
                tensor.random_(0, 255)
        return model, optimizer

    (model, optimizer), (other, fresh) = made(1), made(2)
    optimizer.state[model.weight]["step"] = 7
    world = SingleProcess()
    saved_shards = {shard.key: shard for shard in sharded_state.local_shards(model, optimizer, world)}
    assert {key.split("|")[0].split("@")[0] for key in saved_shards} >= {"parameter", "state1", "state2", "absmax1"}

    class Saved(shards.ShardReader):
        def __init__(self):
            self.folder, self.shapes = "here", sharded_state.full_shapes(model, world)
            self.scalars = sharded_state.scalars(model, optimizer, world)
            self._kinds = {"weight": {shard.kind for shard in saved_shards.values()}}

        def read_shard(self, shard):
            return saved_shards[shard.key].tensor

    fresh.state.clear()
    sharded_state.restore(other, other, fresh, Saved(), "ddp", world)
    for key, value in optimizer.state[model.weight].items():
        theirs = fresh.state[other.weight][key]
        assert torch.equal(theirs, value) if isinstance(value, torch.Tensor) else theirs == value, key

    half = Saved()
    half._kinds = {"weight": {kind.replace("+8192", "+4096") for kind in half._kinds["weight"]}}
    with pytest.raises(Exception, match="the optimizer state cannot be resharded for this gear; resume under ddp"):
        sharded_state.restore(other, other, fresh, half, "ddp", world)


def test_the_state_under_zero_has_one_order():
    """The next checkpoint is written in this order; the order of a set would differ between processes."""
    kinds = list("abcdefgh")
    reader = SimpleNamespace(shapes={"w": [2]}, scalars={"w": {"step": 3}}, kinds=lambda name: kinds)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter])
    assert sharded_state._make_zero_state(SimpleNamespace(optimizer=None), optimizer, reader)
    assert list(optimizer.state[parameter]) == [*kinds, "step"]


def test_restored_numbers_are_on_the_device_that_a_fused_step_reads():
    """An unfused step keeps its number on the CPU. The fake device shows where each tensor is made."""
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kinds = ["exp_avg", "exp_avg_sq"]
    scalars = {"weight": {"step": {"float32": 3.0}}}
    reader = SimpleNamespace(shapes={"weight": [2, 2]}, scalars=scalars, kinds=lambda name: kinds)
    for make in (
        lambda: sharded_state._make_state(model, optimizer, reader),
        lambda: sharded_state._make_zero_state(SimpleNamespace(optimizer=None), optimizer, reader),
    ):
        optimizer.state.clear()
        make()
        state = optimizer.state[model.weight]
        assert {tensor.device.type for tensor in state.values()} == {"meta"} and state["step"].dtype == torch.float32


def test_a_state_of_an_unfused_step_is_continued(tmp_path):
    """An earlier version saved the step's number from a CPU; the next steps equal those of one unfused optimizer."""
    torch.manual_seed(0)
    model, other = torch.nn.Linear(5, 7), torch.nn.Linear(5, 7)
    world, inputs = SingleProcess(), torch.randn(3, 5)

    def steps(trained, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            trained(inputs).square().sum().backward()
            optimizer.step()

    unfused = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    steps(model, unfused, 3)
    saved = {shard.key: shard.tensor.clone() for shard in sharded_state.local_shards(model, unfused, world)}
    reader = SimpleNamespace(
        folder="here", shapes=sharded_state.full_shapes(model, world),
        scalars=sharded_state.scalars(model, unfused, world), kinds=lambda name: ["exp_avg", "exp_avg_sq"],
        read_shard=lambda shard: saved[shard.key],
    )  # fmt: skip
    fused = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    sharded_state.restore(other, other, fused, reader, "ddp", world)
    steps(model, unfused, 3)
    steps(other, fused, 3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    assert {float(state["step"]) for state in fused.state.values()} == {6}


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw_8bit"])
def test_the_predicted_size_of_a_checkpoint_is_the_size_of_its_shards(name):
    """The scales of 8-bit blocks are not counted, and small tensors have none."""
    model = torch.nn.Sequential(torch.nn.Embedding(9, 128), torch.nn.Linear(128, 64, bias=name != "adamw_8bit"))
    if name == "adamw_8bit":
        model = model[1]
    optimizer, world = make_optimizer(model, Optim(name=name, lr=0.1)), SingleProcess()
    predicted = sharded_state.checkpoint_bytes(model, optimizer, world)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    written = sum(shard.tensor.nbytes for shard in sharded_state.local_shards(model, optimizer, world))
    assert predicted == pytest.approx(written, rel=0.1 if name == "adamw_8bit" else 0)
