"""Divide a micro-batch into forward passes of few tokens, where an engine allows it."""

from __future__ import annotations

from gearbox.distributed import process_group
from gearbox.distributed.engine import Engine
from gearbox.model.router_loss import router_weight
from gearbox.planning.layer_memory import pass_tokens
from gearbox.rows import units
from gearbox.rows.batches import Batch


def passes_of(engine: Engine, micro_batch: Batch, unit_size: int | None = None) -> list[Batch]:
    """Return the passes of a micro-batch: groups of its packed documents, or all of it.

    `unit_size` is that of the rows, for a batch without marked answers.

    Other engines send weights or gradients in each pass, and a router balances the tokens of a whole row.
    """
    recipe, is_plain = engine.job.recipe, engine.job.gear.engine in ("single", "ddp")
    limit = pass_tokens(recipe, process_group.runs_on_cpu())
    if limit is None or not is_plain or "position_ids" not in micro_batch or router_weight(engine.unwrapped):
        return [micro_batch]
    return units.passes_of(micro_batch, min(limit, recipe.batch.row_tokens), unit_size)
