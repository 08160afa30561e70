"""Write answers.jsonl on rank 0: one object per question that the model has answered, at each evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

from gearbox import filesystem
from gearbox.console import Screen
from gearbox.metrics import metrics_file
from gearbox.redact import redacted, secrets


class Line(TypedDict):
    """A line of answers.jsonl."""

    step: int
    question: str
    expected: str | None
    """The correct answer, or the chosen one of a pair."""
    rejected: NotRequired[str]
    """The other answer of a pair."""
    answer: str


class AnswersFile:
    """The answers of a run. Each evaluation replaces the file, so it works where files cannot grow.

    Every rank creates it and makes the same calls; only rank 0 writes. A resumed run drops the answers that it gives
    again.
    """

    def __init__(self, folder: Path, screen: Screen, evaluated: int) -> None:
        """Read the answers up to the step `evaluated`."""
        self.path, self.screen, self.evaluated = folder / "answers.jsonl", screen, evaluated
        self.lines: list[Line] = []
        self._is_taken_over = False
        if not screen.quiet:
            with suppress(OSError):  # `add` tries again
                self._take_over()

    def _take_over(self) -> None:
        """Put the answers of the file before those of this process. Raise OSError if that is not possible."""
        found = map(_line, metrics_file.take_over(self.path, self.screen.print_always).good)
        old = [line for line in found if line is not None and line["step"] <= self.evaluated]
        self.lines, self._is_taken_over = old + self.lines, True

    def add(self, lines: Sequence[Line]) -> None:
        """Add the answers of one evaluation. A full disk stops nothing: the next evaluation writes all of them."""
        if self.screen.quiet or not lines:
            return
        self.lines += lines
        try:
            if not self._is_taken_over:
                self._take_over()
            known = secrets()  # once: it takes longer than redacting a line
            text = "".join(json.dumps(redacted({**line}, known)) + "\n" for line in self.lines)
            filesystem.atomic_write(self.path, text)
        except OSError as error:
            self.screen.print(f"{self.path} cannot be written: {error.strerror}; keeping its lines in memory")
            return
        with suppress(OSError):
            filesystem.sync(self.path)

    def compared(self, step: int) -> list[dict[str, str]]:
        """Return each question of a step, with the answers before training and at that step."""
        before = {line["question"]: line["answer"] for line in self.lines if line["step"] == 0}
        return [
            {
                "question": line["question"],
                "before": before.get(line["question"], "(not asked)"),
                "after": line["answer"],
                **({} if line["expected"] is None else {"expected": line["expected"]}),
                **({"rejected": line["rejected"]} if "rejected" in line else {}),
            }
            for line in self.lines
            if line["step"] == step
        ]


def _line(record: dict[str, object]) -> Line | None:
    """Return a record as a line of this file, or None for a damaged one."""
    step, question, expected, answer = (record.get(name) for name in ("step", "question", "expected", "answer"))
    is_whole = isinstance(step, int) and isinstance(question, str) and isinstance(answer, str)
    if not is_whole or not isinstance(expected, str | None):
        return None
    line = Line(step=step, question=question, expected=expected, answer=answer)  # type: ignore[typeddict-item]
    if isinstance(rejected := record.get("rejected"), str):
        line["rejected"] = rejected
    return line
