"""Freed blocks return to the system on a CPU that has little more memory than the plan predicts."""

import subprocess
import sys

import pytest

from gearbox import ROOT
from gearbox.config.recipe import Model
from gearbox.planning.architecture import read_config
from gearbox.planning.fit import KEPT, Fit
from support.simulations import job_of

CONFIG = read_config(Model(name="HuggingFaceTB/SmolLM2-135M-Instruct"))
HOLD_AND_FREE = """
import sys
from gearbox import processes
with processes.returning_free_memory(for_good=bool(int(sys.argv[1]))):
    pass
blocks = [bytearray(b"x" * 2**21) for _ in range(100)]
kept = blocks[-1]  # at the end of the heap, so that the library cannot return what is before it
held = processes.resident_memory()
del blocks
print(held - processes.resident_memory())
"""


def test_memory_is_tight_on_a_cpu_without_room_for_freed_blocks():
    job = job_of("smollm2_135m", "single", 1)
    needed = Fit.of(CONFIG, job, 0, before=0).predicted_bytes
    assert needed is not None
    tight, ample = (Fit.of(CONFIG, job, KEPT * needed + more, before=0) for more in (-1, 0))
    assert tight.is_tight and "freed blocks are returned at once" in tight.describe()
    assert not ample.is_tight and "freed blocks" not in ample.describe()
    assert not Fit.of(CONFIG, job, needed).is_tight  # a GPU has its own memory
    assert not Fit.of({"model_type": "mamba"}, job, 0, before=0).is_tight  # nothing is predicted


@pytest.mark.cold
def test_freed_blocks_return_to_the_system_at_once_only_if_memory_is_tight():
    """A fresh process, because blocks that are free already would be used again."""

    def returned(for_good: int) -> int:
        command = [sys.executable, "-c", HOLD_AND_FREE, str(for_good)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT / "src").stdout)

    assert returned(for_good=1) > 190 * 2**20
    assert returned(for_good=0) < 20 * 2**20
