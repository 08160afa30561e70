"""Hand a run's numbers to its trackers, each in a separate thread, so that none can stop or slow training.

A thread opens its tracker, and reopens it after a failure. Its queue is bounded: the oldest numbers are dropped.
trackers.json keeps the id of each tracker's run, and the step that it has recorded. A resumed run continues in the same
run of the tracker, and sends the steps that it lacks from metrics.jsonl.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gearbox import filesystem
from gearbox.console import printable
from gearbox.errors import one_line_with_type
from gearbox.metrics import metrics_file
from gearbox.metrics.tracker_process import RemoteTracker
from gearbox.metrics.tracker_start import Description, LocalTracker, Opened
from gearbox.redact import redact

Numbers = dict[str, float]
MAX_WAITING = 10_000  # lines of metrics.jsonl that wait for a tracker
PAUSES = (1.0, 600.0)  # seconds before a tracker is tried again: after the first failure, and at most
STALL_SECONDS = 120.0  # in one call, before the screen says so
DONE_SECONDS, STOPPED_SECONDS = 60.0, 10.0  # to finish: after the last step, and after a stop or an error
LOOK_SECONDS = 0.05
FILE = "trackers.json"
ID = re.compile(r"[A-Za-z0-9]{8,64}")


class Tracker(Protocol):
    """A tracker as its thread uses it. Each method may raise, and may take any time."""

    def open(self, run_id: str, resumes: bool, after: int) -> Opened:
        """Start a run, or resume the run `run_id`, which has recorded the steps up to `after`."""

    def log(self, numbers: Numbers, step: int) -> None:
        """Record the numbers of a step."""

    def close(self) -> None:
        """Finish the run."""

    def abandon(self) -> None:
        """End what does not finish. Any thread may call it, and it takes no time."""


def numbers_of(line: Mapping[str, object]) -> Numbers:
    """Return the numbers of a line of metrics.jsonl, without its step."""
    return {name: number for name, number in line.items() if isinstance(number, int | float) and name != "step"}


class TrackerThread(threading.Thread):
    """The thread of one tracker, with its queue. The training thread calls the public methods."""

    def __init__(self, name: str, tracker: Tracker, run_id: str, recorded: int, metrics: Path) -> None:
        """Store the parameters.

        `run_id` is the tracker's run to resume, and `recorded` the last step that it has recorded, or -1.
        """
        super().__init__(name=f"tracker {name}", daemon=True)
        self.tracker_name, self.tracker, self.run_id, self.metrics = name, tracker, run_id, metrics
        self.recorded, self.upto, self.keeps = recorded, recorded, "each save"
        self.safe = recorded
        """The last step that trackers.json lists as recorded."""
        self.resumes = recorded >= 0
        self.num_lost = 0
        self.news: deque[str] = deque(maxlen=20)
        """Texts for the screen."""
        self.busy_since: float | None = None
        self._waiting: deque[tuple[Numbers, int]] = deque()
        self._ready = threading.Condition()
        self._closing, self._left = threading.Event(), threading.Event()
        self._said: set[str] = set()

    def put(self, numbers: Numbers, step: int) -> None:
        """Queue the numbers of a step. Drop the oldest ones if too many wait."""
        with self._ready:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self.num_lost += 1
            self._waiting.append((numbers, step))
            self._ready.notify()
        if (seconds := self.seconds_in_call()) > STALL_SECONDS:
            self._say_once("stall", f"has not answered for {seconds:.0f} s; training continues")

    def seconds_in_call(self) -> float:
        """Return for how long the tracker has not returned from a call."""
        since = self.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def next_safe(self) -> int:
        """Return the last step that a kill at this moment would not lose, for trackers.json."""
        before, recorded = self.safe, self.recorded
        if self.keeps != "the end":
            self.safe = recorded
        return self.safe if self.keeps == "each step" else min(before, recorded)

    def end(self) -> None:
        """Ask the thread to record what waits, and to finish."""
        with self._ready:
            self._closing.set()
            self._ready.notify()

    def give_up(self) -> None:
        """Leave a tracker that does not finish."""
        self._say_once("close", "did not finish in time and was left; the next resume sends what it lacks")
        self._left.set()
        self.tracker.abandon()

    def run(self) -> None:
        """Open the tracker, and log until the end. Retry after a failure, with longer and longer pauses."""
        is_open, is_last_try, attempts, pause = False, False, 0, PAUSES[0]
        item: tuple[Numbers, int] | None = None
        while not self._left.is_set():
            try:
                if not is_open:
                    self._open()
                    is_open = True
                    self._catch_up()
                if item is None:
                    item, attempts = self._take(), 0
                if item is None:
                    self._call(self.tracker.close)
                    self.keeps = "each step"  # all that was recorded
                    return
                attempts += 1
                self._log(*item)
                item, pause = None, PAUSES[0]
            except BaseException as error:  # a library may also raise SystemExit
                self._say_once("failure", f"fails: {redact(one_line_with_type(error))}; training continues")
                self._discard()
                is_open = False
                if attempts == 2:  # by two runs of the tracker
                    item, attempts = None, 0
                    self.num_lost += 1
                is_final = isinstance(error, OSError) and error.errno in filesystem.UNSUPPORTED
                is_closing = self._closing.wait(None if is_final else pause)
                if is_final or is_last_try:
                    self.num_lost += len(self._waiting) + (item is not None)
                    return
                is_last_try = is_closing
                pause = min(2 * pause, PAUSES[1])

    def _open(self) -> None:
        opened = self._call(partial(self.tracker.open, self.run_id, self.resumes, self.recorded))
        if opened.run_id != self.run_id and self.resumes:  # the tracker no longer has the run
            self.upto, self.recorded = max(self.upto, self.recorded), -1
        self.run_id, self.resumes, self.keeps = opened.run_id, True, opened.keeps
        if opened.place:
            self._say_once("place", f"records {redact(opened.place)}")

    def _catch_up(self) -> None:
        """Log what metrics.jsonl has of earlier steps and the tracker has not."""
        if self.recorded < self.upto:
            for line in metrics_file.read(self.metrics).good:
                if self.recorded < line["step"] <= self.upto and (numbers := numbers_of(line)):
                    self._call(partial(self.tracker.log, numbers, line["step"]))
            self.recorded = self.upto

    def _take(self) -> tuple[Numbers, int] | None:
        """Wait for numbers and return them, or None if no more will come."""
        with self._ready:
            self._ready.wait_for(lambda: self._waiting or self._closing.is_set())
            return self._waiting.popleft() if self._waiting else None

    def _log(self, numbers: Numbers, step: int) -> None:
        self._call(partial(self.tracker.log, numbers, step))
        # A step has several lines, so it is recorded once a later step follows, or if nothing waits.
        self.recorded = max(self.recorded, step if not self._waiting else step - 1)

    def _call(self, work: Callable[[], Opened | None]) -> Opened:
        self.busy_since = time.monotonic()
        try:
            return work() or Opened(self.run_id)
        finally:
            self.busy_since = None

    def _discard(self) -> None:
        with suppress(BaseException):
            self.tracker.abandon()

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.news.append(f"tracker {self.tracker_name}: {printable(text)}")


@dataclass(frozen=True)
class _Known:
    """The entry of a tracker in trackers.json."""

    run_id: str
    recorded: int


class Trackers:
    """The trackers of a run, on rank 0. No method raises because of a tracker, or waits for one, except `close`."""

    def __init__(self, names: Sequence[str], description: Description, tell: Callable[[str], None]) -> None:
        """Store the parameters. `tell` prints a line."""
        self.names, self.description, self.tell = names, description, tell
        self.path = description.folder / FILE
        self.threads: list[TrackerThread] = []
        self._written = ""
        self._ids: list[str] = []

    def open(self, step: int) -> None:
        """Start the trackers of a run that has taken `step` steps."""
        known = dict(self._known())
        for name in self.names:
            found = known.get(name) or _Known(secrets.token_hex(16), -1)
            is_old_board = name == "tensorboard" and name not in known and (self.description.folder / name).is_dir()
            recorded = step if is_old_board else min(found.recorded, step)
            tracker = self._tracker(name)
            thread = TrackerThread(name, tracker, found.run_id, recorded, self.description.folder / "metrics.jsonl")
            thread.upto, thread.resumes = step if step else -1, name in known
            self.threads.append(thread)
        self.save()  # before a tracker knows an id, so that a kill cannot lose it
        for thread in self.threads:
            thread.start()

    def _tracker(self, name: str) -> Tracker:
        if name == "tensorboard":
            return LocalTracker(name, self.description)
        return RemoteTracker(name, self.description)

    def log(self, numbers: Mapping[str, object], step: int) -> None:
        """Queue the numbers of a line for each tracker, and print what the trackers have to say."""
        if found := numbers_of(numbers):
            for thread in self.threads:
                thread.put(found, step)
        self._tell_news()
        if self._ids != [thread.run_id for thread in self.threads]:  # MLflow chooses its ids
            self.save()

    def save(self) -> None:
        """Write trackers.json if it changed."""
        self._ids = [thread.run_id for thread in self.threads]
        text = json.dumps({one.tracker_name: {"id": one.run_id, "recorded": one.next_safe()} for one in self.threads})
        if self.threads and text != self._written:
            with suppress(OSError):  # the disk may be full; a later save writes it
                filesystem.atomic_write(self.path, text + "\n")
                self._written = text

    def close(self, is_done: bool) -> None:
        """Let the trackers finish, for a limited time. `is_done` tells whether the run has taken its last step."""
        for thread in self.threads:
            thread.end()
        limit = DONE_SECONDS if is_done else STOPPED_SECONDS
        deadline = time.monotonic() + limit
        for thread in self.threads:
            while thread.is_alive() and time.monotonic() < deadline and thread.seconds_in_call() < limit:
                thread.join(LOOK_SECONDS)
            if thread.is_alive():
                thread.give_up()
        self._tell_news()
        for thread in self.threads:
            if lost := thread.num_lost + len(thread._waiting) * thread.is_alive():
                self.tell(f"tracker {thread.tracker_name}: lines not recorded: {lost}; metrics.jsonl has them all")
        self.save()

    def _tell_news(self) -> None:
        for thread in self.threads:
            while thread.news:
                self.tell(thread.news.popleft())

    def _known(self) -> Iterator[tuple[str, _Known]]:
        """Yield each tracker of trackers.json with what it has recorded. Leave out what is damaged."""
        try:
            found = filesystem.read_json_object(self.path, filesystem.MAX_SMALL_BYTES)
        except (OSError, ValueError):
            if not self.path.exists():
                return
            found = {"": None}
        for name, facts in found.items():
            run_id, recorded = (facts.get("id"), facts.get("recorded")) if isinstance(facts, dict) else (None, None)
            if isinstance(run_id, str) and ID.fullmatch(run_id) and type(recorded) is int and recorded >= -1:
                yield name, _Known(run_id, recorded)
            else:
                self.tell(f"{self.path}: has unusable entries; trackers start new runs")
                return
