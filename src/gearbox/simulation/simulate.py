"""Simulate a training step of a job in a child process. This module imports no torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gearbox.config.job import Job
from gearbox.errors import UserError
from gearbox.filesystem import read_json_object
from gearbox.launch.environment import python_path, without_launcher
from gearbox.planning.architecture import Config

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Simulation:
    """The memory and the traffic of rank 0 in a training step that has gradients and optimizer state."""

    peak_bytes: int
    """The most bytes that the GPU holds at one time, without what the allocator and the CUDA context add."""
    terms: dict[str, int]
    """These bytes by term: weights, gradients, optimizer, activations, head, gathered."""
    loading_bytes: int
    """The most bytes of the GPU until the first step."""
    sent_bytes: dict[str, int]
    """Bytes of the complete tensors of a step's collectives, by kind. A ring all-reduce sends nearly twice as much."""
    seconds: float
    """The time that the simulation took."""


def simulate(job: Job, config: Config) -> Simulation:
    """Run a step of a job on tensors without memory. `config` is the content of the model's config.json.

    Raise UserError for a job that cannot be simulated.
    """
    if refusal := _refusal(job):
        raise UserError(f"plan: {refusal}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome.json"
        ended = subprocess.run(
            [sys.executable, "-m", "gearbox.simulation.step", str(outcome)],
            input=pickle.dumps((job, dict(config))),
            env=without_launcher() | NO_GPU | {"PYTHONPATH": python_path()},
            capture_output=True,
            check=False,
        )
        if ended.returncode or not outcome.exists():
            lines = ended.stderr.decode(errors="replace").strip().splitlines()
            raise RuntimeError("\n".join([f"the simulation of {job.gear.name} failed:", *lines[-30:]]))
        found = read_json_object(outcome)
    if "refused" in found:
        raise UserError(str(found["refused"]))
    return Simulation(**found, seconds=time.monotonic() - begin)


def _refusal(job: Job) -> str:
    """Return why a job cannot be simulated, or an empty string."""
    gear, perf = job.gear, job.recipe.perf
    if gear.engine == "zero":
        return f"{gear.name}: DeepSpeed cannot run on tensors without memory; the closed form covers it"
    if gear.engine == "pp":
        return "pp: a stage waits for real tensors of the others; the closed form covers it"
    if gear.engine == "fsdp" and gear.degree("tp") > 1:
        return f"{gear.name}: FSDP2 cannot place tensors without memory that tp divides; the closed form covers it"
    if gear.degree("ep") > 1:
        return f"{gear.name}: the values of tokens decide which ranks they are sent to; the closed form covers it"
    if perf.kernels == "liger":
        return "perf.kernels: Liger's kernels need a GPU; simulate with auto"
    if perf.float8:
        return "perf.float8: torchao's kernels need a GPU; simulate without it"
    return ""
