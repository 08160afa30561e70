"""Track the progress of a run in one small object that each checkpoint stores in addition to its tensors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from gearbox.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Count, Number, explain_invalid
from gearbox.rows.batches import StepBatch, chain_hash

RECENT_LOSSES = 32  # a loss is compared with these to find a spike
FEW_LOSSES = 16  # spikes are not detected with fewer losses
MAX_BEST_BY = 2000  # characters
# Fields that earlier checkpoints lack.
ADDED_LATER = {"best_by", "best_on", "best_step", "best_score", "num_not_better", "score_before"}
REMOVED = {"answers_before"}  # only in earlier checkpoints


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step of all ranks."""

    loss: float
    """Mean over the target tokens of the step. A mixture of experts includes its weighted router loss."""
    grad_norm: float
    """L2 norm before clipping; not finite if the step was skipped."""
    router_loss: float | None = None
    """Unweighted mean over the target tokens; None without a balanced router."""
    expert_load: float | None = None
    """Tokens of the fullest expert, relative to the mean expert, averaged over layers; None without experts."""
    rank_load: float | None = None
    """Tokens of the rank with the fullest experts, relative to the mean rank; None without expert parallelism."""
    idle: float | None = None
    """Share of the step in which a pipeline's stages were idle; None without a pipeline."""
    figures: dict[str, float] | None = None
    """Means over the step's answers, such as their margin; None unless the objective compares answers."""

    @property
    def skipped(self) -> bool:
        """True if no rank took the step."""
        return not math.isfinite(self.grad_norm)


@dataclass
class TrainState:
    """The progress of a run."""

    step: Count = 0
    """Completed optimizer steps, including skipped ones. It determines learning rate, rows and random numbers."""
    rows_hash: str = ""
    """Running hash of the rows consumed."""
    tokens: Count = 0
    tokens_supervised: Count = 0
    seconds: Number = 0.0
    """Training time, without time lost to interruptions."""
    num_skipped: Count = 0
    """Steps with a non-finite loss or gradient. Their rows are consumed; the weights do not change."""
    num_skipped_in_a_row: Count = 0
    recent_losses: Annotated[list[Number], Field(max_length=RECENT_LOSSES)] = field(default_factory=list)
    evaluated: Annotated[int, Field(strict=True, ge=-1)] = -1
    """The last step at which the held-out rows were evaluated."""
    eval_loss: Annotated[float, Field(strict=True)] | None = None
    """Held-out loss at that step."""
    best_by: Annotated[str, Field(max_length=MAX_BEST_BY)] = ""
    """The figure that decides which evaluation is the best: an eval.metric, or the held-out loss."""
    best_on: Annotated[str, Field(max_length=MAX_BEST_BY)] = ""
    """An identifier of the documents that it is measured on; empty in checkpoints of earlier versions."""
    best_step: Count = 0
    """The step of the best evaluation after the first step; 0 without one."""
    best_score: Number | None = None
    """The score of that evaluation; higher is better."""
    num_not_better: Count = 0
    """Evaluations in a row that were no new best."""
    score_before: Number | None = None
    """The score before the first step."""

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

    def judge_by(self, by: str, on: str) -> None:
        """Set the figure that decides from now on, and its documents. Forget earlier scores of others."""
        if by != self.best_by or self.best_on not in ("", on):
            self.forget_best()
        self.best_by, self.best_on = by, on

    def judge(self, score: float) -> None:
        """Count an evaluation at this step. A score that is not finite is never the best; higher is better."""
        if not self.step:
            self.score_before = score if math.isfinite(score) else None
        elif math.isfinite(score) and (self.best_score is None or score > self.best_score):
            self.best_step, self.best_score, self.num_not_better = self.step, score, 0
        else:
            self.num_not_better += 1

    def forget_best(self) -> None:
        """Forget earlier scores, as if the run had not been evaluated yet."""
        self.best_by = self.best_on = ""
        self.best_step, self.best_score, self.num_not_better, self.score_before = 0, None, 0, None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> TrainState:
        """Create a state from JSON. Raise CorruptCheckpoint for fields of another version and for invalid values."""
        saved = {name: value for name, value in saved.items() if name not in REMOVED}
        if not {one.name for one in fields(cls)} - ADDED_LATER <= {*saved} <= {one.name for one in fields(cls)}:
            raise CorruptCheckpoint(f"was written by another version: progress has the fields {sorted(saved)}"[:1000])
        try:
            return TypeAdapter(cls).validate_python(saved)
        except ValidationError as error:
            raise CorruptCheckpoint(f"{MANIFEST}: is corrupt: progress: {explain_invalid(error)}") from None
