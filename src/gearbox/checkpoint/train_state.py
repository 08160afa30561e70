"""How far a run is: the one small object that a checkpoint carries in addition to tensors, saved and read at once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gearbox.data.batches import StepBatch, chain_hash

RECENT_LOSSES = 32  # with which a loss is compared to find a spike
FEW_LOSSES = 16  # fewer than these show no spike


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step of all ranks gave."""

    loss: float
    """Mean over the target tokens of the step; of a mixture of experts with its weighted router loss."""
    grad_norm: float
    """L2 norm before clipping; not finite where no rank took the step."""
    router_loss: float | None = None
    """Mean over the target tokens, without its weight; None where no router is balanced."""
    idle: float | None = None
    """Share of the step in which a pipeline's stages computed nothing; None without a pipeline."""

    @property
    def skipped(self) -> bool:
        """Whether no rank took the step."""
        return not math.isfinite(self.grad_norm)


@dataclass
class TrainState:
    """The progress of a run."""

    step: int = 0
    """Optimizer steps done, skipped ones included. Learning rate, rows and random numbers follow from it."""
    rows_hash: str = ""
    """Running hash of the rows consumed."""
    tokens: int = 0
    tokens_supervised: int = 0
    seconds: float = 0.0
    """Of training, without what was lost to interruptions."""
    num_skipped: int = 0
    """Steps whose loss or gradient was not finite: their rows are consumed, the weights unchanged."""
    num_skipped_in_a_row: int = 0
    recent_losses: list[float] = field(default_factory=list)
    evaluated: int = -1
    """The last step at which the held-out rows were evaluated."""
    eval_loss: float | None = None
    """Held-out loss at that step."""
    answers_before: dict[str, str] = field(default_factory=dict)
    """To each sample question, before the first step."""

    def advance(self, batch: StepBatch, result: StepResult) -> bool:
        """Count one step. Return True if its loss is a spike: it exceeds the recent maximum by the recent range."""
        self.step += 1
        self.rows_hash = chain_hash(self.rows_hash, batch.row_ids)
        self.tokens += batch.num_tokens
        self.tokens_supervised += batch.num_targets
        self.num_skipped += result.skipped
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if result.skipped else 0
        if not math.isfinite(result.loss):
            return False
        recent = self.recent_losses
        is_spike = len(recent) >= FEW_LOSSES and result.loss - max(recent) > max(recent) - min(recent)
        self.recent_losses = [*recent, result.loss][-RECENT_LOSSES:]
        return is_spike

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> TrainState:
        """Raises TypeError where a field is missing or unknown: another version wrote it."""
        if set(saved) != {one.name for one in fields(cls)}:
            raise TypeError(f"progress has the fields {sorted(saved)}")
        return cls(**saved)
