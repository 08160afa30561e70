"""Make the batch of the next step in a thread while a step computes, and divide micro-batches into passes.

What a step trains does not depend on either.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gearbox.distributed import process_group
from gearbox.distributed.engine import Engine
from gearbox.model.router_loss import router_weight
from gearbox.planning.layer_memory import pass_tokens
from gearbox.rows import batches, units
from gearbox.rows.batches import Batch, StepBatch
from gearbox.rows.splits import TrainingRows


class RowsAhead:
    """The batches of a run's steps, of which a thread makes one ahead. The thread ends with this object."""

    def __init__(self, engine: Engine, rows: TrainingRows) -> None:
        self._engine, self._rows = engine, rows
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
        self._ahead: dict[int, Future[StepBatch]] = {}

    def take(self, step: int) -> StepBatch:
        """Return the batch of a step, or raise the error of its rows. Begin to make the next batch."""
        batch = (self._ahead.pop(step, None) or self._thread.submit(self._make, step)).result()
        if step + 1 < self._rows.num_steps:
            self._ahead[step + 1] = self._thread.submit(self._make, step + 1)
        return batch

    def _make(self, step: int) -> StepBatch:
        engine = self._engine
        row_ids = self._rows.rows_of_step(step)
        batch = batches.make_step_batch(self._rows.training, row_ids, engine.data_rank, engine.job.batch)
        if engine.device.type == "cuda":  # copies of pinned memory do not wait for the GPU
            with torch.cuda.device(engine.device):  # which each thread chooses for itself
                for micro_batch in batch.micro_batches:
                    micro_batch.update({name: tensor.pin_memory() for name, tensor in micro_batch.items()})
        return batch


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
