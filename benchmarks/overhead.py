"""Measure what recording costs a step of SmolLM2: metrics, progress, trackers and reports, on and off in turn.

Usage: python benchmarks/overhead.py [steps]

It trains recipes/smollm2_135m.yaml on one device, 24 steps by default, and writes benchmarks/overhead.json. In every
second step each function in RECORDERS does nothing. The time inside them, which other jobs disturb less than whole
steps, is measured too. Run `make smollm2` first, and run nothing else meanwhile.
"""

from __future__ import annotations

import functools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import psutil  # noqa: E402

import train  # noqa: E402
from gearbox.launch.report_process import ReportProcess  # noqa: E402
from gearbox.metrics.clock import StepClock  # noqa: E402
from gearbox.metrics.profile import Profiler  # noqa: E402
from gearbox.metrics.recorder import Metrics  # noqa: E402
from gearbox.training import loop, run_folder  # noqa: E402

RECORDERS: list[tuple[type, str]] = [
    (Metrics, "step"),
    (StepClock, "begin"),
    (Profiler, "after"),
    (ReportProcess, "start_if_due"),
]
"""What is recorded at each step. Trackers and the files of a run are written inside Metrics.step."""
WARM_UP = 2  # steps that count for nothing
LIMIT = 0.01  # of a step
RESULT = ROOT / "benchmarks" / "overhead.json"


class Meter:
    """The time of each step, and the part of it inside the recorders."""

    def __init__(self) -> None:
        self.step, self.inside = 0, 0.0
        self.last: float | None = None
        self.depth = 0
        self.steps: list[dict[str, float | bool]] = []

    @property
    def is_on(self) -> bool:
        """True in half of the steps: on, off, off, on, so that a slow change of the machine cancels."""
        return self.step % 4 in (0, 3)

    def wrapped(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return a recorder that is timed, or that does nothing."""

        @functools.wraps(usual)
        def call(*arguments: Any, **options: Any) -> Any:
            if not self.is_on:
                return None
            began, self.depth = time.perf_counter(), self.depth + 1
            try:
                return usual(*arguments, **options)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.inside += time.perf_counter() - began

        return call

    def boundary(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that begins a step of the loop, and ends the one before."""

        @functools.wraps(usual)
        def call(*arguments: Any, **options: Any) -> Any:
            now = time.perf_counter()
            if self.last is not None:
                self.steps.append({"on": self.is_on, "seconds": now - self.last, "inside": self.inside})
                self.step += 1
            self.inside = 0.0
            result = usual(*arguments, **options)
            self.last = time.perf_counter()  # evaluations and saves are not recording
            return result

        return call


def figures(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of steps with and without recording, and what recording adds."""
    on, off = ([one["seconds"] for one in steps[WARM_UP:] if one["on"] == kind] for kind in (True, False))
    inside = [one["inside"] for one in steps[WARM_UP:] if one["on"]]
    median_off = statistics.median(off)
    return {
        "on_seconds": round(statistics.median(on), 4),
        "off_seconds": round(median_off, 4),
        "difference_share": round(statistics.median(on) / median_off - 1, 4),
        "spread_share": round((max(off) - min(off)) / median_off, 4),
        "inside_seconds": round(statistics.median(inside), 6),
        "inside_share": round(statistics.median(inside) / median_off, 6),
        "largest_inside_seconds": round(max(inside), 6),
    }


def main(arguments: list[str]) -> int:
    """Train, print and write the figures. Return 1 if the time inside the recorders exceeds the limit."""
    num_steps = int(arguments[0]) if arguments else 24
    meter = Meter()
    for owner, name in RECORDERS:
        setattr(owner, name, meter.wrapped(getattr(owner, name)))
    loop.evaluate_if_due = meter.boundary(loop.evaluate_if_due)
    with tempfile.TemporaryDirectory() as folder:
        recipe = str(ROOT / "recipes" / "smollm2_135m.yaml")
        settings = [
            f"train.steps={num_steps}",
            f"run.dir={folder}",
            "save.every=0",
            "eval.fraction=0",
            "eval.samples=0",
        ]
        train.main([recipe, *settings, "schedule.warmup=0", "run.log_every=1"])
    processor = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    result = {
        "recipe": "recipes/smollm2_135m.yaml",
        "gear": "single",
        "steps": len(meter.steps),
        **figures(meter.steps),
        "machine": f"{psutil.cpu_count()} cores of {processor}, load {psutil.getloadavg()[0]:.0f} at the end",
        "date": str(datetime.now(UTC).date()),
        "versions": run_folder.versions(),
    }
    print(json.dumps(result, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["inside_share"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
