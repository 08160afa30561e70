"""How far a run is: the one small object that a checkpoint carries beside the tensors, saved and read whole."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

RECENT_LOSSES = 32  # against which a spike is told
FEW_LOSSES = 16  # fewer than these tell nothing


@dataclass
class TrainState:
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
    """The last step at which the held-out rows were looked at."""
    eval_loss: float | None = None
    """What was found there."""
    answers_before: dict[str, str] = field(default_factory=dict)
    """To each sample question, before the first step."""

    def advance(self, *, rows_hash: str, num_tokens: int, num_targets: int, loss: float, skipped: bool) -> bool:
        """Count one step; returns whether its loss is a spike: farther above the last ones than these lie apart."""
        self.step += 1
        self.rows_hash = rows_hash
        self.tokens += num_tokens
        self.tokens_supervised += num_targets
        self.num_skipped += skipped
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if not math.isfinite(loss):
            return False
        recent = self.recent_losses
        is_spike = len(recent) >= FEW_LOSSES and loss - max(recent) > max(recent) - min(recent)
        self.recent_losses = [*recent, loss][-RECENT_LOSSES:]
        return is_spike

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> TrainState:
        """Raises TypeError where a field is missing or unknown: then it is another version's."""
        if set(saved) != {one.name for one in fields(cls)}:
            raise TypeError(f"progress has the fields {sorted(saved)}")
        return cls(**saved)
