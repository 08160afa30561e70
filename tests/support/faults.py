"""Plant faults in a run on forked ranks. Only this module names the functions that the faults replace."""

import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gearbox.checkpoint.train_state import StepResult, TrainState
from gearbox.training import loop

STEPS = ("schedule.name=constant", "save.every=2", "train.steps=8", "run.name=x")
NUM_ROWS = 101  # rows of 128 tokens in the chats


@dataclass
class Step:
    """A training step that a rank is about to take."""

    number: int
    """The number of the step in this process, from 1; a resumed run counts from 1 again."""
    rank: int
    accelerator: Any
    model: Any
    optimizer: Any
    batch: Any
    _usual: Callable[[], Any]
    _outcome: Any = None

    def take(self) -> None:
        """Take the step now, for faults that act after it or around it."""
        self._outcome = self._usual()

    def leave_out(self) -> None:
        """Skip the step, and return finite numbers as if it had been taken."""
        self._outcome = StepResult(1.0, 1.0)


def patch_step(monkeypatch: pytest.MonkeyPatch, around: Callable[[Step], Any]) -> None:
    """Make ranks forked from now on call around(step) at each step, and then take the step if `around` did not."""
    usual, numbers = loop.train_step, itertools.count(1)

    def train_step(engine, batch, *rest):
        def take():
            return usual(engine, batch, *rest)

        model, optimizer = engine.model, engine.optimizer
        step = Step(next(numbers), engine.world.rank, engine.accelerator, model, optimizer, batch, take)
        around(step)
        if step._outcome is None:
            step.take()
        return step._outcome

    monkeypatch.setattr(loop, "train_step", train_step)


def at_step(number: int, act: Callable[[Step], Any], rank: int | None = None) -> Callable[[Step], None]:
    """Return a function for patch_step that acts before this step, on one rank or on all."""

    def around(step: Step) -> None:
        if step.number == number and rank in (None, step.rank):
            act(step)

    return around


def kill(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the number of the run's current step in TrainState.now."""
    advance = TrainState.advance

    def counted(self, batch, result):
        TrainState.now = self.step + 2
        return advance(self, batch, result)

    monkeypatch.setattr(TrainState, "now", 1, raising=False)
    monkeypatch.setattr(TrainState, "advance", counted)
