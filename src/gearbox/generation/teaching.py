"""Write a teacher's probabilities of every target token of all rows. All ranks call these functions together."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from gearbox import filesystem
from gearbox.config.job import BatchPlan
from gearbox.console import format_bytes, status
from gearbox.distributed.engine import Engine
from gearbox.errors import UserError
from gearbox.model import loading
from gearbox.rows import teacher
from gearbox.rows.batches import Batch, PackedRows, micro_batches_of
from gearbox.rows.teacher import File, PartWriter, TeacherFacts
from gearbox.world import World

APPEARS_SECONDS = 10.0  # for the folder on other machines; NFS may cache that it is missing


@contextmanager
def new_folder(folder: Path, world: World) -> Iterator[Path]:
    """Yield a folder that all ranks fill, which then becomes `folder` in one step, if folders can be renamed there.

    What is left of a killed process has no about.json, and the next one deletes it. Raise UserError if the folder
    cannot be made, or if another process is filling it.
    """
    lock_path = folder.with_name(f"{folder.name}.lock")
    locks: list[filesystem.Lock] = []  # of the first rank

    def make() -> str:
        try:
            filesystem.make_folder(folder.parent)
            locks.append(filesystem.Lock(lock_path, 0))
            if locks[0].is_taken:
                raise UserError(f"--to: another process is filling {folder}; wait for it, or give another folder")
            for left in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"):
                filesystem.remove(left)
            aside = folder if filesystem.rename_problem(folder.parent) else filesystem.aside_of(folder)
            aside.mkdir()
        except OSError as error:
            raise UserError(f"--to: {folder} cannot be written: {error.strerror}") from None
        return str(aside)

    is_whole, made = False, None
    try:
        made = Path(world.decide(make))
        if not all(world.gather(filesystem.wait_for_path(made, APPEARS_SECONDS))):
            raise UserError(f"--to: not all machines see {made}; give a folder that they share")
        yield made
        world.decide(lambda: _finish(made, folder))
        is_whole = True
    finally:
        if made is not None and world.rank == 0 and not is_whole:
            shutil.rmtree(made, ignore_errors=True)
        for lock in locks:
            if not lock.is_taken:
                lock_path.unlink(missing_ok=True)
            lock.release()


def _finish(made: Path, folder: Path) -> None:
    """Let a folder appear. Raise UserError if that fails."""
    try:
        filesystem.sync_tree(made)
        if made != folder:
            filesystem.rename(made, folder)
    except OSError as error:
        raise UserError(f"--to: {folder} cannot be written: {error.strerror}") from None


def write(
    engine: Engine, parts: list[PackedRows], tokenizer: PreTrainedTokenizerFast, folder: Path, top: int
) -> TeacherFacts:
    """Fill a folder with the `top` largest probabilities at each target of these rows, and return its facts.

    Ranks divide the rows as in an evaluation. Ranks that share a model share a part, which the first of them writes.
    """
    world, gear = engine.world, engine.job.gear
    top = min(top, len(tokenizer))
    num_targets = sum(int(rows.targets.sum()) for rows in parts)
    _check_room(folder, num_targets * teacher.bytes_per_target(top), world)
    writer, problem = None, None
    mine = sum(int(rows.targets[row]) for rows in parts for row in _rows_of_rank(engine, rows))
    if mine and engine.eval_shard not in [gear.eval_shard(rank) for rank in range(world.rank)]:
        try:
            writer = PartWriter(folder, world.rank, mine, top)
        except OSError as error:
            problem = f"{folder} cannot be written: {error.strerror}"
    engine.model.eval()
    num_rows = sum(len(rows) for rows in parts)
    with torch.no_grad(), status(world.screen, "computing the teacher's probabilities", "rows") as work:
        done = 0
        for rows in parts:
            for portion in _portions(engine, rows):
                problem = problem or _add_portion(engine, rows, portion, writer, (top, len(tokenizer)))
                _refuse(world, problem)
                done += len(portion)
                work.at(min(done, num_rows))
    files: dict[str, File] = {}
    if writer is not None:
        try:
            files = writer.close()
        except OSError as error:
            problem = f"{folder} cannot be written: {error.strerror}"
    _refuse(world, problem)
    num_chunks = sum(world.gather(0 if writer is None else writer.num_chunks))
    listed = {name: file for by_rank in world.gather(files) for name, file in by_rank.items()}
    weights = world.decide(lambda: loading.starting_weights(engine.source, engine.job.recipe))
    facts = TeacherFacts(weights, teacher.vocabulary_of(tokenizer), top, num_chunks, num_targets, listed)
    world.decide(lambda: facts.write(folder))
    return facts


def _refuse(world: World, problem: str | None) -> None:
    """Raise UserError on all ranks if one has a problem."""
    if problems := [found for found in world.gather(problem) if found]:
        raise UserError(problems[0])


def _check_room(folder: Path, num_bytes: int, world: World) -> None:
    def check() -> None:
        free = shutil.disk_usage(folder).free
        if free < num_bytes:
            raise UserError(
                f"--to: {folder.parent} has {format_bytes(free)} free, and the probabilities need "
                f"{format_bytes(num_bytes)}; lower --top, or give a folder on a larger disk"
            )

    world.decide(check)


def _portions(engine: Engine, rows: PackedRows) -> Iterator[list[int]]:
    """Yield the rows in groups of a step's size."""
    size = engine.job.recipe.batch.rows
    for first in range(0, len(rows), size):
        yield list(range(first, min(first + size, len(rows))))


def _micro_batches(engine: Engine, portion: list[int]) -> list[list[int | None]]:
    shard, num_shards = engine.eval_shard
    plan = BatchPlan.divide(len(portion), num_shards, engine.job.recipe.batch.micro_rows)
    return micro_batches_of(portion, shard, plan)


def _rows_of_rank(engine: Engine, rows: PackedRows) -> list[int]:
    """Return the rows that this rank computes."""
    micro_batches = [micro for portion in _portions(engine, rows) for micro in _micro_batches(engine, portion)]
    return [row for micro in micro_batches for row in micro if row is not None]


def _add_portion(
    engine: Engine, rows: PackedRows, portion: list[int], writer: PartWriter | None, top: tuple[int, int]
) -> str | None:
    """Compute this rank's share of a group of rows and write it. Return what prevents that, or None."""
    problem = None
    for row_ids in _micro_batches(engine, portion):
        batch: Batch = rows.batch(row_ids)
        ids, log_probs = (one.cpu() for one in engine.model(**engine.to_device(batch), top=top))
        if log_probs.isnan().any():
            found = rows.locations([row for row in row_ids if row is not None])
            problem = f"model.name: the teacher's probabilities are not numbers in one of {found}; check its weights"
        if writer is not None and problem is None:
            try:
                writer.add(rows, batch, ids.numpy(), log_probs.numpy())
            except OSError as error:
                problem = f"--to: a part cannot be written: {error.strerror}"
    return problem
