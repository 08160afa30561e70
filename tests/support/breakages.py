"""Break a run as other templates do: each function here makes a run train a different model."""

import dataclasses

from gearbox.config.gear import Gear
from gearbox.distributed import verification
from gearbox.rows import batches
from gearbox.training import loop


def averaged_per_micro_batch(monkeypatch):
    """Divide the loss of each micro-batch by its own number of targets, as is common."""
    usual = batches.make_step_batch

    def by_micro_batch(*arguments):
        step = usual(*arguments)
        counts = [int((micro["labels"] != batches.IGNORE_INDEX).sum()) for micro in step.micro_batches]
        num_micro_batches = len(counts) * 2  # on both ranks
        return dataclasses.replace(step, num_targets=num_micro_batches * sum(counts) / len(counts))

    monkeypatch.setattr(batches, "make_step_batch", by_micro_batch)


def scheduled_by_rank(monkeypatch):
    """Step the scheduler once per rank, as a prepared scheduler does."""
    usual = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda step, last, *rest: usual(min(2 * step, last), last, *rest))


def clipped_at_auto(monkeypatch):
    """Clip at 1.0, DeepSpeed's "auto", whatever the recipe sets; disable the check that refuses it."""
    usual = Gear.filled_json
    monkeypatch.setattr(Gear, "filled_json", lambda *a: usual(*a) | {"gradient_clipping": 1.0})
    lines = {"ranks": "2", "engine": "ZeRO-2", "accumulation": "3", "precision": "fp32"}
    facts = verification.EngineFacts("ZeRO-2", "fp32", 3, lines)
    monkeypatch.setattr(verification, "verify", lambda *_: facts)
