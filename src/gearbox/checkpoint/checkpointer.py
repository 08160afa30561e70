"""When checkpoints are written: training goes on while a thread writes, and all ranks agree before one counts.

Threads never communicate. At each boundary of a step one small all-reduce tells every rank whether somebody was asked
to stop, still writes, or could not write:

    staged -> every rank writes and syncs its shard -> all say so -> rank 0 commits, and prunes -> saved
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gearbox import filesystem
from gearbox.checkpoint import folders, manifest, shards
from gearbox.checkpoint.disk_space import explain_write_error
from gearbox.checkpoint.staging import Staging
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.recipe import Save
from gearbox.errors import UserError

RETRY_STEPS = 10  # after a save that failed
LAST_TRIES = 3  # where no later step can try again
LAST_TRY_SECONDS = 10  # between them
LOOK_SECONDS = 1.0  # between two agreements while all wait for a save


class Checkpointer:
    """Made and called alike by every rank. `agree` sums lists of numbers over the ranks, `gather` lists objects."""

    def __init__(
        self,
        folder: Path,
        save: Save,
        *,
        rank: int,
        run_id: str,
        saved_step: int,
        renames: bool,
        agree: Callable[[list[int]], list[int]],
        gather: Callable[[Any], list[Any]],
        pieces: Callable[[], list[shards.TensorShard]],
        describe: Callable[[], dict[str, Any]],
        tell: Callable[..., None],
        beat: Callable[[str], None],
    ) -> None:
        self.folder, self.save, self.rank, self.run_id, self.renames = folder, save, rank, run_id, renames
        self.agree, self.gather, self.pieces, self.describe, self.tell = agree, gather, pieces, describe, tell
        self.heartbeat = beat
        self.saved_step = saved_step
        """Of the newest checkpoint, 0 if there is none."""
        self.staging = self._staging()
        self._retry_at: int | None = None
        self._step = 0  # of the save under way, 0 if there is none
        self._is_committing = False
        self._thread: threading.Thread | None = None
        self._outcome: dict[str, Any] = {}
        self._started = self._stall = 0.0
        self._manifest: dict[str, Any] = {}
        self._of_others: set[str] = set()
        """Shards that other machines wrote: they may be seen here later."""

    def on_step_boundary(self, progress: TrainState, num_steps: int, stop: bool) -> bool:
        """Between two steps: bring a save forward, begin one if it is due. True if the ranks are to stop here."""
        busy, failed, stopping = self.agree([self._is_busy(), self._has_failed(), stop])
        if self._step and (failed or not busy):
            self._next_stage()
        is_last = progress.step == num_steps
        due = self.save.every > 0 and (progress.step % self.save.every == 0 or is_last)
        due = due or (self._retry_at is not None and progress.step >= self._retry_at) or stopping > 0
        if due and progress.step > self.saved_step:
            self._wait()  # two saves never overlap
            if progress.step > self.saved_step:
                self._start_save(progress)
        if stopping or is_last:
            self._wait()
            for _ in range(LAST_TRIES if due else 0):
                if self.saved_step == progress.step or not progress.step:
                    break
                for second in range(LAST_TRY_SECONDS):
                    self.heartbeat(f"step {progress.step}, {second} s after a save that failed")
                    time.sleep(1)
                self._start_save(progress)
                self._wait()
        return bool(stopping)

    def _start_save(self, progress: TrainState) -> None:
        started = time.perf_counter()
        self._retry_at = None
        self._step = progress.step
        self._manifest = {"step": progress.step, "progress": progress.to_json()} | self.describe()
        if progress.evaluated == progress.step:
            self._manifest["eval_loss"] = progress.eval_loss
        pieces, full = self.pieces(), None
        try:
            self.staging.stage(pieces)
        except OSError as error:  # of save.stage
            full = OSError(error.errno, error.strerror, self.save.stage)
        self._started, self._stall = started, time.perf_counter() - started
        self._work(lambda: self._write_shard(full))

    def _staging(self) -> Staging:
        """Raises UserError on all ranks where one cannot write to save.stage."""
        staging, problem = Staging(), None
        if self.save.stage is not None:
            try:
                staging = Staging(Path(self.save.stage))
            except OSError as error:
                problem = f"save.stage: {self.save.stage} cannot be written: {error.strerror}"
            if problems := [found for found in self.gather(problem) if found]:
                raise UserError(problems[0])
        return staging

    @property
    def _folder(self) -> Path:
        return self.folder / f"step-{self._step}"

    @property
    def _aside(self) -> Path:
        return self._folder.with_name(f"{self._folder.name}.tmp-{self.run_id}") if self.renames else self._folder

    def _write_shard(self, full: OSError | None) -> dict[str, Any]:
        if full is not None:
            raise full
        name = manifest.shard_name(self.rank, "" if self.renames else self.run_id)

        def write() -> dict[str, Any]:
            self._aside.mkdir(parents=True, exist_ok=True)
            return self.staging.write(self._aside / name)

        return {"files": {name: filesystem.retry_transient(write)}, "machine": socket.gethostname()}

    def _commit(self) -> dict[str, Any]:
        for name, facts in self._manifest["files"].items():
            seconds = filesystem.SEEN_SECONDS if name in self._of_others else 0.0
            if not filesystem.wait_for_size(self._aside / name, facts["bytes"], seconds):
                place = str(self._aside / name)
                raise OSError(errno.ENOENT, "is not as it was written; do all machines share run.dir?", place)
        filesystem.retry_transient(lambda: folders.commit(self._aside, self._folder, self._manifest))
        with suppress(OSError):  # the next one tries again; the checkpoint stands
            folders.prune(self.folder, self.save.keep, self.renames)
        return {}

    def _next_stage(self) -> None:
        """The thread is done on every rank, or failed on one: go on to the next stage, on all."""
        started = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        outcomes = self.gather(self._outcome)
        problems = {rank: found["error"] for rank, found in enumerate(outcomes) if "error" in found}
        if problems:
            self._abort(problems)
        elif not self._is_committing:
            self._manifest["files"] = {name: facts for found in outcomes for name, facts in found["files"].items()}
            others = [found["files"] for found in outcomes if found["machine"] != socket.gethostname()]
            self._of_others = {name for files in others for name in files}
            self._is_committing = True
            if self.rank == 0:
                self._work(self._commit)
            self._stall += time.perf_counter() - started
        else:
            self.saved_step, self._is_committing = self._step, False
            num_bytes = sum(facts["bytes"] for facts in self._manifest["files"].values())
            self._stall += time.perf_counter() - started
            self.tell(
                saved=self._step,
                save_bytes=num_bytes,
                save_stall_seconds=round(self._stall, 4),
                save_seconds=round(time.perf_counter() - self._started, 3),
            )
            self.staging.release()
            self._step = 0

    def _abort(self, problems: dict[int, str]) -> None:
        """The last good checkpoint stays, training goes on, and a later step tries again."""
        if self.rank == 0:
            with suppress(OSError):  # what stays is swept, or written again
                folders.delete_folder(self._aside)
        self.staging.release()
        who = "" if len(problems) == 1 else f" (and {len(problems) - 1} more ranks)"
        rank, said = next(iter(problems.items()))
        self.tell(save_failed=self._step, save_error=f"rank {rank}{who}: {said}", last_saved=self.saved_step)
        self._retry_at = self._step + min(RETRY_STEPS, self.save.every or RETRY_STEPS)
        self._step, self._is_committing, self._outcome = 0, False, {}

    def _wait(self) -> None:
        """Bring the save under way to its end."""
        while self._step:
            started = time.perf_counter()
            while self.agree([self._is_busy()])[0]:
                self.heartbeat(f"step {self._step}, saving: {self.staging.num_written:,} bytes written")
                if self._thread is not None:
                    self._thread.join(timeout=LOOK_SECONDS)
            self._stall += time.perf_counter() - started
            self._next_stage()

    def _work(self, job: Callable[[], dict[str, Any]]) -> None:
        need = self.staging.num_bytes

        def run() -> None:
            try:
                self._outcome = job()
            except Exception as error:
                self._outcome = {"error": f"{type(error).__name__}: {error}"}  # if explaining fails
                self._outcome = {"error": explain_write_error(error, self.folder, need)}

        self._outcome = {}
        self._thread = threading.Thread(target=run, name="save", daemon=True)
        self._thread.start()

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _has_failed(self) -> bool:
        return not self._is_busy() and "error" in self._outcome
