"""What a run leaves to be read: metrics.jsonl, TensorBoard events, and the lines on the screen, from rank 0 alone."""

from __future__ import annotations

import json
import math
import resource
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich import progress as rich_progress
from rich.console import Console
from rich.markup import escape

from gearbox import filesystem
from gearbox.checkpoint.train_state import TrainState
from gearbox.redact import redacted

LINE_SECONDS = 10  # between two progress lines where there is no terminal to draw a bar on


def memory_peak_bytes() -> int:
    """The most memory this rank has held so far: of its GPU, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


class Metrics:
    """Writes a line a step. Every rank makes one and calls it alike; only rank 0's leaves anything.

    What a run before wrote of steps that are done again is dropped.
    """

    def __init__(self, folder: Path, screen: Console, num_steps: int, progress: TrainState) -> None:
        self.folder, self.screen, self.num_steps, self.progress = folder, screen, num_steps, progress
        self.path = folder / "metrics.jsonl"
        self.writes = not screen.quiet
        self.waiting: list[str] = []
        self.is_whole = False
        """Whether it has to be written whole."""
        self.board: Any = None
        self.last = self.last_line = time.perf_counter()
        self.first_step = progress.step + 1
        self.idle_since: float | None = None
        """When a run before this one wrote its last line, in seconds since 1970."""

    def __enter__(self) -> Metrics:
        if self.writes:
            if self.path.is_file():
                self.idle_since = self.path.stat().st_mtime
                drop_after(self.path, self.progress.step, self.progress.evaluated)
            self._open_board(self.first_step)
            text = rich_progress.TextColumn("{task.fields[text]}")
            counter, left = rich_progress.MofNCompleteColumn(), rich_progress.TimeRemainingColumn()
            columns = (rich_progress.BarColumn(bar_width=16), counter, text, left)  # 80 letters in all
            self.bar = rich_progress.Progress(
                *columns, console=self.screen, disable=not self.screen.is_terminal, transient=True
            )
            self.task = self.bar.add_task("training", total=self.num_steps, text="", completed=self.progress.step)
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writes:
            self.bar.stop()
            self._catch_up()
            with suppress(OSError):
                if self.board is not None:
                    self.board.close()

    def step(self, *, num_tokens: int, is_spike: bool, skipped: bool, **numbers: Any) -> None:
        """Record the optimizer step that `progress` has just counted; rates are since the last one."""
        now, step = time.perf_counter(), self.progress.step
        rate = num_tokens / (now - self.last)
        self.progress.seconds += now - self.last
        self.last = now
        marks: dict[str, Any] = {"spike": True} if is_spike else {}
        if self.idle_since is not None and step == self.first_step:
            marks["seconds_without_a_step"] = round(time.time() - self.idle_since, 1)
        self.log(
            **numbers,
            rows_hash=self.progress.rows_hash,
            tokens=self.progress.tokens,
            tokens_supervised=self.progress.tokens_supervised,
            tokens_per_second=round(rate, 1),
            seconds=round(self.progress.seconds, 3),
            memory_peak_bytes=memory_peak_bytes(),
            num_skipped=self.progress.num_skipped,
            **marks,
        )
        if not self.writes:
            return
        text = f"loss {numbers['loss']:.4f}  lr {numbers['lr']:.2e}  {rate:,.0f} tokens/s"
        if "idle" in numbers:  # of a pipeline
            text += f"  {numbers['idle']:.0%} idle"
        self.bar.update(self.task, completed=step, text=text)
        if skipped:
            self.screen.print(f"step {step}/{self.num_steps}  not finite, skipped on all ranks")
        is_end = step in (self.first_step, self.num_steps)
        if not self.screen.is_terminal and (is_end or now - self.last_line > LINE_SECONDS):
            self.last_line = now
            left = self.progress.seconds / step * (self.num_steps - step)
            self.screen.print(f"step {step}/{self.num_steps}  {text}  {left:.0f} s left")

    def evaluation(self, result: Any) -> None:
        """Record a look at the held-out rows (`evaluation.Evaluation`); its time stays out of the next step's rate."""
        self.log(eval_loss=result.loss, eval_exact_match=result.exact_match)
        share = f"exact answers {result.exact_match:.1%}"
        place = f"step {self.progress.step}/{self.num_steps}"
        self.screen.print(f"{place}  held-out loss {result.loss:.4f}  {share}")
        self.last = time.perf_counter()

    def save(self, **facts: Any) -> None:
        """Record a checkpoint that is complete, or one that could not be written."""
        if "save_error" in facts:
            self.screen.print(
                f"[bold red]checkpoint of step {facts['save_failed']} not written[/]: {escape(facts['save_error'])}; "
                f"the last good one is of step {facts['last_saved']}; it is tried again"
            )
        self.log(**facts)
        self._catch_up()

    def log(self, **numbers: Any) -> None:
        if not self.writes:
            return
        step = self.progress.step
        line = {name: None if _is_odd(number) else number for name, number in numbers.items()}
        self.waiting.append(json.dumps(redacted({"step": step, **line})) + "\n")
        try:
            append(self.path, "".join(self.waiting))
            self.waiting.clear()
        except OSError as error:
            if len(self.waiting) == 1 and not self.is_whole:
                self.screen.print(f"{self.path} cannot be written: {error.strerror}; its lines wait until it can")
        try:
            for name, number in numbers.items():
                if isinstance(number, int | float) and self.board is not None:
                    self.board.add_scalar(name, number, step)
        except OSError as error:  # of its thread, which has ended: another one for what comes
            self.board = None
            if error.errno not in filesystem.UNSUPPORTED:
                self._open_board(step)

    def _catch_up(self) -> None:
        """Where nothing can be appended (object stores) lines wait for a checkpoint; then the file is written anew."""
        if self.waiting:
            with suppress(OSError):
                before = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
                filesystem.atomic_write(self.path, before + "".join(self.waiting))
                self.waiting.clear()
                self.is_whole = True

    def _open_board(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.board = None
        with suppress(OSError):
            self.board = SummaryWriter(self.folder / "tensorboard", purge_step=first_step)


def append(path: Path, text: str) -> None:
    """Append all of a text, or nothing of it. The folder is made anew if somebody has removed it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        before, left = file.tell(), text.encode()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(before)
            raise


def _is_odd(number: Any) -> bool:
    """Infinity and NaN are not JSON."""
    return isinstance(number, float) and not math.isfinite(number)


def drop_after(path: Path, step: int, evaluated: int) -> None:
    """Keep the lines up to a step, and its evaluation only if that is not done again. Atomic."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        if record["step"] <= step and ("eval_loss" not in record or record["step"] <= evaluated):
            kept.append(line + "\n")
    filesystem.atomic_write(path, "".join(kept))
