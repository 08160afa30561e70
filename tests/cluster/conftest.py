"""A real Slurm of two nodes, and jobs on it."""

import pytest

from support import slurm as slurms
from support.slurm import DDP, TRAIN


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := slurms.why_not():
        pytest.skip(reason)
    with slurms.two_nodes(tmp_path_factory.mktemp("slurm")) as two:
        yield two


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return slurms.clone(tmp_path_factory.mktemp("clone"))


LAUNCHER = """#!/usr/bin/env bash
# Ends with CODE if there is one; else with 85 when it is asked to, SAVE seconds later, and with 0 once requeued.
trap 'sleep "${SAVE:-0}"; exit 85' USR1 TERM
echo "restart ${SLURM_RESTART_COUNT:-0} on $PET_NNODES at $PET_MASTER_ADDR:$PET_MASTER_PORT of $PET_NPROC_PER_NODE: $*"
[[ -z ${CODE-} ]] || exit "$CODE"
((${SLURM_RESTART_COUNT:-0})) && exit 0
while :; do sleep 0.1; done
"""


@pytest.fixture
def environment(tmp_path):
    """The folder of a Python that is LAUNCHER."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(LAUNCHER)
    python.chmod(0o755)
    return str(python.parent.parent)


@pytest.fixture
def job(slurm, clone, environment):
    """A job of LAUNCHERs that have begun: job("--nodes=1", CODE="93") -> its number."""

    def submit(*flags: str, arguments=DDP, **variables: str) -> str:
        given = {"GEARBOX_ENV": environment, "PET_NPROC_PER_NODE": "1"} | variables
        number = slurm.submit("--nodes=2", *flags, TRAIN, *arguments, cwd=clone, **given)
        if "CODE" not in variables and not any(flag.startswith("--array") for flag in flags):
            slurm.until(lambda: slurms.log(clone, number).count("restart 0 on") >= 2, f"the begin of job {number}")
        return number

    return submit
