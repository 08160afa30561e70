"""Compare gears in bf16, their precision on a GPU, with fp32."""

import pytest

from gearbox.distributed import engine
from support.methods import METHODS


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("gear", ["ddp", "fsdp", "zero3"])
def test_every_method_runs_in_bf16(train, monkeypatch, gear, method):
    """The precision of the gears' files, used on a GPU, gives the losses of fp32 to about three digits."""
    fp32 = train(gear, *METHODS[method], ranks=2)
    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)
    bf16 = train(gear, *METHODS[method], ranks=2)
    assert set(fp32.codes + bf16.codes) == {0}, fp32.output + bf16.output
    assert bf16.losses == pytest.approx(fp32.losses, rel=2e-2)
    assert bf16.losses != fp32.losses


def test_bf16_masters_under_fsdp(train, monkeypatch):
    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)
    outcome = train("fsdp", "optim.master_weights=bf16", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    half = train("fsdp", ranks=2)
    assert outcome.losses == pytest.approx(half.losses, rel=2e-2)
    held = [float(o.output.split("parameters on rank 0")[1].split()[2]) for o in (outcome, half)]
    assert held[0] == pytest.approx(held[1] / 2, abs=0.1), "bf16 takes half of fp32"
