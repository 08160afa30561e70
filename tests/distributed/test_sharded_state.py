"""Guards what a rank saves of the optimizer: by parameter name, exact, and refused where it cannot be cut anew."""

import pytest
import torch


def test_optimizer_state_in_blocks_fits_only_its_own_cut():
    """bitsandbytes' 8-bit AdamW keeps scales of blocks: exact where the cut is the same, refused where it is not."""
    from bitsandbytes.optim import AdamW

    from gearbox.checkpoint import shards
    from gearbox.distributed import sharded_state

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
    pieces = {piece.key: piece for piece in sharded_state.local_shards(model, optimizer, 0)}
    assert {key.split("|")[0].split("@")[0] for key in pieces} >= {"parameter", "state1", "state2", "absmax1"}

    class Saved(shards.ShardReader):
        def __init__(self):
            self.folder, self.shapes = "here", sharded_state.full_shapes(model)
            self.scalars = sharded_state.scalars(model, optimizer)
            self._pieces = {(p.kind, p.name): [] for p in pieces.values()}

        def part(self, piece):
            return pieces[piece.key].tensor

    fresh.state.clear()
    sharded_state.restore(other, other, fresh, Saved(), "ddp")
    for key, value in optimizer.state[model.weight].items():
        theirs = fresh.state[other.weight][key]
        assert torch.equal(theirs, value) if isinstance(value, torch.Tensor) else theirs == value, key

    half = Saved()
    half._pieces = {(kind.replace("+8192", "+4096"), name): [] for kind, name in half._pieces}
    with pytest.raises(Exception, match="cannot be cut anew for this gear; go on with it under ddp"):
        sharded_state.restore(other, other, fresh, half, "ddp")
