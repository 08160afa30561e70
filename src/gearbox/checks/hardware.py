"""Compare precision and memory with the GPU that is named or found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gearbox.checks.finding import Said
from gearbox.planning.fit import Fit

if TYPE_CHECKING:
    from gearbox.checks.subject import Subject

BF16_SINCE, FLOAT8_SINCE = 8.0, 8.9


def precision(subject: Subject) -> Iterator[Said]:
    """Check that the GPU computes in the gear's precision, and that fp32 is meant."""
    job, gpu = subject.job, subject.gpu
    if job is None:
        return
    gear = job.gear
    path, key = (gear.path, "mixed_precision") if gear.zero_path is None else (gear.zero_path, "bf16.enabled")
    bf16, fp32 = ("bf16", '"no"') if gear.zero_path is None else ("true", "false")
    is_set = "mixed_precision" in gear.settings or "enabled" in (gear.zero_json or {}).get("bf16", {})
    if gear.precision == "no" and not is_set:
        yield Said(
            f"{path}: {key}: is not set, so a GPU computes in fp32; set {bf16}, or {fp32} if you want fp32", "hint"
        )
    elif gear.precision == "no" and gpu is not None:
        text = f"is {fp32}, so {gpu.name} computes in fp32, with twice the memory for activations; set {bf16}"
        yield Said(f"{path}: {key}: {text}", "hint")
    if gpu is None or gpu.capability is None:
        return
    found = f"{gpu.name} has compute capability {gpu.capability}"
    if gear.precision == "bf16" and gpu.capability < BF16_SINCE:
        if gear.shares_rows:
            text = f"ranks that share rows need compute capability {BF16_SINCE}, and {found}; use"
            yield Said(f"{gear.path}: {text} accelerate_configs/fsdp.yaml", key="parallelism_config")
        text = f"is {bf16}, but {found}: bf16 is slow below {BF16_SINCE}; set {fp32}, or use a newer GPU"
        yield Said(f"{path}: {key}: {text}", "hint")
    if subject.recipe.perf.float8 and gpu.capability < FLOAT8_SINCE:
        yield subject.say(f"perf.float8: needs compute capability {FLOAT8_SINCE}, and {found}; use false")


def plan(subject: Subject) -> Iterator[Said]:
    """Check that the run fits on the GPU, by the plan of src/plan.py."""
    job, gpu, config = subject.job, subject.gpu, subject.model.config
    if job is None or gpu is None or config is None or subject.recipe.run.rehearse:
        return
    fit = Fit.of(config, job, gpu.memory)
    if text := fit.problem():
        yield subject.say(text)
    elif text := fit.warning():
        yield subject.say(f"batch.micro_rows: {text}", "hint")
