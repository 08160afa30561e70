"""The heads of recipes state the memory that a step takes. `make gpu` compares them with a GPU."""

import pytest

from gearbox import ROOT
from support import gpu_parts
from support.simulations import config_of, job_of, simulated

FEW, MORE = 1, 3  # layers; a step's memory grows by the same amount with each


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "gear"),
    [("ddp_4gpu", "ddp"), ("ddp_4gpu_full", "ddp"), ("qlora_1gpu", "single"), ("fsdp_2gpu", "fsdp")],
)
def test_the_memory_of_a_head_is_that_of_a_step(name, gear):
    job = job_of(name, gear)
    config = config_of(job)
    few, more = (simulated(job, config | {"num_hidden_layers": count})["peak_bytes"] for count in (FEW, MORE))
    peak = few + (more - few) / (MORE - FEW) * (config["num_hidden_layers"] - FEW)
    assert peak / 1e9 == pytest.approx(gpu_parts.head_figures(ROOT / "recipes" / f"{name}.yaml")[1], rel=0.02)
