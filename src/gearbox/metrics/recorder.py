"""Record a run's metrics on rank 0: metrics.jsonl, the lines for trackers, and progress lines on the screen."""

from __future__ import annotations

import json
import math
import resource
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch
from rich import progress as rich_progress
from rich.console import Console

from gearbox import filesystem
from gearbox.checkpoint.checkpointer import SaveFacts, SaveFailure
from gearbox.checkpoint.train_state import StepResult, TrainState
from gearbox.console import styled
from gearbox.metrics import metrics_file
from gearbox.metrics.trackers import Trackers
from gearbox.redact import redacted
from gearbox.rows.batches import StepBatch

JsonScalar = str | int | float | bool | None
LINE_SECONDS = 10  # between two progress lines if the screen is not a terminal


def memory_peak_bytes() -> int:
    """Return the peak memory of this rank so far: GPU memory if it has a GPU, else the process's memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


class Metrics:
    """A recorder of one line per step. Every rank creates it and makes the same calls; only rank 0 writes.

    A resumed run drops the earlier lines of the steps that it repeats.
    """

    def __init__(
        self,
        folder: Path,
        screen: Console,
        num_steps: int,
        state: TrainState,
        saved_step: int = 0,
        predicted_bytes: int | None = None,
    ) -> None:
        """Store the parameters.

        `saved_step` is the step of the folder's checkpoint, 0 without one. `predicted_bytes` is the predicted peak
        memory of this rank.
        """
        self.folder, self.screen, self.num_steps, self.state = folder, screen, num_steps, state
        self.saved_step, self.predicted_bytes = saved_step, predicted_bytes
        self.path = folder / "metrics.jsonl"
        self.writes = not screen.quiet
        self.waiting: list[str] = []
        self.is_whole = False
        """Whether the file must be rewritten completely, as on storage that cannot append."""
        self.trackers: Trackers | None = None
        """The trackers of the run, set before the recorder is entered; None on other ranks."""
        self.last = self.last_line = time.perf_counter()
        self.first_step = state.step + 1
        self.idle_since: float | None = None
        """Time of the previous run's last line, in seconds since 1970; None for a new run."""

    def __enter__(self) -> Metrics:
        if self.writes:
            if self.path.is_file():
                self.idle_since = self.path.stat().st_mtime
            self._take_over()
            if self.trackers is not None:
                self.trackers.open(self.state.step)
            text = rich_progress.TextColumn("{task.fields[text]}")
            counter, left = rich_progress.MofNCompleteColumn(), rich_progress.TimeRemainingColumn()
            columns = (rich_progress.BarColumn(bar_width=16), counter, text, left)  # fits 80 characters
            self.bar = rich_progress.Progress(
                *columns, console=self.screen, disable=not self.screen.is_terminal, transient=True
            )
            self.task = self.bar.add_task("training", total=self.num_steps, text="", completed=self.state.step)
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writes:
            self.bar.stop()
            self._catch_up()
            if self.trackers is not None:
                self.trackers.close(self.state.step == self.num_steps)
            self.sync()

    def _take_over(self) -> None:
        """Keep the lines of an earlier attempt that still count, and print how many lines are damaged or lost."""
        if not self.idle_since and not self.saved_step:
            return
        kept, aside = metrics_file.drop_after(self.path, self.state.step, self.state.evaluated)
        if kept.bad:
            self.screen.print(f"{self.path}: damaged lines set aside in {aside.name}: {len(kept.bad)}")
        last = max((record["step"] for record in kept.good if "rows_hash" in record), default=0)
        if last < self.saved_step:
            self.screen.print(f"{self.path}: the lines of steps {last + 1} to {self.saved_step} are lost")

    def sync(self) -> None:
        """Flush the lines and TensorBoard's events to disk, and note what trackers have recorded."""
        if self.trackers is not None:
            self.trackers.save()
        with suppress(OSError):  # the disk may be full; the lines wait
            if self.path.exists():
                filesystem.sync(self.path)
            if (board := self.folder / "tensorboard").is_dir():
                filesystem.sync_tree(board)
            filesystem.sync(self.folder)

    def step(self, batch: StepBatch, result: StepResult, rate: float, is_spike: bool) -> None:
        """Record the optimizer step that `state` has just counted. Speeds cover the time since the previous step."""
        now, step = time.perf_counter(), self.state.step
        speed = batch.num_tokens / (now - self.last)
        self.state.seconds += now - self.last
        self.last = now
        marks: dict[str, JsonScalar] = {"spike": True} if is_spike else {}
        if self.idle_since is not None and step == self.first_step:
            marks["seconds_without_a_step"] = round(time.time() - self.idle_since, 1)
        optional = {name: getattr(result, name) for name in ("idle", "router_loss", "expert_load", "rank_load")}
        optional["memory_predicted_bytes"] = self.predicted_bytes
        self.log(
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=rate,
            **{name: number for name, number in optional.items() if number is not None},
            rows_hash=self.state.rows_hash,
            tokens=self.state.tokens,
            tokens_supervised=self.state.tokens_supervised,
            tokens_per_second=round(speed, 1),
            seconds=round(self.state.seconds, 3),
            memory_peak_bytes=memory_peak_bytes(),
            num_skipped=self.state.num_skipped,
            **marks,
        )
        if self.writes:
            self._show_step(result, rate, speed)

    def _show_step(self, result: StepResult, rate: float, speed: float) -> None:
        """Advance the progress bar, or print a line every few seconds if the screen is not a terminal."""
        step = self.state.step
        text = f"loss {result.loss:.4f}  lr {rate:.2e}  {speed:,.0f} tokens/s"
        if result.idle is not None:
            text += f"  {result.idle:.0%} idle"
        if result.expert_load is not None:
            text += f"  load {result.expert_load:.2f}"
        self.bar.update(self.task, completed=step, text=text)
        if result.skipped:
            self.screen.print(f"step {step}/{self.num_steps}  loss or gradients not finite: step skipped on all ranks")
        is_end = step in (self.first_step, self.num_steps)
        if not self.screen.is_terminal and (is_end or self.last - self.last_line > LINE_SECONDS):
            self.last_line = self.last
            left = self.state.seconds / step * (self.num_steps - step)
            self.screen.print(f"step {step}/{self.num_steps}  {text}  {left:.0f} s left")

    def evaluation(self, loss: float, exact_match: float | None) -> None:
        """Record an evaluation of the held-out rows. Exclude its time from the next step's speed."""
        self.log(eval_loss=loss, **({} if exact_match is None else {"eval_exact_match": exact_match}))
        exact = "" if exact_match is None else f"  exact match {exact_match:.1%}"
        self.screen.print(f"step {self.state.step}/{self.num_steps}  held-out loss {loss:.4f}{exact}")
        self.last = time.perf_counter()

    def save(self, facts: SaveFacts | SaveFailure) -> None:
        """Record a checkpoint that is complete, or a failure to write one."""
        if isinstance(facts, SaveFailure):
            self.screen.print(
                styled(
                    (f"checkpoint of step {facts.save_failed} not written", "bold red"),
                    f": {facts.save_error}; the last complete one is of step {facts.last_saved}; the save is retried",
                )
            )
        self.log(**asdict(facts))
        self._catch_up()

    def log(self, **numbers: JsonScalar) -> None:
        """Write a line of metrics.jsonl, and hand its numbers to the trackers. Write what is not finite as null."""
        if not self.writes:
            return
        step = self.state.step
        line = {name: None if _is_odd(number) else number for name, number in numbers.items()}
        self.waiting.append(json.dumps(redacted({"step": step, **line})) + "\n")
        try:
            filesystem.append(self.path, "".join(self.waiting).encode())
            self.waiting.clear()
        except OSError as error:
            if len(self.waiting) == 1 and not self.is_whole:
                self.screen.print(f"{self.path} cannot be written: {error.strerror}; keeping its lines in memory")
        if self.trackers is not None:
            self.trackers.log(numbers, step)

    def _catch_up(self) -> None:
        """Rewrite the file with the waiting lines appended. Object stores cannot append in place."""
        if self.waiting:
            with suppress(OSError):
                before = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
                filesystem.atomic_write(self.path, before + "".join(self.waiting))
                self.waiting.clear()
                self.is_whole = True


def _is_odd(number: JsonScalar) -> bool:
    """Return True for infinity and NaN, which are not JSON."""
    return isinstance(number, float) and not math.isfinite(number)
