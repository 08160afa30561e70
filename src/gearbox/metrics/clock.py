"""Measure where a step's time goes, without waiting for a device and without a message between ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

DECIMALS = 6  # of the seconds in metrics.jsonl
PARTS = ("data", "forward", "backward", "communication", "optimizer")
Moment = float | torch.cuda.Event
_cuda_event = cast("Callable[..., torch.cuda.Event]", torch.cuda.Event)


class StepClock:
    """A clock of the parts of this rank's steps.

    On a GPU the parts are measured between events of its stream. An event is read once the device has passed it; the
    host never waits for one. So the end of the optimizer's part is read in the next step.
    """

    def __init__(self, device: torch.device, absent: frozenset[str] = frozenset()) -> None:
        """Measure on this device. `absent` names parts that cannot be told apart under the running gear."""
        self._on_gpu, self._absent = device.type == "cuda", absent
        self._begun: deque[tuple[str, Moment]] = deque()
        self._spare: list[Any] = []
        self._seconds: dict[str, float] = {}

    def begin(self, part: str) -> None:
        """Begin a part, which ends the one before; an empty name counts as none."""
        self._begun.append((part, self._now()))

    def add(self, part: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Return the seconds of the parts that have ended since the last call, named as in metrics.jsonl."""
        while len(self._begun) > 1 and self._has_passed(self._begun[1][1]):
            part, start = self._begun.popleft()
            if part:
                self.add(part, self._between(start, self._begun[0][1]))
            if self._on_gpu:
                self._spare.append(start)
        found = {f"seconds_{part}": round(s, DECIMALS) for part, s in self._seconds.items() if part not in self._absent}
        self._seconds = {}
        return found

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else _cuda_event(enable_timing=True)
        event.record()
        return cast(torch.cuda.Event, event)

    def _has_passed(self, moment: Moment) -> bool:
        return isinstance(moment, float) or bool(cast(Any, moment).query())

    def _between(self, start: Moment, end: Moment) -> float:
        if isinstance(start, float):
            return cast(float, end) - start
        return float(start.elapsed_time(cast(torch.cuda.Event, end))) / 1000


@dataclass(frozen=True)
class Phases:
    """The phases of one step, which this rank reports as it enters them."""

    clock: StepClock
    report: Callable[[str], None]
    """Reports a phase to the watchdog."""

    def __call__(self, phase: str, part: str) -> None:
        """Enter a phase, whose time counts as that part of the step."""
        self.report(phase)
        self.clock.begin(part)
