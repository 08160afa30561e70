"""Score answers by a function of the user, or by comparing them with the expected answers."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gearbox.errors import UserError, one_line, one_line_with_type
from gearbox.world import World

GROUP_SECONDS = 1.0  # of scoring between two looks for a stop request


class Answered(NamedTuple):
    """A question with its answer and the expected one, in the order of a metric's arguments."""

    question: str
    answer: str
    expected: str


class Metric:
    """A function that scores answers. Only rank 0 loads and calls it, but every rank calls these methods."""

    def __init__(self, name: str, world: World) -> None:
        """Load `exact_match`, or the function that path.py:function names. Raise UserError if that fails."""
        self.name, self.world = name, world
        self.score: Callable[[str, str, str], float] = _is_equal
        world.decide(self._load)

    def mean(self, answered: Sequence[Answered], keep_going: Callable[[], bool]) -> float | None:
        """Return the mean score. Raise UserError if the function fails, or returns no finite number.

        A function may take seconds per answer. All ranks call `keep_going` together before each group of answers.
        Return None if it returns False.
        """
        scores: list[float] = []
        while len(scores) < len(answered):
            if not keep_going():
                return None
            left = answered[len(scores) :]
            scores += self.world.decide(partial(self._scores, left))
        return sum(scores) / len(scores)

    def _load(self) -> None:
        file, _, function = self.name.rpartition(":")
        if file:
            self.score = _imported(Path(file), function)

    def _scores(self, answered: Sequence[Answered]) -> list[float]:
        """Return the scores of the first answers, as many as a group's time allows, and at least one."""
        began, scores = time.monotonic(), [self._checked(answered[0])]
        for one in answered[1:]:
            if time.monotonic() - began > GROUP_SECONDS:
                break
            scores.append(self._checked(one))
        return scores

    def _checked(self, one: Answered) -> float:
        place = f"eval.metric: {self.name}: of the question {one_line(Exception(one.question), 80)!r}"
        try:
            number = float(self.score(*one))
        except (Exception, SystemExit) as error:
            raise UserError(f"{place}: raised {one_line_with_type(error)}; fix the function") from None
        if not math.isfinite(number):
            raise UserError(f"{place}: returned {number}; return a finite number")
        return number


def _is_equal(question: str, answer: str, expected: str) -> float:
    """Return 1 if the answer is the expected one, apart from space around it."""
    return float(answer.strip() == expected.strip())


def _imported(file: Path, name: str) -> Callable[[str, str, str], float]:
    """Return a function of a Python file, which may import its neighbours. Raise UserError if that fails."""
    where = f"eval.metric: {file}"
    spec = importlib.util.spec_from_file_location(f"gearbox_metric_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{where}: is not a Python file; give path.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(file.resolve().parent))  # last, so that no neighbour replaces a package
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: cannot be imported: {one_line_with_type(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{where}: has no function {name!r}; give path.py:function")
    return function  # type: ignore[no-any-return]
