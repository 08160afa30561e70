"""Kill ranks and compare the step ledgers. `make faults` does the same with real launchers, for hours.

The second test switches off each protection to show that it is needed.
"""

import pytest

from gearbox.checkpoint.train_state import TrainState
from gearbox.rows import batches
from support import ledger
from support.faults import NUM_ROWS, STEPS, at_step, kill, patch_step


@pytest.mark.parametrize(("gear", "ranks"), [("ddp", 3), ("fsdp", 2), ("zero3", 2)])
def test_a_rank_that_dies(train, books, monkeypatch, gear, ranks):
    """Two deaths change nothing: the step ledgers match, nothing is left over, every other rank ends by itself."""
    reference = books("reference")
    whole = train(gear, *STEPS, "run.name=whole", ranks=ranks)
    assert set(whole.codes) == {0}, whole.output
    expected, kept = reference(), books("run")
    monitor = ledger.Monitor(whole.folder.parent / "x" / "checkpoints")
    for step, victim in ((4, ranks - 1), (3, 0)):
        with monkeypatch.context() as here:
            patch_step(here, at_step(step, kill, victim))
            outcome = train(gear, *STEPS, ranks=ranks)
        assert outcome.codes[victim] == -9 and set(outcome.codes) <= {-9, 1}, (outcome.codes, outcome.output)
    last = train(gear, *STEPS, ranks=ranks)
    assert set(last.codes) == {0}, last.output
    found = kept()
    assert [len(attempts) for attempts in found.attempts.values()] == [3] * ranks
    assert ledger.problems(found, expected, ranks, 8, NUM_ROWS) == []
    assert monitor.result() == []
    assert ledger.leftovers(last.folder) == []
    assert last.losses == whole.losses


def test_the_ledger_notices_what_is_wrong(train, books, monkeypatch):
    """The step ledgers do not match when any protection is switched off."""
    reference = books("reference")
    train("single", *STEPS, "run.name=whole")
    expected = reference()

    def interrupted(name, **broken):
        kept = books(name)
        with monkeypatch.context() as here:
            patch_step(here, at_step(6, kill))
            train("single", *STEPS, f"run.name={name}")
        with monkeypatch.context() as here:
            for where, value in broken.values():
                here.setattr(*where, value)
            train("single", *STEPS, f"run.name={name}")
        return ledger.problems(kept(), expected, 1, 8, NUM_ROWS)

    from gearbox.training import run_folder

    assert interrupted("well") == []
    ahead = classmethod(lambda cls, saved: cls(**saved | {"step": saved["step"] + 1}))
    assert any("instead of" in problem for problem in interrupted("ahead", load=((TrainState, "from_json"), ahead)))
    forgetful = interrupted("forgetful", load=((run_folder.Run, "restore"), lambda *_: None))
    assert any("instead of" in problem for problem in forgetful)
    again = interrupted("again", load=((batches.Sampler, "rows_of_step"), lambda self, step: list(range(6))))
    assert any("trained different rows" in problem for problem in again)
    assert any("rows repeated" in problem for problem in again)
