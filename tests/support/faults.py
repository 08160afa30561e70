"""Faults planted in a run on forked ranks. What they replace inside of a run is named here and nowhere else."""

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
NUM_ROWS = 101  # of the chats, in rows of 128 tokens


@dataclass
class Step:
    """A step of training that a rank is about to take."""

    number: int
    """Counted in this process, from 1: a run that goes on begins again with 1."""
    rank: int
    accelerator: Any
    model: Any
    optimizer: Any
    batch: Any
    _usual: Callable[[], Any]
    _outcome: Any = None

    def take(self) -> None:
        """The usual step, now: for what comes after it, or stands around it."""
        self._outcome = self._usual()

    def leave_out(self) -> None:
        """As if it had been taken, with finite numbers."""
        self._outcome = StepResult(1.0, 1.0)


def patch_step(monkeypatch: pytest.MonkeyPatch, around: Callable[[Step], Any]) -> None:
    """Let ranks forked from here on call around(step) at each step, and take the step after it if it has not."""
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
    """For patch_step: act before this step, on one rank or on all."""

    def around(step: Step) -> None:
        if step.number == number and rank in (None, step.rank):
            act(step)

    return around


def kill(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TrainState.now be the run's step that is being done."""
    advance = TrainState.advance

    def counted(self, batch, result):
        TrainState.now = self.step + 2
        return advance(self, batch, result)

    monkeypatch.setattr(TrainState, "now", 1, raising=False)
    monkeypatch.setattr(TrainState, "advance", counted)
