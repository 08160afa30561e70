"""Set the environment of every test before torch and datasets read it: one core, no GPU, no Hub, a private cache.

Only the tests that `make gpu` starts see GPUs, and use all cores.
"""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Tests of one run share tokenized data with each other, but with no other run.
CACHE = tempfile.TemporaryDirectory(prefix="gearbox-tests-")
os.environ.update(
    HF_DATASETS_CACHE=CACHE.name,
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles src in 0.4 s
if "GEARBOX_TEST_GPUS" not in os.environ:
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
os.chdir(ROOT)
