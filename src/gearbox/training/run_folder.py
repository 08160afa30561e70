"""Choose and lock a run's folder, find its checkpoint, and write its status. All ranks call these together."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import yaml

from gearbox import filesystem
from gearbox.checkpoint import folders
from gearbox.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest, verify_shards
from gearbox.checkpoint.shards import ShardReader
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.job import Job
from gearbox.config.recipe import Recipe
from gearbox.distributed.engine import Engine
from gearbox.errors import UserError, one_line, one_line_with_type
from gearbox.launch import chatter, outcome
from gearbox.launch.environment import LaunchEnvironment
from gearbox.model import dropout
from gearbox.pages import run_facts, run_report
from gearbox.pages.run_facts import RunFacts
from gearbox.redact import redacted
from gearbox.rows import splits
from gearbox.rows.batches import PackedRows
from gearbox.rows.splits import Dropped
from gearbox.sharding import sharded_state
from gearbox.training import leftovers, resume
from gearbox.world import World

LOCK_SECONDS = 10  # time for the ranks of a dead launcher to save and exit
APPEARS_SECONDS = 10  # NFS may cache that a folder is missing
APPEARS_LATE_SECONDS = 60  # a mounted bucket may upload and list with a delay
VISIBLE_FILE = ".visible"  # in a new folder: some buckets have no empty folders
TAUGHT = " taught by "  # in a rows_key, before the identity of a teacher's probabilities
ORDER = "order 2:"  # prefix of a rows_key; it changes with the order in which the sampler takes rows


@dataclass
class Run:
    """A run's folder and progress."""

    folder: Path
    state: TrainState
    checkpoint: Path | None = None
    """The verified checkpoint that the run resumes from."""
    manifest: Manifest | None = None
    """The manifest of that checkpoint."""
    saved_step: int = 0
    """The step of the newest checkpoint in this folder."""
    model_step: int | None = None
    """The step of the saved model; None before it is saved."""
    has_begun: bool = False
    """True if the run has taken a step in this process."""

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def hang_folder(self) -> Path:
        """The folder for the stacks of ranks that hang."""
        return self.folder / "hang"

    def restore(self, engine: Engine) -> None:
        """Load the checkpoint, if any, into model and optimizer. Raise UserError if it cannot be loaded."""
        if self.checkpoint is None or self.manifest is None:
            return
        gear = self.manifest.gear
        written_by = f"accelerate_configs/{gear['name']}.yaml with --num_processes {gear['num_processes']}"
        try:
            saved = ShardReader(self.checkpoint, self.manifest)
            sharded_state.restore(engine.unwrapped, engine.model, engine.optimizer, saved, written_by, engine.world)
        except CorruptCheckpoint as error:
            raise UserError(f"{self.checkpoint}: {error}") from None

    def check_same(self, rows: str, base: str | None) -> None:
        """Raise UserError if the checkpoint was trained on other rows or other frozen base weights."""
        if self.manifest is None:
            return
        if not self.manifest.rows.startswith(ORDER):
            raise UserError(
                f"{self.checkpoint}: an earlier version wrote it, which trained the rows of an epoch in another order; "
                "resume with that version, or set run.resume=never"
            )
        if self.manifest.rows != rows and self.manifest.rows.partition(TAUGHT)[0] == rows.partition(TAUGHT)[0]:
            raise UserError(
                f"{self.checkpoint}: was trained with other probabilities of the teacher: the content of train.teacher "
                "has changed; restore it, or set run.resume=never"
            )
        if self.manifest.rows != rows:
            raise UserError(
                f"{self.checkpoint}: was trained on other rows: the content of data.path or its held-out part has "
                "changed; restore it, or set run.resume=never"
            )
        if self.manifest.base != base:
            raise UserError(
                f"{self.checkpoint}: its adapter was trained on other base weights: model.name or adapter.path has "
                "changed; restore it, or set run.resume=never"
            )

    def check_dropout(self, switched_off: dict[str, float]) -> None:
        """Raise UserError if an earlier version trained the checkpoint with the dropout that is now switched off."""
        if self.manifest is not None and switched_off and "dropout" not in self.manifest.recipe["model"]:
            raise UserError(
                f"{self.checkpoint}: was trained with the dropout of config.json ({dropout.listed(switched_off)}); set "
                "model.dropout=true, or run.resume=never"
            )

    def mark_started(self) -> None:
        """Record that the run has taken a step: its folder now stays, and an error makes the run fail."""
        self.has_begun = True
        self.write_status("running")

    def write_dropped(self, dropped: Iterator[Dropped]) -> None:
        """Write the dropped documents, each with its reason, to dropped.jsonl. Only rank 0 calls it."""
        if (first := next(dropped, None)) is not None:  # each start writes it again
            splits.write_dropped(self.folder / "dropped.jsonl", chain([first], dropped))

    def write_facts(self, facts: RunFacts) -> None:
        """Write run.json for the report. Only rank 0 calls it. A full disk does not stop the run."""
        try:
            run_facts.write(self.folder, facts)
        except OSError as error:
            print(f"gearbox: {self.folder / run_facts.FILE} cannot be written: {error.strerror}", file=sys.stderr)

    def write_report(self, status: str = "", text: str = "") -> None:
        """Write report.html and loss.png, with this status or that of status.json. No failure stops the run."""
        try:
            known: dict[str, object] | None = None
            if status:
                known = {"outcome": status, "text": text, "time": time.strftime(run_facts.TIME_FORMAT)}
                known |= self._of_model()
            run_report.write(self.folder, known)
        except Exception as error:  # for a full disk and for a mistake in the page alike
            why = one_line_with_type(error)
            print(f"gearbox: {self.folder / 'report.html'} not written: {why}", file=sys.stderr, flush=True)

    def write_status(self, status: str, text: str = "") -> None:
        """Write the run's state to status.json and to each launcher's status file. Every rank calls it."""
        launched = LaunchEnvironment.read()
        if launched.local_rank == 0:
            outcome.write_outcome(
                status,
                text,
                self.folder if launched.rank == 0 else None,
                run=str(self.folder),
                step=self.state.step,
                saved_step=self.saved_step,
                **self._of_model(),
                pid=os.getpid(),
                host=socket.gethostname(),
            )

    def _of_model(self) -> dict[str, int]:
        return {} if self.model_step is None else {"model_step": self.model_step}


def rows_key(corpus_digest: str, rows: PackedRows) -> str:
    """Return an identifier of a run's tokens, of the row of each token, and of the source of each row."""
    groups = "".join(f"+{size}" for size in rows.group_sizes[1:])
    teacher = "" if rows.teacher is None else f"{TAUGHT}{rows.teacher.identity}"
    return f"{ORDER}{corpus_digest}{groups} {rows.key}{teacher}"


@contextmanager
def open_run(job: Job, world: World, tell: Callable[[str], None]) -> Iterator[Run]:
    """Choose and lock the folder of this run. Delete a new folder if the run ends before its first step."""
    recipe = job.recipe
    locks: list[filesystem.Lock] = []  # one lock, on rank 0

    def choose() -> tuple[str, bool]:
        try:
            folder, is_new, lock = _choose_folder(recipe, job.run_name, requested)
        except OSError as error:
            raise UserError(f"run.dir: {recipe.run.dir} cannot be written: {error.strerror}") from None
        locks.append(lock)
        return str(folder), is_new

    # A launcher that joined later requests no folder.
    requested = next(filter(None, world.gather(outcome.requested_run_folder())), None)
    name, is_new = world.decide(choose)
    run = Run(Path(name), TrainState())
    try:
        _check_all_see(run.folder, world)
        source = resume.checkpoint_source(recipe, run.folder)
        _find_checkpoint(run, source, recipe, world, tell)
        world.decide(lambda: _tidy_up(run, recipe, locks[0], tell))
        if problem := chatter.keep_in(run.folder):
            tell(problem)
        yield run
    except BaseException as found:
        if run.has_begun and isinstance(found, UserError):
            run.write_status("failed", f"gearbox: {found}")
            if world.rank == 0:
                run.write_report()
        if locks and is_new and not run.has_begun:
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    finally:
        for lock in locks:
            lock.release()


def _check_all_see(folder: Path, world: World) -> None:
    """Raise UserError if a rank's machine does not see the folder."""
    seconds = APPEARS_LATE_SECONDS if filesystem.is_fuse(folder) else APPEARS_SECONDS
    sees = world.gather(filesystem.wait_for_path(folder, seconds))
    if blind := [str(rank) for rank, seen in enumerate(sees) if not seen]:
        raise UserError(f"run.dir: rank {', '.join(blind)} cannot see {folder}; all machines need the same run.dir")


def _tidy_up(run: Run, recipe: Recipe, lock: filesystem.Lock, tell: Callable[[str], None]) -> None:
    """Mend or delete what an earlier attempt left, and write the resolved recipe. Only the lock's holder calls it."""
    if lock.problem:
        tell(f"{run.folder}: cannot be locked ({lock.problem}); make sure that no other run uses this run.name")
    try:
        (run.folder / VISIBLE_FILE).unlink(missing_ok=True)
        for folder in folders.delete_unfinished(run.checkpoints):
            tell(f"{folder}: removed unfinished checkpoint")
        for leftover in run.hang_folder.glob("*.txt"):  # empty if the rank was killed; the others contain a stack
            if leftover.is_file() and not leftover.stat().st_size:
                leftover.unlink()
        leftovers.mend(run.folder, tell)
        resolved, status = run.folder / "resolved.yaml", run.folder / "status.json"
        is_known = bool(outcome.read_outcome(status))
        if run.saved_step:
            for path in [resolved] * (not leftovers.read_recipe(resolved)) + [status] * (not is_known):
                tell(f"{path}: was missing or damaged; it is written again from {run.checkpoint}")
        filesystem.atomic_write(resolved, yaml.safe_dump(redacted(recipe.model_dump(mode="json")), sort_keys=False))
        if run.checkpoint is None or not is_known:
            run.write_status("running")
        filesystem.sync(run.folder)
        filesystem.sync_names(run.folder)  # last: after a power cut the folder is complete or absent
    except OSError as error:
        raise UserError(f"run.dir: {run.folder} cannot be written: {error.strerror}") from None


def versions() -> dict[str, str]:
    """Return the versions of the packages that influence numerical results."""
    names = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")
    return {"python": platform.python_version()} | {name: version(name) for name in names if find_spec(name)}


def _choose_folder(recipe: Recipe, name: str, requested: str | None) -> tuple[Path, bool, filesystem.Lock]:
    """Return the run's folder, whether it is new, and its lock. A restarting launcher passes `requested`."""
    parent = Path(recipe.run.dir)
    filesystem.make_folder(parent)
    is_restart = LaunchEnvironment.read().restart_count > 0
    if requested is not None:
        return (folder := Path(requested)), False, _lock(folder)
    if last := resume.folder_to_continue(recipe, name, is_restart):
        lock = _lock(last)
        try:
            if resume.is_to_continue(last, recipe, is_restart):  # the run may have ended meanwhile
                return last, False, lock
        except UserError:
            lock.release()
            raise
        lock.release()
    folder = _create_folder(parent, name)
    lock = _lock(folder)
    if filesystem.is_fuse(folder):  # the lock is open, and an open file may not be in the bucket yet
        filesystem.atomic_write(folder / VISIBLE_FILE, "this folder belongs to a run that starts\n")
    return folder, True, lock


def _create_folder(parent: Path, name: str) -> Path:
    """Create and return the folder name, or name-2, name-3, ... after the last existing folder."""
    while True:
        there = resume.series(parent, name)
        last = there[-1].name.removeprefix(f"{name}-") if there else "0"
        folder = parent / (f"{name}-{int(last) + 1 if last.isdigit() else 2}" if there else name)
        with suppress(FileExistsError):  # another process created it first
            folder.mkdir()
            return folder
        if not folder.is_dir():
            raise UserError(f"run.dir: {folder} is not a folder; move it away, or choose another run.name")


def _lock(folder: Path) -> filesystem.Lock:
    """Lock the folder, since two runs would overwrite each other. The lock ends with its process."""
    leftovers.check_kinds(folder)
    lock = filesystem.Lock(folder / "lock", LOCK_SECONDS)
    if lock.is_taken:
        owner = outcome.read_outcome(folder / "status.json")
        raise UserError(
            f"run.name: {folder} is in use by process {owner.get('pid')} on {owner.get('host')}; wait for it, or "
            "choose another run.name"
        )
    return lock


def _find_checkpoint(run: Run, source: Path, recipe: Recipe, world: World, tell: Callable[[str], None]) -> None:
    """Set the checkpoint to resume from: `source` itself, or the newest complete checkpoint in it."""
    listed = world.gather([str(path) for path in resume.candidates(source)])[0]
    num_bad = 0
    for folder in map(Path, listed):
        problem, found = verify_share(folder, world)
        if problems := [found for found in world.gather(problem) if found]:
            num_bad += 1
            tell(f"skipping {folder}: {problems[0]}")
            continue
        assert found is not None
        run.manifest, run.state = found
        resume.check_recipe(folder, run.manifest, recipe)
        run.checkpoint = folder
        # A checkpoint in another folder belongs to another run.
        run.saved_step = run.manifest.step if folder.parent == run.checkpoints else 0
        if not run.saved_step:
            run.state.forget_best()
        return
    if num_bad:
        raise UserError(
            f"{source}: no valid checkpoint ({num_bad} skipped, see above); run.resume=never starts a new run in "
            "another folder"
        )


def verify_share(folder: Path, world: World) -> tuple[str | None, tuple[Manifest, TrainState] | None]:
    """Verify this rank's share of a checkpoint's files. Return the problem, or the manifest and the state."""
    try:
        manifest = read_manifest(folder)
        state = TrainState.from_json(manifest.progress)
        if manifest.progress["step"] != manifest.step:
            raise CorruptCheckpoint(f"{MANIFEST}: is corrupt: its progress is of step {manifest.progress['step']}")
        names = sorted(manifest.files)[world.rank :: world.size]
        verify_shards(folder, {name: manifest.files[name] for name in names})
        if world.rank == 0:
            ShardReader(folder, manifest)
        return None, (manifest, state)
    except CorruptCheckpoint as found:
        return one_line(found), None
