"""Test that the rows of the next step are made while a step computes, and that their errors come at their own step."""

import threading

from gearbox.errors import UserError
from gearbox.rows import batches
from gearbox.training import loop
from support.faults import STEPS, at_step, patch_step


def test_the_rows_of_the_next_step_are_made_while_a_step_computes(train, monkeypatch):
    usual, made = batches.make_step_batch, []
    second = threading.Event()

    def noted(*arguments):
        made.append(threading.current_thread() is not threading.main_thread())
        if len(made) == 2:
            second.set()
        return usual(*arguments)

    def wait(_):
        assert second.wait(5), "the rows of step 2 wait for step 1"

    patch_step(monkeypatch, at_step(1, wait))
    monkeypatch.setattr(batches, "make_step_batch", noted)
    patch_end(monkeypatch, lambda: print(f"made {made}"))
    outcome = train("single", *STEPS)
    assert outcome.codes == [0], outcome.output
    assert f"made {[True] * 8}" in outcome.output, "each step once, and none after the last"


def test_an_error_in_rows_made_ahead_ends_the_run_at_their_step(train, monkeypatch):
    usual, calls = batches.make_step_batch, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise UserError("data.path: chats.jsonl: cannot be read")
        return usual(*arguments)

    monkeypatch.setattr(batches, "make_step_batch", failing)
    outcome = train("single", *STEPS, "save.every=0")
    assert outcome.codes == [2], outcome.output
    assert "gearbox: data.path: chats.jsonl: cannot be read" in outcome.output
    assert [line["step"] for line in outcome.lines("loss")] == [1, 2]


def patch_end(monkeypatch, act):
    """Call `act` when the loop has ended."""
    usual = loop.fit

    def fit(*arguments):
        stopped = usual(*arguments)
        act()
        return stopped

    monkeypatch.setattr(loop, "fit", fit)
