"""`make cells`: attack runs, models and settings with damaged files, with other random numbers each day."""

import random
from datetime import UTC, datetime

import pytest

from gearbox.training.run_folder import Run
from support import attacks, ranks

pytestmark = [pytest.mark.long, pytest.mark.cells, pytest.mark.ranks]
NUM_DAILY = 6  # per victim
FIRST = 1000 + datetime.now(UTC).toordinal() * NUM_DAILY


@pytest.fixture(scope="module")
def attacking(tmp_path_factory):
    timeout = ranks.TIMEOUT
    yield attacks.Attacks(tmp_path_factory.mktemp("attacks"))
    ranks.TIMEOUT = timeout


@pytest.mark.parametrize("number", range(FIRST, FIRST + NUM_DAILY))
@pytest.mark.parametrize("victim", attacks.VICTIMS)
def test_an_attack_is_harmless(attacking, victim, number):
    """Repeat a failure with: python tests/support/attacks.py VICTIM-NUMBER."""
    done, result = getattr(attacking, victim)(random.Random(f"{victim}-{number}"))
    assert result.fact in attacks.FACTS[:2], (done, result)


def fail() -> int:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("work", "fact"),
    [(lambda: 0, "as usual"), (lambda: 2, "refused"), (fail, "traceback"), (input, "prompt or foreign code")],
)
def test_each_fact_is_noticed(attacking, work, fact):
    assert attacking._fork(work).fact == fact


def test_foreign_code_and_hangs_are_noticed(attacking, monkeypatch):
    assert attacking._fork(attacking.marker.touch).fact == "prompt or foreign code"
    monkeypatch.setattr(attacks, "HANG_SECONDS", 0)
    assert attacking._fork(lambda: 0).fact == "hang"


def test_a_wrong_resume_is_noticed(attacking, monkeypatch):
    monkeypatch.setattr(attacks.Attacks, "_hurt", lambda *_: "")
    assert attacking._resume(random.Random(), "*", "single")[1].fact == "as usual"
    monkeypatch.setattr(Run, "restore", lambda *_: None)
    assert attacking._resume(random.Random(), "*", "single")[1].fact == "wrong resume"
