"""Show a run's steps: one line that is replaced on a terminal, and a line every few steps elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from gearbox.checkpoint.train_state import TrainState
from gearbox.console import Screen, format_bytes, format_time

WINDOW_STEPS = 32  # that rates and the time left are averaged over
REDRAW_SECONDS = 0.1  # between two states of a terminal's line
Numbers = Mapping[str, str | int | float | bool | None]
Field = tuple[int, str]
"""The rank of a field, 0 for the most important, and its text."""


class Progress:
    """The lines about a run's steps. A screen that is quiet shows none of them."""

    def __init__(self, screen: Screen, state: TrainState, num_steps: int, log_every: int) -> None:
        """Store the parameters. `log_every` is the number of steps between two lines in a log."""
        self.screen, self.state, self.num_steps, self.log_every = screen, state, num_steps, log_every
        self.first_step = state.step + 1
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=WINDOW_STEPS)
        """Tokens, seconds, and seconds that waited for data, of recent steps."""
        self._times: deque[float] = deque([time.perf_counter()], maxlen=WINDOW_STEPS + 1)
        """When recent steps ended. Evaluations and saves between them count."""
        self._drawn = 0.0
        self._widths: dict[int, int] = {}

    def step(self, numbers: Numbers, tokens: int, seconds: float) -> None:
        """Show the step that `state` has just counted, whose line of metrics.jsonl has these numbers."""
        now, step = time.perf_counter(), self.state.step
        self._times.append(now)
        self._recent.append((tokens, seconds, float(numbers.get("seconds_data") or 0.0)))
        is_end = step in (self.first_step, self.num_steps)
        if self.screen.is_live:
            if step == self.num_steps:
                self.screen.print(self._fitted(numbers, padded=False))
            elif is_end or now - self._drawn > REDRAW_SECONDS:
                self._drawn = now
                self.screen.show(self._fitted(numbers, padded=True))
        elif is_end or step % self.log_every == 0:
            self.screen.print("  ".join(text for _, text in self._fields(numbers)))

    def event(self, text: str) -> None:
        """Print what happened at this step."""
        self.screen.print(f"step {self.state.step}/{self.num_steps}  {text}")

    def warning(self, text: str) -> None:
        """Print what went wrong at this step, also if only warnings are printed."""
        self.screen.print_always(f"step {self.state.step}/{self.num_steps}  {text}")

    def close(self) -> None:
        """Remove the line from a terminal."""
        self.screen.show("")

    def _fields(self, numbers: Numbers) -> Iterator[Field]:
        """Yield what a line shows, from left to right."""
        step, tokens, seconds, waited = self.state.step, *map(sum, zip(*self._recent, strict=True))
        yield 0, f"step {step}/{self.num_steps}"
        yield 1, f"loss {numbers['loss']:.4f}"
        if recent := self.state.recent_losses:
            yield 6, f"mean {sum(recent) / len(recent):.4f}"
        if known(numbers, "accuracy"):
            yield 3, f"accuracy {numbers['accuracy']:.0%}"
        if known(numbers, "margin"):
            yield 5, f"margin {numbers['margin']:.3g}"
        yield 9, f"lr {numbers['lr']:.2e}"
        yield 8, f"norm {numbers['grad_norm']:.3g}"
        speed = tokens / max(seconds, 1e-9)
        yield 4, f"{speed:,.0f} tokens/s"
        if numbers["tokens_per_second"] != numbers["tokens_per_second_per_device"]:
            devices = float(numbers["tokens_per_second"] or 0) / float(numbers["tokens_per_second_per_device"] or 1)
            yield 12, f"{speed / max(1.0, devices):,.0f} per device"
        if numbers.get("mfu") is not None:
            yield 10, f"MFU {numbers['mfu']:.0%}"
        held = [numbers.get(name) for name in ("memory_bytes", "memory_peak_bytes", "memory_predicted_bytes")]
        yield 7, f"mem {'/'.join(_gib(held))}"
        if waited:
            yield 11, f"data {waited / max(seconds, 1e-9):.0%}"
        if numbers.get("idle") is not None:
            yield 13, f"{numbers['idle']:.0%} idle"
        if numbers.get("expert_load") is not None:
            yield 14, f"load {numbers['expert_load']:.2f}"
        per_step = (self._times[-1] - self._times[0]) / max(1, len(self._times) - 1)
        yield 2, f"{format_time(per_step * (self.num_steps - step))} left"

    def _fitted(self, numbers: Numbers, padded: bool) -> str:
        """Return the most important fields that fit the screen's width.

        `padded` keeps each field as wide as it ever was, so that the others do not move.
        """
        texts = dict(self._fields(numbers))
        for rank, text in texts.items():
            self._widths[rank] = max(len(text), self._widths.get(rank, 0)) if padded else len(text)
        kept: set[int] = set()
        free = self.screen.width - 1
        for rank in sorted(texts):
            if self._widths[rank] <= free or not kept:
                kept.add(rank)
                free -= self._widths[rank] + 2
        return "  ".join(text.ljust(self._widths[rank]) for rank, text in texts.items() if rank in kept).rstrip()


def known(numbers: Numbers, name: str) -> bool:
    """Return whether a number was measured and is finite."""
    return isinstance(number := numbers.get(name), int | float) and math.isfinite(number)


def _gib(numbers: Sequence[object]) -> list[str]:
    """Return sizes in one unit, which only the last of them names."""
    sizes = [float(number) for number in numbers if isinstance(number, int | float)]
    unit, factor, digits = ("GiB", 2**30, 2) if max(sizes) >= 2**30 else ("MiB", 2**20, 0)
    texts = [f"{size / factor:.{digits}f}" for size in sizes]
    return [*texts[:-1], f"{texts[-1]} {unit}"]


def saved_text(step: int, num_bytes: int, waited: float, seconds: float) -> str:
    """Return the line about a complete checkpoint."""
    return f"saved step {step}: {format_bytes(num_bytes)} in {seconds:.1f} s; training waited {waited:.1f} s"
