"""Jobs on a real Slurm of two nodes, as docs/slurm.md tells to submit them. (cluster_slurm.py interrupts them.)"""

import os
import subprocess
import sys

import pytest

import slurm as slurms
from gearbox.config import ROOT

SCRIPTS = sorted((ROOT / "cluster" / "slurm").iterdir())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := slurms.why_not():
        pytest.skip(reason)
    with slurms.two_nodes(tmp_path_factory.mktemp("slurm")) as two:
        yield two


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return slurms.clone(tmp_path_factory.mktemp("clone"))


def test_two_nodes_train_what_one_process_trains(slurm, clone, chats, train):
    ended = slurm.submit(
        "--wait", "--nodes=2", "cluster/slurm/train.sbatch", "ddp", "recipes/tiny.yaml", *slurms.runs_small(chats),
        cwd=clone, GEARBOX_ENV=sys.prefix, PET_NPROC_PER_NODE="1",
    )  # fmt: skip
    log = (clone / f"slurm-{ended}.out").read_text()
    print(log)
    assert slurm.job(ended)["JobState"] == "COMPLETED", log
