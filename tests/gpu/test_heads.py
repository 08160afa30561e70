"""The heads of recipes state the memory that a step takes. `make gpu` compares them with a GPU."""

import pytest

from gearbox import ROOT
from support import gpu_memory, gpu_parts

FEW, MORE = 1, 3  # layers; a step's memory grows by the same amount with each


@pytest.mark.parametrize("name", ["ddp_4gpu", "ddp_4gpu_full", "qlora_1gpu"])
def test_the_memory_of_a_head_is_that_of_a_step(name, monkeypatch):
    path = ROOT / "recipes" / f"{name}.yaml"
    few, more = (gpu_memory.peak_bytes(path, count, monkeypatch) for count in (FEW, MORE))
    peak = few + (more - few) / (MORE - FEW) * (gpu_memory.num_layers(path) - FEW)
    if name == "qlora_1gpu":  # 4.13 bits instead of 16, and one matrix of a layer in bf16
        peak += gpu_memory.layer_weights(path) * (4.13 - 16) / 8 + 2 * 3584 * 18944
    assert peak / 1e9 == pytest.approx(gpu_parts.head_figures(path)[1], rel=0.02)
