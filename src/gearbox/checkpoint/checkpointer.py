"""Save checkpoints in the background: a thread writes while training continues, and all ranks agree on the commit.

Threads never communicate between ranks. One small all-reduce at each step boundary reports to every rank whether any
rank was asked to stop, is still writing, or failed to write:

    staged -> every rank writes and syncs its shard -> all ranks are done -> rank 0 commits and prunes -> saved
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from gearbox import filesystem
from gearbox.checkpoint import folders
from gearbox.checkpoint.disk_space import DiskPlan, explain_write_error, lacks_memory
from gearbox.checkpoint.manifest import Manifest, ShardFacts, shard_name
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.staging import Staging
from gearbox.checkpoint.train_state import TrainState
from gearbox.errors import UserError, one_line_with_type
from gearbox.world import World

RETRY_STEPS = 10  # steps until a failed save is retried
LAST_TRIES = 3  # retries when no later step can retry
LAST_TRY_SECONDS = 10  # wait before each of these retries
LOOK_SECONDS = 1.0  # interval between two agreements while all ranks wait for a save


@dataclass(frozen=True)
class SaveFacts:
    """The facts about a complete checkpoint, named as in metrics.jsonl."""

    saved: int
    """The checkpoint's step."""
    save_bytes: int
    save_stall_seconds: float
    """Seconds for which training waited."""
    save_seconds: float
    """Seconds until the checkpoint was complete."""


@dataclass(frozen=True)
class SaveFailure:
    """The facts about a failed save, named as in metrics.jsonl."""

    save_failed: int
    """The step of the failed save."""
    save_error: str
    last_saved: int
    """Step of the last good checkpoint; 0 without one."""


class CheckpointSource(Protocol):
    """The contents of a checkpoint."""

    def local_shards(self) -> list[TensorShard]:
        """Return the tensors that this rank writes. Every rank calls it."""

    def manifest(self, state: TrainState) -> Manifest:
        """Return the manifest of this step, without its files. Every rank calls it."""


class SaveListener(Protocol):
    """A listener that every rank notifies about its saves."""

    def committing(self) -> None:
        """Flush to disk what must survive with the checkpoint. Rank 0's thread calls it, before the commit."""

    def saved(self, facts: SaveFacts) -> None:
        """Handle a complete checkpoint."""

    def save_failed(self, failure: SaveFailure) -> None:
        """Handle a failed save; a later step retries."""

    def heartbeat(self, doing: str) -> None:
        """Report progress while all ranks wait for a save."""


@dataclass(frozen=True)
class _Outcome:
    """The result of a rank's thread."""

    files: dict[str, ShardFacts] = field(default_factory=dict)
    host: str = ""
    error: str = ""
    lacks_memory: bool = False
    """True if a copy of the shard does not fit in host memory."""


class Checkpointer:
    """A saver that decides when to write checkpoints and writes them.

    Every rank creates one and makes the same calls.
    """

    def __init__(
        self, disk: DiskPlan, world: World, source: CheckpointSource, listener: SaveListener, saved_step: int
    ) -> None:
        """Create the saver; `saved_step` is the step of the newest checkpoint in the folder, 0 without one."""
        self.disk, self.world, self.source, self.listener = disk, world, source, listener
        self.saved_step = saved_step
        self.run_id = world.gather(uuid4().hex[:8])[0]
        self.staging = self._make_staging()
        self._retry_at: int | None = None
        self._step = 0  # of the save in progress; 0 when idle
        self._is_committing = False
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        self.seconds_waited = 0.0
        """Seconds for which training has waited for saves."""
        self._started = self._stall = 0.0
        self._manifest: Manifest | None = None
        self._of_others: set[str] = set()
        """Shards that other machines wrote; they may appear here late."""

    def save_if_due(self, state: TrainState, num_steps: int, stop: bool) -> bool:
        """Advance a save, or start one that is due. Return True on every rank if any rank was asked to stop."""
        busy, failed, stopping = self.world.sum([self._is_busy(), self._has_failed(), stop])
        if self._step and (failed or not busy):
            self._next_stage()
        is_last, every = state.step == num_steps, self.disk.save.every
        due = every > 0 and (state.step % every == 0 or is_last)
        due = due or (self.disk.save.best and (state.best_step == state.step or is_last))
        due = due or (self._retry_at is not None and state.step >= self._retry_at) or stopping > 0
        if due and state.step > self.saved_step:
            self._wait()  # two saves never overlap
            if state.step > self.saved_step:
                self._start_save(state)
        if stopping or is_last:
            self._wait()
            if due:
                self._try_again(state)
        return bool(stopping)

    def _try_again(self, state: TrainState) -> None:
        """Retry a failed save, since no later step can."""
        for _ in range(LAST_TRIES):
            if self.saved_step == state.step or not state.step:
                break
            for second in range(LAST_TRY_SECONDS):
                self.listener.heartbeat(f"step {state.step}, {second} s after a failed save")
                time.sleep(1)
            self._start_save(state)
            self._wait()

    def _start_save(self, state: TrainState) -> None:
        started = time.perf_counter()
        self._retry_at = None
        self._step = state.step
        self._manifest = self.source.manifest(state)
        shards, problem = self.source.local_shards(), None
        try:
            self.staging.stage(shards)
        except Exception as error:  # of this rank; all ranks agree on it when all are done
            problem = error
            if isinstance(error, OSError) and error.filename is None:
                problem = OSError(error.errno, error.strerror, self.disk.save.stage)
        self._started, self._stall = started, 0.0
        self._count_waiting(started)
        self._work(lambda: self._write_shard(problem))
        if self.staging.in_foreground:
            self._wait()

    def _make_staging(self) -> Staging:
        """Create the staging. Raise UserError on all ranks if any rank cannot write to save.stage."""
        staging, folder, problem = Staging(), self.disk.save.stage, None
        if self.disk.memory_problem:
            staging.stay_in_foreground()
        if folder is not None:
            try:
                staging = Staging(Path(folder))
            except OSError as error:
                problem = f"save.stage: {folder} cannot be written: {error.strerror}"
            if problems := [found for found in self.world.gather(problem) if found]:
                raise UserError(problems[0])
        return staging

    @property
    def _folder(self) -> Path:
        return self.disk.folder / f"step-{self._step}"

    @property
    def _aside(self) -> Path:
        """The folder that shards are written to before the commit."""
        return self._folder.with_name(f"{self._folder.name}.tmp-{self.run_id}") if self.disk.renames else self._folder

    def _write_shard(self, problem: Exception | None) -> _Outcome:
        if problem is not None:
            raise problem
        name = shard_name(self.world.rank, "" if self.disk.renames else self.run_id)

        def write() -> ShardFacts:
            filesystem.make_folder(self._aside)
            return self.staging.write(self._aside / name)

        return _Outcome({name: filesystem.retry_transient(write)}, socket.gethostname())

    def _commit(self, manifest: Manifest) -> _Outcome:
        for name, facts in manifest.files.items():
            seconds = filesystem.SEEN_SECONDS if name in self._of_others else 0.0
            if not filesystem.wait_for_size(self._aside / name, facts["bytes"], seconds):
                path = str(self._aside / name)
                raise OSError(errno.ENOENT, "is missing or incomplete; do all machines share run.dir?", path)
        self.listener.committing()
        filesystem.retry_transient(lambda: folders.commit(self._aside, self._folder, manifest))
        with suppress(OSError):  # the next save prunes again; this checkpoint is complete
            folders.prune(self.disk.folder, self.disk.save.keep, self.disk.renames)
        return _Outcome()

    def _next_stage(self) -> None:
        """Start the next stage on all ranks: the thread is done on every rank, or failed on one."""
        started = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        assert self._manifest is not None
        outcomes = self.world.gather(self._outcome)
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error}
        if failed:
            self._abort(failed)
        elif not self._is_committing:
            files = {name: facts for outcome in outcomes for name, facts in outcome.files.items()}
            here = socket.gethostname()
            self._of_others = {name for outcome in outcomes if outcome.host != here for name in outcome.files}
            self._manifest = manifest = replace(self._manifest, files=files)
            self._is_committing = True
            if self.world.rank == 0:
                self._work(lambda: self._commit(manifest))
            self._count_waiting(started)
        else:
            self.saved_step, self._is_committing = self._step, False
            num_bytes = sum(facts["bytes"] for facts in self._manifest.files.values())
            self._count_waiting(started)
            seconds = time.perf_counter() - self._started
            self.listener.saved(SaveFacts(self._step, num_bytes, round(self._stall, 4), round(seconds, 3)))
            self._release()
            self._step = 0

    def _count_waiting(self, started: float) -> None:
        """Count the time since `started`, in which training waited."""
        seconds = time.perf_counter() - started
        self._stall += seconds
        self.seconds_waited += seconds

    def _abort(self, failed: dict[int, _Outcome]) -> None:
        """Abandon this save. The last good checkpoint stays, training continues, and a later step retries.

        If a copy of a shard does not fit in host memory, nothing is copied from now on.
        """
        if self.world.rank == 0:
            with suppress(OSError):  # a later start deletes leftovers, or a later save overwrites them
                folders.delete_folder(self._aside)
        self._release()
        others = "" if len(failed) == 1 else f" (and {len(failed) - 1} more ranks)"
        rank, outcome = next(iter(failed.items()))
        text = f"rank {rank}{others}: {outcome.error}"
        if self.disk.save.stage is None and any(one.lacks_memory for one in failed.values()):
            self.staging.stay_in_foreground()
            text += "; from now on training waits while a checkpoint is written"
        self.listener.save_failed(SaveFailure(self._step, text, self.saved_step))
        every = self.disk.save.every
        self._retry_at = self._step + min(RETRY_STEPS, every or RETRY_STEPS)
        self._step, self._is_committing, self._outcome = 0, False, _Outcome()

    def _release(self) -> None:
        with suppress(OSError):  # the next save overwrites what is left on the local disk
            self.staging.release()

    def close(self) -> None:
        """Free the memory of the copies. No save may follow."""
        self.staging = Staging()

    def _wait(self) -> None:
        """Finish the save in progress."""
        while self._step:
            started = time.perf_counter()
            while self.world.sum([self._is_busy()])[0]:
                self.listener.heartbeat(f"step {self._step}, saving: {self.staging.num_written:,} bytes written")
                if self._thread is not None:
                    self._thread.join(timeout=LOOK_SECONDS)
            self._count_waiting(started)
            self._next_stage()

    def _work(self, job: Callable[[], _Outcome]) -> None:
        """Run the job in a thread that stores its outcome."""
        need = self.staging.num_bytes

        def run() -> None:
            try:
                self._outcome = job()
            except Exception as error:
                self._outcome = _Outcome(error=f"{type(error).__name__}: {error}")  # kept if explaining fails
                why = explain_write_error(error, self.disk.folder, need)
                self._outcome = _Outcome(error=why, lacks_memory=lacks_memory(error))

        self._outcome = _Outcome()
        self._thread = threading.Thread(target=run, name="save", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._thread, self._outcome = None, _Outcome(error=one_line_with_type(error))

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _has_failed(self) -> bool:
        return not self._is_busy() and bool(self._outcome.error)
