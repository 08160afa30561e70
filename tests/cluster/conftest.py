"""Fixtures: a real Slurm of two nodes, two hosts, a clone of the repository, and jobs that run a stub launcher."""

import pytest

from support import slurm as slurms
from support.hosts import two_hosts
from support.slurm import DDP, TRAIN


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := slurms.why_not():
        pytest.skip(reason)
    with slurms.two_nodes(tmp_path_factory.mktemp("slurm")) as two:
        yield two


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return slurms.clone(tmp_path_factory.mktemp("clone"))


LAUNCHER = """#!/usr/bin/env bash
# Exit with CODE if it is set. Otherwise exit with 85, SAVE seconds after a signal, or with 0 after a requeue.
trap 'sleep "${SAVE:-0}"; exit 85' USR1 TERM
echo "restart ${SLURM_RESTART_COUNT:-0} on $PET_NNODES at $PET_MASTER_ADDR:$PET_MASTER_PORT of $PET_NPROC_PER_NODE: $*"
[[ -z ${CODE-} ]] || exit "$CODE"
((${SLURM_RESTART_COUNT:-0})) && exit 0
while :; do sleep 0.1; done
"""


@pytest.fixture
def environment(tmp_path):
    """Return an environment folder whose Python is LAUNCHER."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(LAUNCHER)
    python.chmod(0o755)
    return str(python.parent.parent)


@pytest.fixture
def job(slurm, clone, environment):
    """Submit a job of LAUNCHERs, wait until they run and return its id: job("--nodes=1", CODE="93")."""

    def submit(*flags: str, arguments=DDP, **variables: str) -> str:
        given = {"GEARBOX_ENV": environment, "PET_NPROC_PER_NODE": "1"} | variables
        number = slurm.submit("--nodes=2", *flags, TRAIN, *arguments, cwd=clone, **given)
        if "CODE" not in variables and not any(flag.startswith("--array") for flag in flags):
            slurm.until(lambda: slurms.log(clone, number).count("restart 0 on") >= 2, f"the start of job {number}")
        return number

    return submit
