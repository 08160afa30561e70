"""Write a teacher's probabilities of every target token of all rows. All ranks call these functions together.

They are written in parts. A killed process leaves a folder with the complete ones, which parts.json lists. The next
process computes the others, under any gear.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
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
from gearbox.rows.teacher import ABOUT, File, PartWriter, TeacherFacts
from gearbox.world import World

PARTS = "parts.json"  # the facts of a folder that is not complete
PART_SECONDS = 60.0  # of work before it is listed, or up to twice as long
APPEARS_SECONDS = 10.0  # for the folder on other machines; NFS may cache that it is missing

Group = list[tuple[PackedRows, list[int]]]
"""Rows to compute, in portions of a step's size."""


def is_started(folder: Path) -> bool:
    """Return whether a killed process has left complete parts in this folder, since folders cannot be renamed there."""
    return (folder / PARTS).is_file() and not (folder / ABOUT).exists()


@contextmanager
def new_folder(folder: Path, world: World) -> Iterator[Path]:
    """Yield a folder that all ranks fill, which then becomes `folder` in one step, if folders can be renamed there.

    It is the one that an earlier process has left, if there is one. Raise UserError if it cannot be made, or if another
    process is filling it.
    """
    lock_path = folder.with_name(f"{folder.name}.lock")
    locks: list[filesystem.Lock] = []  # of the first rank

    def make() -> str:
        try:
            filesystem.make_folder(folder.parent)
            locks.append(filesystem.Lock(lock_path, 0))
            if locks[0].is_taken:
                raise UserError(f"--to: another process is filling {folder}; wait for it, or give another folder")
            is_final = filesystem.rename_problem(folder.parent)
            to_fill = folder if is_final else folder.with_name(f"{folder.name}.partial")
            to_fill.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--to: {folder} cannot be written: {error.strerror}") from None
        return str(to_fill)

    is_whole, made = False, None
    try:
        made = Path(world.decide(make))
        if not all(world.gather(filesystem.wait_for_path(made, APPEARS_SECONDS))):
            raise UserError(f"--to: not all machines see {made}; give a folder that they share")
        yield made
        world.decide(lambda: _finish(made, folder))
        is_whole = True
    finally:
        if made is not None and world.rank == 0 and not is_whole and not (made / PARTS).is_file():
            shutil.rmtree(made, ignore_errors=True)
        for lock in locks:
            if not lock.is_taken:
                lock_path.unlink(missing_ok=True)
            lock.release()


def _finish(made: Path, folder: Path) -> None:
    """Let a folder appear. Raise UserError if that fails; then the list of parts is still there to resume from."""
    try:
        filesystem.sync_tree(made)
        if made != folder:
            filesystem.rename(made, folder)
        filesystem.remove(folder / PARTS)
    except OSError as error:
        raise UserError(f"--to: {folder} cannot be written: {error.strerror}") from None


def write(
    engine: Engine, parts: list[PackedRows], tokenizer: PreTrainedTokenizerFast, folder: Path, top: int
) -> TeacherFacts:
    """Fill a folder with the `top` largest probabilities at each target of these rows, and return its facts.

    Ranks divide the rows as in an evaluation. Ranks that share a model share a part, which the first of them writes.
    Raise UserError if the folder has parts of another teacher.
    """
    world, recipe = engine.world, engine.job.recipe
    top, vocabulary = min(top, len(tokenizer)), teacher.vocabulary_of(tokenizer)
    weights = world.decide(lambda: loading.starting_weights(engine.source, recipe))
    facts, missing = world.decide(lambda: _resume(folder, TeacherFacts(weights, vocabulary, top, 0, 0, {}), parts))
    num_rows, num_missing = sum(map(len, parts)), sum(map(len, missing))
    if facts.files:
        world.screen.print_always(f"resuming: {num_rows - num_missing:,} of {num_rows:,} rows are in {folder}")
    num_targets = sum(int(rows.targets[rows_missing].sum()) for rows, rows_missing in zip(parts, missing, strict=True))
    _check_room(folder, num_targets * teacher.bytes_per_target(top), world)
    number = 1 + max((teacher.number_of(name) for name in facts.files), default=-1)
    portions = _portions(parts, missing, recipe.batch.rows)
    engine.model.eval()
    with torch.no_grad(), status(world.screen, "computing the teacher's probabilities", "rows") as work:
        done, size = 0, 1

        def advance(num_done: int) -> None:
            nonlocal done
            done += num_done
            work.at(done)

        while group := list(islice(portions, size)):
            began = time.monotonic()
            files = _write_part(engine, group, (folder, number), (top, len(tokenizer)), advance)
            facts, is_short = world.decide(partial(_add, folder, facts, files, began))
            size, number = size * (2 if is_short else 1), number + world.size
    world.decide(lambda: facts.write(folder / ABOUT))
    return facts


def _resume(folder: Path, facts: TeacherFacts, parts: list[PackedRows]) -> tuple[TeacherFacts, list[list[int]]]:
    """Return the facts of the complete parts in a folder, and the rows that they lack. Delete all others.

    Raise UserError if they are of another teacher than `facts`.
    """
    if (folder / PARTS).is_file():
        try:
            found = TeacherFacts.of(filesystem.read_json_object(folder / PARTS))
        except ValueError:
            found = None
        if found is None:
            raise UserError(f"--to: {folder / PARTS} is damaged; delete {folder}")
        if (found.teacher, found.vocabulary, found.top) != (facts.teacher, facts.vocabulary, facts.top):
            raise UserError(
                f"--to: an earlier process began {folder} with another teacher or --top; delete it, or give another"
            )
        damaged = {teacher.number_of(name) for name in found.files if found.damaged(folder, [name])}
        whole = {name: file for name, file in found.files.items() if teacher.number_of(name) not in damaged}
        facts = _with_files(folder, facts, whole)
    for path in folder.iterdir():
        if path.name not in {*facts.files, PARTS}:
            filesystem.remove(path)
    known = teacher.table_of(folder, facts.files)[:, 0]
    return facts, [_missing_rows(rows, known) for rows in parts]


def _missing_rows(rows: PackedRows, known: np.ndarray) -> list[int]:
    """Return the rows with a chunk whose key is not known."""
    if not len(known):
        return [*range(len(rows))]
    keys = np.array([teacher.key_of(rows, chunk) for chunk in range(len(rows.chunks))], np.uint64)
    is_known = np.isin(keys, known) | (rows.chunks.targets == 0)
    return [row for row in range(len(rows)) if not is_known[rows.row(row)].all()]


def _add(folder: Path, facts: TeacherFacts, files: dict[str, File], began: float) -> tuple[TeacherFacts, bool]:
    """List a part that was begun at this time. Return the facts, and whether the next part may be twice as large."""
    facts = _with_files(folder, facts, files)
    facts.write(folder / PARTS)
    return facts, time.monotonic() - began < PART_SECONDS


def _with_files(folder: Path, facts: TeacherFacts, files: dict[str, File]) -> TeacherFacts:
    """Return the facts with these files of a folder, and with the numbers of their chunks and targets."""
    counts = teacher.table_of(folder, files)[:, 1]
    return replace(
        facts,
        files=facts.files | files,
        num_chunks=facts.num_chunks + len(counts),
        num_targets=facts.num_targets + int(counts.sum()),
    )


def _portions(parts: list[PackedRows], missing: list[list[int]], size: int) -> Iterator[tuple[PackedRows, list[int]]]:
    """Yield the missing rows in portions of a step's size."""
    for rows, of_rows in zip(parts, missing, strict=True):
        for first in range(0, len(of_rows), size):
            yield rows, of_rows[first : first + size]


def _write_part(
    engine: Engine,
    group: Group,
    place: tuple[Path, int],
    top: tuple[int, int],
    advance: Callable[[int], None],
) -> dict[str, File]:
    """Compute a group of rows, and write a part on each rank, numbered from that of the place. Return all files."""
    world, gear, (folder, number) = engine.world, engine.job.gear, place
    mine = 0
    for rows, portion in group:
        own = [row for micro in _micro_batches(engine, portion) for row in micro if row is not None]
        mine += int(rows.targets[own].sum())
    writer, problem = None, None
    if mine and engine.eval_shard not in [gear.eval_shard(rank) for rank in range(world.rank)]:
        try:
            writer = PartWriter(folder, number + world.rank, mine, top[0])
        except OSError as error:
            problem = f"--to: {folder} cannot be written: {error.strerror}"
    _refuse(world, problem)
    for rows, portion in group:
        _refuse(world, _add_portion(engine, rows, portion, writer, top))
        advance(len(portion))
    files: dict[str, File] = {}
    if writer is not None:
        try:
            files = writer.close()
        except OSError as error:
            problem = f"--to: {folder} cannot be written: {error.strerror}"
    _refuse(world, problem)
    return {name: file for by_rank in world.gather(files) for name, file in by_rank.items()}


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


def _micro_batches(engine: Engine, portion: list[int]) -> list[list[int | None]]:
    shard, num_shards = engine.eval_shard
    plan = BatchPlan.divide(len(portion), num_shards, engine.job.recipe.batch.micro_rows)
    return micro_batches_of(portion, shard, plan)


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
