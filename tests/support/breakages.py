"""What other templates get wrong: each makes a run train another model."""

import dataclasses

from gearbox.config.gear import Gear
from gearbox.data import batches
from gearbox.distributed import verification
from gearbox.training import loop


def averaged_per_micro_batch(monkeypatch):
    """The usual loop: each micro batch is divided by its own count of targets."""
    usual = batches.make_step_batch

    def by_micro_batch(*arguments):
        step = usual(*arguments)
        counts = [int((micro["labels"] != batches.IGNORE_INDEX).sum()) for micro in step.micro_batches]
        whole = len(counts) * 2  # micro batches of both ranks
        return dataclasses.replace(step, num_targets=whole * sum(counts) / len(counts))

    monkeypatch.setattr(batches, "make_step_batch", by_micro_batch)


def scheduled_by_rank(monkeypatch):
    """A prepared scheduler steps once a rank."""
    usual = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda step, last, *rest: usual(min(2 * step, last), last, *rest))


def clipped_at_auto(monkeypatch):
    """DeepSpeed's "auto" is 1.0, whatever the recipe says; the check that refuses it is switched off too."""
    usual = Gear.filled_json
    monkeypatch.setattr(Gear, "filled_json", lambda *a: usual(*a) | {"gradient_clipping": 1.0})
    lines = {"ranks": "2", "engine": "ZeRO-2", "accumulation": "3", "precision": "fp32"}
    facts = verification.EngineFacts("ZeRO-2", "fp32", 3, lines)
    monkeypatch.setattr(verification, "verify", lambda *_: facts)
