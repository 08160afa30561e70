"""Compare gears in bf16, their precision on a GPU, with one device."""

import pytest

from gearbox import ROOT
from gearbox.config.gear import gear_names, load_gear
from gearbox.distributed import engine
from support.gears import model_for, why_no_disk_operations
from support.methods import METHODS

GEARS = [name for name in gear_names() if name != "single"]
CASES = [(gear, method) for gear in GEARS for method in ("full", "lora")]
CASES += [(gear, "qlora") for gear in ("ddp", "fsdp", "zero3")]
SHORT = ("train.steps=2", "eval.fraction=0", "batch.rows=4", "batch.row_tokens=64")


@pytest.fixture
def bf16(monkeypatch):
    """Run the gears in the precision of their files, as on a GPU; a CPU emulates bf16."""
    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)


@pytest.fixture(scope="module")
def of_one_device():
    return {}


@pytest.mark.parametrize(("gear", "method"), CASES)
def test_every_gear_trains_the_same_in_bf16(train, bf16, monkeypatch, of_one_device, gear, method):
    """The losses are those of fp32 on one device to about three digits."""
    if gear == "zero3_nvme" and (reason := why_no_disk_operations()):
        pytest.skip(reason)
    changes = (*SHORT, *METHODS[method], *model_for(gear))
    if changes not in of_one_device:
        with monkeypatch.context() as fp32:
            fp32.setattr(engine, "precision", lambda gear: "no")
            of_one_device[changes] = train("single", *changes).losses
    assert load_gear(ROOT / f"accelerate_configs/{gear}.yaml").precision == "bf16"
    outcome = train(gear, *changes, ranks=2 if gear == "ddp" else None)  # other gears use the ranks of their files
    assert set(outcome.codes) == {0}, outcome.output
    assert outcome.losses == pytest.approx(of_one_device[changes], rel=2e-3)
    assert outcome.losses != of_one_device[changes]


def test_bf16_masters_under_fsdp(train, bf16):
    outcome = train("fsdp", "optim.master_weights=bf16", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    half = train("fsdp", ranks=2)
    assert outcome.losses == pytest.approx(half.losses, rel=2e-2)
    held = [float(o.output.split("parameters on rank 0")[1].split()[2]) for o in (outcome, half)]
    assert held[0] == pytest.approx(held[1] / 2, abs=0.1), "bf16 takes half of fp32"
