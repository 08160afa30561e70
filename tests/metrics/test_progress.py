"""Test the line about a run's steps: what it shows in a log, and that it fits and stays in place on a terminal."""

import io
import re

import pytest

from gearbox.checkpoint.train_state import TrainState
from gearbox.console import Screen
from gearbox.metrics.progress import Progress

GIB = 2**30
NUMBERS = {
    "loss": 1.5, "lr": 1e-4, "grad_norm": 0.25, "tokens_per_second": 4000.0, "tokens_per_second_per_device": 1000.0,
    "mfu": 0.41, "memory_bytes": 2 * GIB, "memory_peak_bytes": 3 * GIB, "memory_predicted_bytes": 4 * GIB,
    "seconds_data": 0.05, "idle": 0.2, "expert_load": 1.25,
}  # fmt: skip


def progress_on(width: int = 80, live: bool = False, log_every: int = 10, step: int = 0) -> Progress:
    screen = Screen(file=io.StringIO(), width=width, force_terminal=live, color_system=None, highlight=False)
    screen.soft_wrap = True
    return Progress(screen, TrainState(step=step), 100, log_every)


def take(progress: Progress, steps: int, **changes: float) -> str:
    for _ in range(steps):
        progress.state.step += 1
        progress.state.recent_losses = [2.0, 1.0]
        progress.step(NUMBERS | changes, tokens=400, seconds=0.1)
    return progress.screen.file.getvalue()


def test_a_log_has_the_first_step_every_tenth_and_the_last():
    lines = take(progress_on(step=3), 97).splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/100" for n in (4, *range(10, 101, 10))]
    assert lines[0].startswith(
        "step 4/100  loss 1.5000  mean 1.5000  lr 1.00e-04  norm 0.25  4,000 tokens/s  1,000 per device  MFU 41%  "
        "mem 2.00/3.00/4.00 GiB  data 50%  20% idle  load 1.25  "
    )
    assert re.search(r"\d left$|\d s left$", lines[0])


def test_what_is_not_known_is_left_out():
    known = {name: NUMBERS[name] for name in ("loss", "lr", "grad_norm", "tokens_per_second", "memory_bytes")}
    progress = progress_on()
    progress.state.step = 1
    progress.step(known | {"tokens_per_second_per_device": 4000.0}, tokens=400, seconds=0.1)
    assert re.fullmatch(
        r"step 1/100  loss 1.5000  lr 1.00e-04  norm 0.25  4,000 tokens/s  mem 2.00 GiB  .* left\n",
        progress.screen.file.getvalue(),
    )


@pytest.mark.parametrize("width", [10, 25, 60, 80, 200])
def test_a_terminal_has_one_line_that_fits(width, monkeypatch):
    monkeypatch.setattr("gearbox.metrics.progress.REDRAW_SECONDS", 0.0)
    progress = progress_on(width, live=True)
    take(progress, 5)
    written = take(progress, 1, loss=12345.678)
    assert "\n" not in written and "\x1b" not in written
    shown = written.split("\r")
    assert len(shown) == 7 and max(map(len, shown)) < width
    assert shown[-1].startswith("step 6/100"[: width - 1])
    kept = [name for name in ("loss", "left", "tokens/s", "mean", "mem", "load") if name in shown[3]]
    expected = {10: 0, 25: 1, 60: 3, 80: 4, 200: 6}
    assert len(kept) >= expected[width], shown[3]


@pytest.mark.parametrize(("width", "shown"), [(45, []), (60, ["accuracy"]), (90, ["accuracy", "margin"])])
def test_compared_answers_are_shown_where_there_is_room(width, shown):
    found = take(progress_on(width, live=True), 1, accuracy=0.8125, margin=-0.00123)
    assert [name for name in ("accuracy", "margin") if name in found] == shown, found
    assert "accuracy 81%" in found or not shown
    assert "margin -0.00123" in found or shown != ["accuracy", "margin"]


def test_fields_do_not_move_when_a_number_gets_shorter(monkeypatch):
    monkeypatch.setattr("gearbox.metrics.progress.REDRAW_SECONDS", 0.0)
    progress = progress_on(200, live=True)
    take(progress, 1, grad_norm=123.4)
    shown = take(progress, 1, grad_norm=1.0).split("\r")
    assert shown[1].index("tokens/s") == shown[2].index("tokens/s")


def test_an_event_stands_above_the_line(monkeypatch):
    monkeypatch.setattr("gearbox.console._live", "")
    progress = progress_on(live=True)
    take(progress, 1)
    before = len(progress.screen.file.getvalue())
    progress.event("held-out loss 1.0")
    written = progress.screen.file.getvalue()[before:]
    assert re.fullmatch(r"\r +\rstep 1/100  held-out loss 1\.0\n\rstep 1/100  loss .*", written)
    progress.close()
    assert progress.screen.file.getvalue().endswith(" \r"), "the line is gone"


def test_nothing_is_drawn_more_often_than_eyes_see():
    progress = progress_on(live=True)
    assert take(progress, 99).count("\r") < 20
