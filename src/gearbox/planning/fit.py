"""Compare the memory that a run will take with what its device has, before the weights are loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from gearbox.config.job import Job
from gearbox.console import format_bytes
from gearbox.errors import UserError
from gearbox.planning.architecture import Architecture, Config
from gearbox.planning.cost import flops_per_token
from gearbox.planning.layer_memory import Setup
from gearbox.planning.memory import Prediction, predict

KEPT = 2  # times the predicted memory, with the freed blocks that the C library keeps: SmolLM2 135M took 1.2 and 1.9
FIRST_STEP = 56 * 2**20  # code and buffers of libraries that a process on a CPU touches in its first step: 50 to 60 MiB


@dataclass(frozen=True)
class Fit:
    """The predicted memory of a rank, and the memory of its device: a GPU, or this rank's part of the host's."""

    prediction: Prediction | None
    """None if the family has no closed form."""
    available: int
    """Bytes of the device that the run can take."""
    before: int = 0
    """Bytes that the process holds apart from the model, which count as its memory on a CPU."""
    flops_per_token: float | None = None
    """Operations of a training token, without what checkpointing computes again. None if the family is not known."""

    @classmethod
    def of(cls, config: Config, job: Job, available: int, before: int | None = None) -> Fit:
        """Predict the memory of a model with this config.json. `before` is what a process on a CPU holds now."""
        prediction, flops = None, None
        with suppress(UserError):
            shape = Architecture.of(config)
            flops = flops_per_token(shape, replace(Setup.of(job), checkpointing="none"), job.recipe.batch.row_tokens)
            prediction = predict(shape, job, on_cpu=before is not None)
        return cls(prediction, available, 0 if before is None else before + FIRST_STEP, flops)

    @property
    def predicted_bytes(self) -> int | None:
        """The predicted peak of what metrics.jsonl records: allocated memory of a GPU, or the process's on a CPU."""
        return None if self.prediction is None else self.before + self.prediction.allocated_bytes

    @property
    def is_tight(self) -> bool:
        """True on a CPU without room for what the C library keeps of freed blocks: up to as much as the step takes."""
        needed = self.predicted_bytes
        return needed is not None and self.before > 0 and self.available < KEPT * needed

    def describe(self) -> str:
        """Return one line for the plan of a run."""
        available = f"{format_bytes(self.available)} available"
        if self.predicted_bytes is None:
            return f"no closed form for this family; {available}"
        slower = "; freed blocks are returned at once, which is slower" if self.is_tight else ""
        return f"{format_bytes(self.predicted_bytes)} predicted at the peak; {available}{slower}"

    def problem(self) -> str | None:
        """Return why the run cannot fit, or None: its weights, gradients and optimizer state exceed the memory."""
        if self.prediction is None or self.prediction.state_bytes <= self.available:
            return None
        return (
            f"model.name: weights, gradients and optimizer state take {format_bytes(self.prediction.state_bytes)} of "
            f"{format_bytes(self.available)}; use more ranks under fsdp, or an adapter (see src/plan.py)"
        )

    def warning(self) -> str | None:
        """Return why the run will probably not fit, or None."""
        if self.prediction is None or self.prediction.peak_bytes <= self.available or self.problem():
            return None
        return (
            f"{self.prediction.moment} needs {format_bytes(self.prediction.peak_bytes)} of "
            f"{format_bytes(self.available)} memory; lower batch.micro_rows, or set perf.checkpointing=full"
        )
