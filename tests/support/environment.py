"""Set the environment of every test before torch and datasets read it: one core, no GPU, no Hub, a private cache."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Tests of one run share tokenized data with each other, but with no other run.
CACHE = tempfile.TemporaryDirectory(prefix="gearbox-tests-")
os.environ.update(
    HF_DATASETS_CACHE=CACHE.name,
    OMP_NUM_THREADS="1",
    DS_ACCELERATOR="cpu",
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.chdir(ROOT)
