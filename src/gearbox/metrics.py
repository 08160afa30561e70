"""What a run leaves to be read: metrics.jsonl, TensorBoard events, and the lines on the screen, from rank 0 alone."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10  # between two progress lines where there is no terminal to draw a bar on


def console(is_main: bool) -> Console:
    """The screen of rank 0; the others print nothing, so no caller needs to ask for its rank."""
    return Console(quiet=not is_main, highlight=False, soft_wrap=True)


def memory_peak_bytes() -> int:
    """The most memory this rank has held so far: of its GPU, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


class Metrics:
    """Writes a line a step. Every rank makes one and calls it alike; only rank 0's leaves anything."""

    def __init__(self, folder: Path, screen: Console, num_steps: int) -> None:
        self.folder, self.screen, self.num_steps = folder, screen, num_steps
        self.writes = not screen.quiet
        self.started = self.last = self.last_line = time.perf_counter()
        self.tokens = self.tokens_supervised = 0

    def __enter__(self) -> Metrics:
        if self.writes:
            from torch.utils.tensorboard import SummaryWriter

            self.file = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
            self.board = SummaryWriter(self.folder / "tensorboard")
            text = TextColumn("{task.fields[text]}")
            columns = (BarColumn(bar_width=16), MofNCompleteColumn(), text, TimeRemainingColumn())  # 80 letters in all
            self.bar = Progress(*columns, console=self.screen, disable=not self.screen.is_terminal, transient=True)
            self.task = self.bar.add_task("training", total=self.num_steps, text="")
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writes:
            self.bar.stop()
            self.board.close()
            self.file.close()

    def step(self, step: int, *, num_tokens: int, num_targets: int, **numbers: Any) -> None:
        """Record one optimizer step (counted from 1); rates are since the last one."""
        now = time.perf_counter()
        rate = num_tokens / (now - self.last)
        self.last = now
        self.tokens += num_tokens
        self.tokens_supervised += num_targets
        self.log(
            step,
            **numbers,
            tokens=self.tokens,
            tokens_supervised=self.tokens_supervised,
            tokens_per_second=round(rate, 1),
            seconds=round(now - self.started, 3),
            memory_peak_bytes=memory_peak_bytes(),
        )
        if not self.writes:
            return
        text = f"loss {numbers['loss']:.4f}  lr {numbers['lr']:.2e}  {rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, text=text)
        if not self.screen.is_terminal and (step in (1, self.num_steps) or now - self.last_line > LINE_SECONDS):
            self.last_line = now
            left = (now - self.started) / step * (self.num_steps - step)
            self.screen.print(f"step {step}/{self.num_steps}  {text}  {left:.0f} s left")

    def evaluation(self, step: int, result: Any) -> None:
        """Record a look at the held-out rows (`evaluation.Evaluation`); its time stays out of the next step's rate."""
        self.log(step, eval_loss=result.loss, eval_exact_match=result.exact_match)
        share = f"exact answers {result.exact_match:.1%}"
        self.screen.print(f"step {step}/{self.num_steps}  held-out loss {result.loss:.4f}  {share}")
        self.last = time.perf_counter()

    def log(self, step: int, **numbers: Any) -> None:
        if self.writes:
            self.file.write(json.dumps({"step": step, **numbers}) + "\n")
            self.file.flush()
            for name, number in numbers.items():
                if isinstance(number, int | float):
                    self.board.add_scalar(name, number, step)
