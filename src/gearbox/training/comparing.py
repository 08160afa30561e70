"""Compare answers in training: keep the reference's log-probabilities, and set and read the numbers of each step.

The reference is the model before its first step. Its log-probability of an answer depends only on the starting weights
and on the answer, so it is data. It is computed once, under the gear of the run, and kept in the cache and the run's
folder.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from gearbox import filesystem
from gearbox.config.job import BatchPlan, Job
from gearbox.config.recipe_values import WITH_REFERENCE
from gearbox.console import status
from gearbox.data import corpus
from gearbox.distributed import engine as engines
from gearbox.distributed import sequence_parallel
from gearbox.distributed.engine import Engine
from gearbox.errors import UserError
from gearbox.kernels import preference
from gearbox.kernels.preference import Answers
from gearbox.launch.watchdog import Watchdog
from gearbox.model import loading
from gearbox.model.loss import Comparison
from gearbox.rows.batches import PackedRows, StepBatch, micro_batches_of
from gearbox.rows.splits import TrainingRows
from gearbox.rows.units import GOOD, IGNORE_INDEX, NOT_COMPARED, ComparedAnswers
from gearbox.sharding.unwrap import without_adapter
from gearbox.training.rows_ahead import passes_of
from gearbox.training.run_folder import Run

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import PreTrainedModel

    from gearbox.training.session import TrainingData

REFERENCE = "reference.safetensors"
SECONDS_BETWEEN_WRITES = 60.0  # of a reference that is not complete
ROUNDS_AT_ONCE = 8  # steps' worth of rows between two looks at the clock and at stop requests

Sums = NDArray[np.float32]
KeepGoing = Callable[[], bool]


def install(model: PreTrainedModel | PeftModel, job: Job, accelerator: Accelerator) -> None:
    """Make a model that `install_loss` has changed compare answers, if the objective does."""
    if job.recipe.compares:
        without_adapter(model).comparison = Comparison(
            job.recipe.train.objective,
            job.recipe.preference,
            sequence_parallel.sum_over_sharing(job.gear, accelerator),
            job.gear.degree("sp") * job.gear.degree("cp"),
        )


def comparison_of(engine: Engine) -> Comparison | None:
    """Return how the model compares answers, or None if the objective does not."""
    return cast("Comparison | None", without_adapter(engine.unwrapped).comparison)


def begin_step(engine: Engine, rows: PackedRows, batch: StepBatch) -> None:
    """Set the numbers of a step that its loss needs, if it compares answers."""
    comparison = comparison_of(engine)
    if comparison is None or batch.num_units is None:
        return
    comparison.units_per_target = batch.num_units / max(1, batch.num_targets)
    comparison.units_per_good_target = batch.num_units / max(1, batch.num_good_targets)
    if comparison.objective == "kto":
        found = sums_of_answers(engine, rows, batch.row_ids, lambda: True, side=NOT_COMPARED)
        assert found is not None
        comparison.moved = _moved(rows, *found)


def figures_of_step(engine: Engine) -> dict[str, float] | None:
    """Return what the step's passes have measured on all ranks, or None if the objective compares no answers."""
    comparison = comparison_of(engine)
    if comparison is None:
        return None
    sums = engine.sum_over_ranks(comparison.pop_figures().to(engine.device))
    return _means(comparison.objective, sums, comparison.moved)


def _means(objective: str, sums: torch.Tensor, moved: float) -> dict[str, float]:
    figures = preference.means(objective, sums)
    return figures | {"kl": moved} if objective == "kto" else figures


def sums_of_answers(
    engine: Engine, rows: PackedRows, row_ids: list[int], keep_going: KeepGoing, side: int | None = None
) -> tuple[NDArray[np.int64], Sums] | None:
    """Return the chunks of these rows in order, and the log-probability of each chunk's targets, both [n].

    With a side, the sums of other answers are 0, and are not computed where rows are divided into passes.

    The rows are divided among ranks as in an evaluation; every rank gets all sums. Return None if `keep_going`, which
    all ranks call together, returns False.
    """
    gear, model = engine.job.gear, engine.model
    portion, (shard, num_shards) = engine.job.recipe.batch.rows, engine.eval_shard
    chunks = np.sort(np.concatenate([rows.row(row_id) for row_id in row_ids]))
    sums = torch.zeros(len(chunks), dtype=torch.float64, device=engine.device)
    model.eval()
    with torch.no_grad():
        for first in range(0, len(row_ids), portion):
            if not keep_going():
                model.train()
                return None
            ids = row_ids[first : first + portion]
            plan = BatchPlan.divide(len(ids), num_shards, engine.job.batch.micro_rows)
            for micro in micro_batches_of(ids, shard, plan):
                batch = rows.batch(micro)
                if side is not None:
                    is_other = _sides(rows)[batch["chunk_ids"].numpy()] != side
                    batch["labels"].masked_fill_(torch.from_numpy(is_other), IGNORE_INDEX)
                for one_pass in passes_of(engine, batch, rows.unit_size):  # the same passes as in training
                    # The padding is counted to the first chunk, to which it adds 0.
                    slots = torch.from_numpy(np.searchsorted(chunks, one_pass["chunk_ids"].numpy()).ravel())
                    losses, _ = model(**engine.to_device(one_pass))
                    sums.index_put_((slots.to(engine.device),), -losses.flatten().double(), accumulate=True)
    model.train()
    same = gear.degree("tp") * gear.degree("pp")  # ranks that computed the same rows
    return chunks, (engine.sum_over_all_ranks(sums) / same).float().cpu().numpy()


def _sides(rows: PackedRows) -> NDArray[np.int8]:
    """Return the side of each chunk's answer, [n]."""
    assert rows.answers is not None
    return rows.answers.sides


def _moved(rows: PackedRows, chunks: NDArray[np.int64], sums: Sums) -> float:
    """Return KTO's distance to the reference: the mean over answers to other prompts, and at least 0."""
    answers = rows.answers
    assert answers is not None and answers.reference is not None
    mismatched = answers.sides[chunks] == NOT_COMPARED
    gains = sums[mismatched].astype(np.float64) - answers.reference[chunks[mismatched]]
    return max(0.0, float(gains.mean())) if len(gains) else 0.0


def evaluate(engine: Engine, rows: PackedRows, keep_going: KeepGoing) -> tuple[float, dict[str, float]] | None:
    """Return the mean loss over the units of all held-out rows, and their figures.

    Return None if `keep_going` returns False.
    """
    comparison, marks = comparison_of(engine), rows.answers
    assert comparison is not None and marks is not None
    found = sums_of_answers(engine, rows, list(range(len(rows))), keep_going)
    if found is None:
        return None
    chunks, sums = found
    objective, settings = comparison.objective, comparison.settings
    moved = _moved(rows, chunks, sums) if objective == "kto" else 0.0
    compared = np.flatnonzero(marks.sides != NOT_COMPARED)
    place = compared // 2, marks.sides[compared]
    reference = np.zeros(len(sums), np.float32) if marks.reference is None else marks.reference + np.float32(moved)
    columns = torch.zeros(3, len(sums) // 2, 2)
    for column, values in zip(columns, (sums, reference, rows.chunks.targets), strict=True):
        column[place] = torch.from_numpy(np.asarray(values)[compared].astype(np.float32))
    answers = Answers(*columns)
    loss = float(preference.losses(objective, answers, settings).double().sum()) / max(1, len(sums) // 2)
    is_good = marks.sides == GOOD
    if (weight := settings.sft_weight_of(objective)) and is_good.any():
        loss -= weight * float(sums[is_good].sum(dtype=np.float64)) / int(rows.chunks.targets[is_good].sum())
    return loss, _means(objective, preference.figures(objective, answers, settings), moved)


def prepare(engine: Engine, data: TrainingData, rows: TrainingRows, run: Run, watchdog: Watchdog) -> bool:
    """Set the answers of rows, with the reference if the objective has one.

    Return False if a rank was asked to stop before the reference was complete. Raise UserError if a run that is resumed
    has lost its reference.
    """
    recipe = engine.job.recipe
    if not recipe.compares:
        return True
    parts = {"training": rows.training, "held_out": rows.held_out}
    for part in parts.values():
        part.answers = ComparedAnswers.of(part.documents, part.chunks)
    if recipe.train.objective not in WITH_REFERENCE:
        return True
    key = engine.world.decide(lambda: _key(engine, data.digest, parts))
    kept = corpus.cache() / "gearbox" / f"reference-{key}-{engines.precision(engine.job.gear)}" / REFERENCE
    own = run.folder / REFERENCE
    known = [own] if run.checkpoint is None else [own, run.checkpoint.parent.parent / REFERENCE]
    found = engine.world.decide(lambda: _read([*known, kept], key, parts))
    if run.checkpoint is not None and (found is None or any(np.isnan(sums).any() for sums in found.values())):
        raise UserError(
            f"{own}: is missing, damaged or of other rows, and {run.checkpoint} was trained with this reference; "
            "restore the file, or set run.resume=never"
        )
    sums = found or {name: np.full(len(part.chunks), np.nan, np.float32) for name, part in parts.items()}

    def write() -> None:
        try:
            _write(kept, key, sums)
        except UserError as error:  # the run can do without it
            engine.world.screen.print_always(f"hint: {error}")

    def keep_going() -> bool:
        return not any(engine.world.sum([watchdog.stop_requested]))

    watchdog.disarm(on_stop="keeping what is known of the reference")  # else a signal would end this rank at once
    if not _complete(engine, parts, sums, write, keep_going):
        return False
    engine.world.decide(lambda: _write(own, key, sums))
    for name, part in parts.items():
        assert part.answers is not None
        part.answers = replace(part.answers, reference=sums[name])
    return True


def _complete(
    engine: Engine,
    parts: dict[str, PackedRows],
    sums: dict[str, Sums],
    write: Callable[[], None],
    keep_going: KeepGoing,
) -> bool:
    """Compute the sums that are not known yet, and write them now and then. Return False if stopped before the end."""
    world, written = engine.world, time.monotonic()
    at_once = ROUNDS_AT_ONCE * engine.job.recipe.batch.rows
    pending = [
        (name, row)
        for name, part in parts.items()
        for row in range(len(part))
        if np.isnan(sums[name][part.row(row)]).any()
    ]
    if not pending:
        return True
    num_done, is_whole = 0, True
    with status(world.screen, "computing the reference", "rows") as work:
        for name, part in parts.items():
            rows = [row for of, row in pending if of == name]
            for first in range(0, len(rows), at_once):
                found = sums_of_answers(engine, part, rows[first : first + at_once], keep_going)
                if found is None:
                    is_whole = False
                    break
                sums[name][found[0]] = found[1]
                num_done += len(rows[first : first + at_once])
                work.at(num_done)
                if world.rank == 0 and time.monotonic() - written > SECONDS_BETWEEN_WRITES:
                    write()
                    written = time.monotonic()
    if world.rank == 0:
        write()
    return is_whole


def _key(engine: Engine, digest: str, parts: dict[str, PackedRows]) -> str:
    """Return a hash of what the reference depends on: the starting weights, and the tokens of each chunk."""
    recipe = engine.job.recipe
    chunks = xxhash.xxh3_128()
    for part in parts.values():
        for array in (part.chunks.document, part.chunks.start, part.chunks.length):
            chunks.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    content = [
        loading.starting_weights(engine.source, recipe),
        recipe.model.quantize,
        recipe.model.add_tokens,
        digest,
        recipe.train.objective == "kto",  # which also needs answers to other prompts
        chunks.hexdigest(),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _read(paths: list[Path], key: str, parts: dict[str, PackedRows]) -> dict[str, Sums] | None:
    """Return the sums in the first of these files that is whole and has this key, or None."""
    from safetensors import SafetensorError, safe_open

    for path in paths:
        try:
            with safe_open(path, "np") as file:
                sums = {name: file.get_tensor(name) for name in parts}
                facts = file.metadata() or {}
        except (OSError, SafetensorError):
            continue
        fits = all(sums[name].shape == (len(part.chunks),) for name, part in parts.items())
        if fits and facts.get("key") == key and facts.get("digest") == _digest(sums):
            return sums
    return None


def _write(path: Path, key: str, sums: dict[str, Sums]) -> None:
    """Write the sums to a file. Raise UserError if that fails."""
    from safetensors.numpy import save

    try:
        filesystem.make_folder(path.parent)
        filesystem.atomic_write(path, save(sums, {"key": key, "digest": _digest(sums)}))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _digest(sums: dict[str, Sums]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(np.ascontiguousarray(sums[name]).tobytes() for name in sorted(sums)))
