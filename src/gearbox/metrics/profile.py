"""Record a few steps of a run operation by operation: a trace for Perfetto, the dearest operations, communication."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, record_function

from gearbox import filesystem
from gearbox.config.recipe import Run
from gearbox.console import Screen, styled

NUM_DEAREST = 10
SNAPSHOT_STEPS = 3  # of a memory snapshot, if run.profile names none
SNAPSHOT_ENTRIES = 200_000  # allocations and frees that a snapshot keeps, the newest
MARK = "step "  # prefix of the ranges that we add
Span = tuple[float, float]


@dataclass(frozen=True)
class Operation:
    """An operation of the recorded steps."""

    name: str
    calls: int
    seconds: float
    """Time on the device, without the operations that it calls."""
    share: float
    """Share of all operations' time."""


@dataclass(frozen=True)
class Summary:
    """The figures of the recorded steps on one rank."""

    steps: tuple[int, int]
    rank: int
    device: str
    seconds: float
    communication_seconds: float
    """Time in which at least one collective ran."""
    exposed_seconds: float
    """The part of it in which nothing was computed."""
    operations: list[Operation]

    @property
    def exposed_share(self) -> float:
        """The share of the time in which the rank only communicated."""
        return self.exposed_seconds / max(self.seconds, 1e-9)

    def lines(self) -> list[str]:
        """Return the figures as lines of a table."""
        title = f"steps {self.steps[0]} to {self.steps[1]} on rank {self.rank}: {self.seconds:.3f} s"
        rows = [f"{one.share:>7.1%} {one.seconds:>10.4f} s {one.calls:>9,} x  {one.name}" for one in self.operations]
        exposed = f"exposed communication: {self.exposed_share:.1%} of the time"
        return [title, *rows, f"{exposed} ({self.communication_seconds:.3f} s of communication in all)"]


class Profiler:
    """A recorder of the steps that `run.profile` names. Every rank has one, and writes its own files."""

    def __init__(self, folder: Path, run: Run, num_steps: int, screen: Screen, place: tuple[int, torch.device]) -> None:
        """Store the parameters; `place` is this rank and its device."""
        self.folder, self.num_steps, self.screen = folder, num_steps, screen
        self.rank, self.device = place
        self.traces = run.profile is not None
        self.steps = run.profile.steps if run.profile is not None else (1, SNAPSHOT_STEPS)
        self.snapshots = run.memory_snapshot
        self.on_end: Callable[[], None] = lambda: None
        """Called once the files are written, which takes seconds."""
        self._profile: torch.profiler.profile | None = None
        self._mark: record_function | None = None
        self._first: int | None = None
        self._last, self._began = 0, 0.0

    def open(self, step: int) -> None:
        """Begin if the step after this one is to be recorded. Print why nothing will be."""
        if self.snapshots and self.device.type != "cuda":
            self.screen.print_always("hint: run.memory_snapshot: there is no GPU, so no snapshot is written")
            self.snapshots = False
        if not self.traces:
            self.steps = (step + 1, step + SNAPSHOT_STEPS)
        elif step >= self.steps[1] or self.steps[0] > self.num_steps:
            taken = f"step {step} was taken before" if step >= self.steps[1] else f"the run ends at {self.num_steps}"
            first, last = self.steps
            self.screen.print_always(f"hint: run.profile: steps {first} to {last} are not recorded, because {taken}")
        self._begin_if_due(step)

    def after(self, step: int) -> None:
        """Begin or end recording after a step."""
        if self._first is not None:
            self._unmark()
            self._last = step
            if step >= min(self.steps[1], self.num_steps):
                self.close()
            else:
                self._mark_step(step + 1)
        else:
            self._begin_if_due(step)

    def close(self) -> None:
        """End recording, if it has begun, and write the files. A full disk does not stop training."""
        if self._first is None:
            return
        self._unmark()
        try:
            seconds = self._stop()  # first: a recorder that goes on fills the memory
            filesystem.make_folder(self.folder)
            if self._profile is not None:
                self._write_trace(self._profile, seconds)
            if self.snapshots:
                path = self.folder / f"memory.{self._name('pickle')}"
                self._write(path, lambda part: cast(Any, torch.cuda.memory)._dump_snapshot(str(part)))
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            self.screen.print_always(f"hint: run.profile: {self.folder} cannot be written: {why}")
        if self.snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = self._first = None
        self.on_end()

    def _begin_if_due(self, step: int) -> None:
        first, last = self.steps
        if not (self.traces or self.snapshots) or not first <= step + 1 <= min(last, self.num_steps):
            return
        self._first, self._last, self._began = step + 1, step, time.perf_counter()
        if self.snapshots:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        if self.traces:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
        self._mark_step(step + 1)

    def _mark_step(self, step: int) -> None:
        self._mark = record_function(f"{MARK}{step}")
        cast(Any, self._mark).__enter__()

    def _unmark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _name(self, ending: str) -> str:
        """Return the end of a file's name. A run that was killed records other steps when it resumes."""
        return f"steps-{self._first}-{self._last}.rank-{self.rank}.{ending}"

    def _stop(self) -> float:
        """Stop recording operations. Return the seconds that were recorded."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter() - self._began
        finally:
            if self._profile is not None:
                self._profile.stop()

    def _write_trace(self, profile: torch.profiler.profile, seconds: float) -> None:
        """Write the trace and the figures, and print the figures of rank 0."""
        trace = self.folder / self._name("json.gz")
        self._write(trace, lambda part: profile.export_chrome_trace(str(part)))
        steps = (self._first or 0, self._last)
        summary = summarize(cast(Any, profile).events(), steps, self.rank, self.device.type, seconds)
        filesystem.atomic_write(self.folder / self._name("summary.json"), json.dumps(asdict(summary), indent=1) + "\n")
        first, *rest = summary.lines()
        self.screen.print(styled((first, "bold")))
        for line in [*rest, f"trace: {trace}; open it in https://ui.perfetto.dev"]:
            self.screen.print(line)

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Let a library write a file, which appears only once it is complete. It must keep the ending of its name."""
        part = path.with_name(f"tmp-{path.name}")
        try:
            write(part)
            if not part.is_file():  # libraries of profilers log a full disk, and continue
                raise OSError(None, "no file was written")
            filesystem.rename(part, path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def summarize(events: Iterable[Any], steps: tuple[int, int], rank: int, device: str, seconds: float) -> Summary:
    """Return the figures of a profiler's events: on a GPU of its kernels, else of the operations on the CPU."""
    on_gpu = device == "cuda"
    communicating: list[Span] = []
    computing: list[Span] = []
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        is_elsewhere = (event.device_type.name != "CPU") != on_gpu
        if is_elsewhere or event.name.startswith(MARK) or (on_gpu and event.is_user_annotation):
            continue  # the profiler copies ranges to the device's timeline; they are no kernels
        span = (event.time_range.start, event.time_range.end)
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if "nccl" in event.name.lower() if on_gpu else event.name.startswith("gloo:"):
            communicating.append(span)
            own = span[1] - span[0]  # gloo's ranges are asynchronous; the profiler adds up no time for them
        elif on_gpu or event.name.startswith("aten::"):
            computing.append(span)
        calls, total = found.get(event.name, (0, 0.0))
        found[event.name] = (calls + 1, total + own)
    everything = sum(total for _, total in found.values()) or 1.0
    dearest = sorted(found.items(), key=lambda pair: -pair[1][1])[:NUM_DEAREST]
    both = _length([*communicating, *computing])
    return Summary(
        steps=steps,
        rank=rank,
        device=device,
        seconds=round(seconds, 6),
        communication_seconds=round(_length(communicating) / 1e6, 6),
        exposed_seconds=round((both - _length(computing)) / 1e6, 6),
        operations=[Operation(name, n, round(us / 1e6, 6), round(us / everything, 4)) for name, (n, us) in dearest],
    )


def _length(spans: list[Span]) -> float:
    """Return the length of the union of spans."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total
