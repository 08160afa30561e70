"""Test that optimizer state is saved exactly, by parameter name, and refused where it cannot be resharded."""

from types import SimpleNamespace

import pytest
import torch

from gearbox.checkpoint import shards
from gearbox.distributed import sharded_state
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
