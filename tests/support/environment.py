"""The environment of every test, set before torch and datasets read it: one core, no GPU, no hub, its own cache."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What tests tokenize is kept for the other tests of this run and nobody else.
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
