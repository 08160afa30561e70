"""Read a run's folder for its report: metrics as columns, marks, answers, state and recipe. Damaged parts are left out.

Nothing here imports torch, and a folder of an earlier version, without run.json, can be read as well.
"""

from __future__ import annotations

import json
import math
import socket
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NotRequired, TypedDict

import psutil
import yaml

from gearbox import filesystem
from gearbox.config.loader import YAML_ERRORS
from gearbox.config.recipe_values import JUDGED
from gearbox.errors import UserError
from gearbox.launch import outcome
from gearbox.metrics import metrics_file
from gearbox.pages import run_facts
from gearbox.pages.run_facts import RunFacts

PARTS = ("data", "forward", "backward", "communication", "optimizer", "save")  # of a step's time, as in seconds_data
FIGURES = ("accuracy", "margin", "reward_chosen", "reward_rejected", "kl")  # of compared answers
COLUMNS = (
    *("loss", "eval_loss", "eval_perplexity", "eval_exact_match", "eval_metric"),
    *("grad_norm", "lr", "tokens", "tokens_supervised", "tokens_per_second", "tokens_per_second_per_device", "mfu"),
    *("memory_bytes", "memory_peak_bytes", "memory_predicted_bytes", "seconds", "num_skipped", "idle"),
    *("router_loss", "expert_load", "rank_load", *(f"seconds_{part}" for part in PARTS)),
    *(*FIGURES, *(f"eval_{figure}" for figure in FIGURES)),
)
FILES = ("metrics.jsonl", "status.json", "run.json", "resolved.yaml")  # a run's folder has one of them at least
MAX_ANSWERS = 2000  # lines of answers.jsonl that are shown; the newest of each question are among the last ones
MAX_FAULTS = 50
MAX_LETTERS = 2000  # of a text from a file, as it is shown
MAX_DEPTH = 20  # of lists and mappings in a recipe
LARGEST = 1e100  # of a measured number


class Answer(TypedDict):
    """An answer that the model gave at a step."""

    step: int
    question: str
    expected: str | None
    rejected: NotRequired[str]
    """The other answer of a pair, whose chosen one is `expected`."""
    answer: str


@dataclass
class Column:
    """The values of one key of metrics.jsonl. A null is NaN, and so is a number that no run measures."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __bool__(self) -> bool:
        return any(map(math.isfinite, self.values))

    @property
    def first(self) -> float:
        """The first finite value; NaN without one."""
        return next(filter(math.isfinite, self.values), math.nan)

    @property
    def first_step(self) -> float:
        """The step of the first finite value; NaN without one."""
        finite = (step for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value))
        return next(finite, math.nan)

    @property
    def last(self) -> float:
        """The last finite value; NaN without one."""
        return next(filter(math.isfinite, reversed(self.values)), math.nan)

    def at(self, step: object) -> float:
        """Return the newest value of a step, or the last one if the step has none. It may be NaN."""
        at_step = [value for one, value in zip(self.steps, self.values, strict=True) if one == step]
        return (at_step or self.values or [math.nan])[-1]

    @property
    def peak(self) -> float:
        """The largest finite value; NaN without one."""
        return max(filter(math.isfinite, self.values), default=math.nan)

    @property
    def median(self) -> float:
        """The middle one of the finite values; NaN without one."""
        finite = sorted(filter(math.isfinite, self.values))
        return finite[len(finite) // 2] if finite else math.nan


@dataclass
class Marks:
    """Steps at which something happened."""

    resumes: list[tuple[int, float]] = field(default_factory=list)
    """The first step after a resume, and the seconds without a step before it."""
    skipped: list[int] = field(default_factory=list)
    spikes: list[int] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    failed_saves: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class RunData:
    """The content of a run's folder."""

    folder: Path
    facts: RunFacts
    status: dict[str, object]
    """The content of status.json; `outcome` is also `crashed` if the run's process ended without a word."""
    columns: dict[str, Column]
    marks: Marks
    num_bad_lines: int
    answers: list[Answer]
    recipe: dict[str, object]
    """The flat keys of resolved.yaml."""
    hangs: list[tuple[str, str]]
    """Name of each stack file in hang/, and what its rank was doing."""
    changed: float
    """When the run last wrote a line, in seconds since 1970."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def outcome(self) -> str:
        """The state of the run: running, saved, done, failed, refused, crashed, or unknown."""
        return str(self.status.get("outcome") or "unknown")

    @property
    def last_step(self) -> int:
        """The last step that any line records."""
        return int(max((column.steps[-1] for column in self.columns.values() if column.steps), default=0))

    @property
    def objective(self) -> str:
        """The objective of the run, such as dpo; sft if the recipe names none."""
        return str(self.recipe.get("train.objective") or "sft")[:MAX_LETTERS]

    @property
    def compares(self) -> bool:
        """True if the run compares answers, whose loss is not one of tokens."""
        return self.objective in JUDGED or any(self.column(f"{of}accuracy").steps for of in ("", "eval_"))

    @property
    def unit_of_loss(self) -> str:
        """The unit of the loss: nats per token, or what it is a mean of."""
        if not self.compares:
            return "nats per token"
        return "per answer" if self.objective == "kto" else "per pair"

    @property
    def perplexity(self) -> float:
        """Perplexity of the held-out loss of the saved model; NaN without one, and for compared answers."""
        return math.nan if self.compares else metrics_file.perplexity(self.of_model("eval_loss"))

    def of_model(self, key: str) -> float:
        """Return a figure at the step of the saved model, or else the last one; NaN without one."""
        return self.column(key).at(self.status.get("model_step"))

    def column(self, key: str) -> Column:
        """Return a column, empty if no line has its key."""
        return self.columns.get(key, Column())


def read(folder: Path, status: Mapping[str, object] | None = None) -> RunData:
    """Read a run's folder. `status` replaces the content of status.json. Raise UserError unless it is one."""
    if not folder.is_dir() or not any((folder / name).is_file() for name in FILES):
        raise UserError(f"{folder}: is not the folder of a run; give one that has metrics.jsonl, such as runs/first")
    columns, marks, num_bad = _read_metrics(folder / "metrics.jsonl")
    return RunData(
        folder=folder,
        facts=run_facts.read(folder),
        status=status_of(folder) if status is None else dict(status),
        columns=columns,
        marks=marks,
        num_bad_lines=num_bad,
        answers=[*_answers(folder / "answers.jsonl")],
        recipe=dict(_flat_recipe(folder / "resolved.yaml")),
        hangs=list(_hangs(folder / "hang")),
        changed=min([time.time(), *(path.stat().st_mtime for name in FILES[:1] if (path := folder / name).is_file())]),
    )


def _read_metrics(path: Path) -> tuple[dict[str, Column], Marks, int]:
    """Return the columns and the marks of a metrics.jsonl, and the number of its damaged lines.

    Lines are read one by one, because 100,000 steps as dicts take 300 MB.
    """
    columns, marks, num_bad, num_skipped = {key: Column() for key in COLUMNS}, Marks(), 0, 0.0
    for record in metrics_file.records(path):
        if record is None:
            num_bad += 1
            continue
        step = record["step"]
        for key, value in record.items():
            if (column := columns.get(key)) is None:
                continue
            if value is not None and type(value) not in (int, float):
                continue
            column.steps.append(step)
            column.values.append(_measured(value))
        _mark(marks, step, record)
        skipped = record.get("num_skipped")
        if type(skipped) is int:
            if skipped > num_skipped:
                marks.skipped.append(step)
            num_skipped = skipped
    return columns, marks, num_bad


def _measured(value: float | None) -> float:
    """Return a number that charts can scale: NaN instead of a huge one, and 0 instead of a tiny one."""
    if value is None or not abs(value) < LARGEST:
        return math.nan
    return value if abs(value) > 1 / LARGEST else 0.0


def _mark(marks: Marks, step: int, record: dict[str, object]) -> None:
    """Add what a line of metrics.jsonl marks."""
    idle, saved, failed = (record.get(key) for key in ("seconds_without_a_step", "saved", "save_failed"))
    if isinstance(idle, int | float) and math.isfinite(_measured(idle)):
        marks.resumes.append((step, float(idle)))
    if record.get("spike") is True:
        marks.spikes.append(step)
    if isinstance(saved, int):
        marks.saves.append(saved)
    if isinstance(failed, int):
        marks.failed_saves.append((failed, str(record.get("save_error"))[:MAX_LETTERS]))


def status_of(folder: Path) -> dict[str, object]:
    """Return the content of status.json. A run whose process has ended without a word is `crashed`."""
    status: dict[str, object] = dict(outcome.read_outcome(folder / "status.json"))
    if status.get("outcome") == "running" and status.get("host") == socket.gethostname():
        pid, lock = status.get("pid"), folder / "lock"
        is_alive = isinstance(pid, int) and 0 < pid < 2**31 and psutil.pid_exists(pid)
        if not is_alive and not _is_locked(lock):
            status |= {"outcome": "crashed", "text": "its process has ended without a word, as after a kill"}
    return status


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a run's folder."""
    if not path.is_file():
        return False
    with suppress(OSError):
        lock = filesystem.Lock(path, 0, shared=True)
        lock.release()
        return lock.is_taken
    return False


def seconds_since(moment: str) -> float | None:
    """Return the seconds since a time in ISO 8601, or None if the text is no such time."""
    with suppress(ValueError):
        return time.time() - datetime.strptime(moment, run_facts.TIME_FORMAT).timestamp()
    return None


def _answers(path: Path) -> Iterator[Answer]:
    """Yield the answers of answers.jsonl: of each question the first one, and the last ones of all."""
    lines = list(metrics_file.records(path))
    kept: dict[tuple[str, int], Answer] = {}
    for record in lines:
        if record is None:
            continue
        question, answer, expected = (record.get(key) for key in ("question", "answer", "expected"))
        if isinstance(question, str) and isinstance(answer, str):
            known = expected if isinstance(expected, str) else None
            one = Answer(step=record["step"], question=question, expected=known, answer=answer)
            if isinstance(rejected := record.get("rejected"), str):
                one["rejected"] = rejected
            kept[question, one["step"]] = one  # an answer that is asked again after a resume replaces the first
    found = sorted(kept.values(), key=lambda one: one["step"])
    yield from [one for one in found[:-MAX_ANSWERS] if one["step"] == found[0]["step"]]
    yield from found[-MAX_ANSWERS:]


class PlainLoader(yaml.SafeLoader):
    """A loader that refuses what a recipe has not: aliases, which can grow without end, and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent) or self.depth > MAX_DEPTH:
            raise yaml.YAMLError("an alias, or too deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _flat_recipe(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the keys of a resolved.yaml as group.key with their values."""
    try:
        found = yaml.load(filesystem.read_limited(path, filesystem.MAX_SMALL_BYTES).decode(), PlainLoader)
    except (OSError, *YAML_ERRORS):
        return
    for group, keys in found.items() if isinstance(found, dict) else ():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            yield f"{group}.{key}", value


def _hangs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each stack file, and what its rank was doing when it had waited too long."""
    for path in sorted(folder.glob("*.txt"))[:MAX_FAULTS] if folder.is_dir() else ():
        if not path.is_file() or not path.stat().st_size:
            continue
        doing = "stacks of a rank that did not answer"
        with suppress(OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError):
            facts = json.loads(filesystem.read_limited(path, 2**20).decode(errors="replace").splitlines()[0])
            doing = f"rank {facts['rank']} on {facts['host']} was in {facts['doing']} for {facts['seconds_ago']:g} s"
        yield path.name, doing[:MAX_LETTERS]
