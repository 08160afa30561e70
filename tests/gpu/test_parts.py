"""`make gpu`: the parts of the acceptance run on GPUs, each in its own process (see support/gpu.py)."""

import os

import pytest

from support import gpu, gpu_parts

pytestmark = [pytest.mark.long, pytest.mark.gpu, pytest.mark.cold]
NUM_GPUS = int(os.environ.get(gpu.VARIABLE, "0"))


@pytest.mark.skipif(NUM_GPUS == 0, reason="make gpu starts this test, on a machine with GPUs")
@pytest.mark.parametrize("name", [part.name for part in gpu.all_parts()])
def test_part(name, record_property):
    figures: dict[str, str] = {}
    try:
        gpu_parts.run_part(name, gpu_parts.Setting(gpu.FOLDER, NUM_GPUS), figures)
    finally:
        for figure, value in figures.items():
            record_property(figure, value)
