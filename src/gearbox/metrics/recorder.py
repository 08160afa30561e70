"""Record a run's metrics on rank 0: metrics.jsonl, the lines for trackers, and progress lines on the screen."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch

from gearbox import filesystem, processes
from gearbox.checkpoint.checkpointer import SaveFacts, SaveFailure
from gearbox.checkpoint.train_state import StepResult
from gearbox.console import styled
from gearbox.metrics import metrics_file
from gearbox.metrics.clock import StepClock
from gearbox.metrics.progress import Progress, known, saved_text
from gearbox.metrics.trackers import Trackers
from gearbox.metrics.trainjob_status import TrainJobStatus
from gearbox.redact import redacted
from gearbox.rows.batches import StepBatch

JsonScalar = str | int | float | bool | None


@dataclass(frozen=True)
class Devices:
    """The devices of a run, and what is known of them before it."""

    count: int = 1
    predicted_bytes: int | None = None
    """Predicted peak memory of this rank, or None if the family has no closed form."""
    flops_per_token: float | None = None
    """Operations of a training token, without what checkpointing computes again; None likewise."""
    peak_flops: float | None = None
    """Operations that a device can do in a second, or None if that is not known."""

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of all devices' peak that a speed reaches, or None if it is not known."""
        if self.flops_per_token is None or self.peak_flops is None:
            return None
        return round(tokens_per_second * self.flops_per_token / (self.count * self.peak_flops), 4)


def memory_bytes() -> int:
    """Return the memory of this rank now: allocated on its GPU if it has one, else the process's."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else processes.resident_memory()


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
        progress: Progress,
        clock: StepClock,
        saved_step: int = 0,
        devices: Devices = Devices(),
    ) -> None:
        """Store the parameters. `saved_step` is the step of the folder's checkpoint, 0 without one."""
        self.folder, self.progress, self.clock = folder, progress, clock
        self.screen, self.state = progress.screen, progress.state
        self.saved_step, self.devices = saved_step, devices
        self.waited_for_saves: Callable[[], float] = lambda: 0.0
        """Returns the seconds for which training has waited for saves."""
        self._waited = 0.0
        self.path = folder / "metrics.jsonl"
        self.writes = not self.screen.quiet
        self.waiting: list[str] = []
        self.is_whole = False
        """Whether the file must be rewritten completely, as on storage that cannot append."""
        self.trackers: Trackers | None = None
        """The trackers of the run, set before the recorder is entered; None on other ranks."""
        self.trainjob = TrainJobStatus(progress.screen, progress.num_steps)
        self.last = time.perf_counter()
        self.first_step = self.state.step + 1
        self.idle_since: float | None = None
        """Time of the previous run's last line, in seconds since 1970; None for a new run."""

    def __enter__(self) -> Metrics:
        if self.writes:
            if self.path.is_file():
                self.idle_since = self.path.stat().st_mtime
            self._take_over()
            if self.trackers is not None:
                self.trackers.open(self.state.step)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writes:
            self.progress.close()
            self._catch_up()
            if self.trackers is not None:
                self.trackers.close(self.state.step == self.progress.num_steps)
            self.trainjob.close()
            self.sync()

    def _take_over(self) -> None:
        """Keep the lines of an earlier attempt that still count, and print how many lines are damaged or lost."""
        if not self.idle_since and not self.saved_step:
            return
        tell = self.screen.print_always
        kept, aside = metrics_file.drop_after(self.path, self.state.step, self.state.evaluated, tell)
        if kept.bad:
            self.screen.print_always(f"{self.path}: damaged lines set aside in {aside.name}: {len(kept.bad)}")
        last = max((record["step"] for record in kept.good if "rows_hash" in record), default=0)
        if last < self.saved_step:
            self.screen.print_always(f"{self.path}: the lines of steps {last + 1} to {self.saved_step} are lost")

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
        seconds = now - self.last
        speed = batch.num_tokens / seconds
        self.state.seconds += seconds
        self.last = now
        marks: dict[str, JsonScalar] = {"spike": True} if is_spike else {}
        if self.idle_since is not None and step == self.first_step:
            marks["seconds_without_a_step"] = round(time.time() - self.idle_since, 1)
        optional = {name: getattr(result, name) for name in ("idle", "router_loss", "expert_load", "rank_load")}
        optional |= {"memory_predicted_bytes": self.devices.predicted_bytes, "mfu": self.devices.mfu(speed)}
        waited, self._waited = self._waited, self.waited_for_saves()
        numbers: dict[str, JsonScalar] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": rate,
            **{name: number for name, number in optional.items() if number is not None},
            **(result.figures or {}),
            "rows_hash": self.state.rows_hash,
            "tokens": self.state.tokens,
            "tokens_supervised": self.state.tokens_supervised,
            "tokens_per_second": round(speed, 1),
            "tokens_per_second_per_device": round(speed / self.devices.count, 1),
            "seconds": round(self.state.seconds, 3),
            **self.clock.read(),
            "seconds_save": round(self._waited - waited, 6),
            "memory_bytes": (held := memory_bytes()),
            "memory_peak_bytes": max(held, memory_peak_bytes()),  # the kernel updates a process's peak later
            "num_skipped": self.state.num_skipped,
            **marks,
        }
        self.log(**numbers)
        if self.writes:
            self.progress.step(numbers, batch.num_tokens, seconds)
            if result.skipped:
                self.progress.warning("loss or gradients not finite: step skipped on all ranks")

    def evaluation(
        self,
        loss: float,
        exact_match: float | None = None,
        metric: float | None = None,
        figures: dict[str, float] | None = None,
    ) -> None:
        """Record an evaluation of the held-out rows. Exclude its time from the next step's speed.

        `figures` are those of compared answers, as in StepResult. Their loss has no perplexity.
        """
        compared = figures or {}
        perplexity = None if compared else metrics_file.perplexity(loss)
        optional = {"eval_perplexity": perplexity, "eval_exact_match": exact_match, "eval_metric": metric}
        given = {name: number for name, number in optional.items() if number is not None}
        self.log(eval_loss=loss, **given, **{f"eval_{name}": number for name, number in compared.items()})
        text = f"held-out loss {loss:.4f}"
        text += "" if perplexity is None else f"  perplexity {perplexity:.4g}"
        text += f"  accuracy {compared['accuracy']:.1%}" if known(compared, "accuracy") else ""
        text += f"  margin {compared['margin']:.3g}" if known(compared, "margin") else ""
        text += "" if exact_match is None else f"  exact match {exact_match:.1%}"
        text += "" if metric is None else f"  metric {metric:.4g}"
        self.progress.event(text)
        self.skip_time()

    def skip_time(self) -> None:
        """Exclude the time since the last step from the next step's speed."""
        self.last = time.perf_counter()

    def save(self, facts: SaveFacts | SaveFailure) -> None:
        """Record a checkpoint that is complete, or a failure to write one."""
        if isinstance(facts, SaveFailure):
            self.screen.print_always(
                styled(
                    (f"checkpoint of step {facts.save_failed} not written", "bold red"),
                    f": {facts.save_error}; the last complete one is of step {facts.last_saved}; the save is retried",
                )
            )
        else:
            self.progress.event(saved_text(facts.saved, facts.save_bytes, facts.save_stall_seconds, facts.save_seconds))
        self.log(**asdict(facts))
        self._catch_up()

    def log(self, **numbers: JsonScalar) -> None:
        """Write a line of metrics.jsonl, and hand its numbers to the trackers. Write what is not finite as null."""
        if not self.writes:
            return
        step = self.state.step
        line = {name: None if _is_odd(number) else number for name, number in numbers.items()}
        self.trainjob.note({"step": step, **line})
        self.waiting.append(json.dumps(redacted({"step": step, **line})) + "\n")
        try:
            filesystem.append(self.path, "".join(self.waiting).encode())
            self.waiting.clear()
        except OSError as error:
            if len(self.waiting) == 1 and not self.is_whole:
                self.screen.print_always(
                    f"{self.path} cannot be written: {error.strerror}; keeping its lines in memory"
                )
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
