"""Test that a metric is the user's function, and that each of its mistakes is one line."""

import pytest

from gearbox.checks.documents import metric_problem
from gearbox.errors import UserError
from gearbox.generation.metric import Answered, Metric
from support.world import SingleProcess

ANSWERED = [Answered("one?", "1", "1"), Answered("two?", " 2 ", "2"), Answered("three?", "4", "3")]


def made(tmp_path, text: str, name: str = "score") -> str:
    path = tmp_path / "scores.py"
    path.write_text(text)
    return f"{path}:{name}"


def test_exact_match_ignores_space_around_an_answer():
    assert Metric("exact_match", SingleProcess()).mean(ANSWERED, lambda: True) == pytest.approx(2 / 3)


def test_a_function_gets_question_answer_and_expected_and_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("def length(text):\n    return len(text)\n")
    text = (
        "from neighbour import length\ndef score(question, answer, expected):\n    return length(question + expected)\n"
    )
    assert Metric(made(tmp_path, text), SingleProcess()).mean(ANSWERED, lambda: True) == pytest.approx((5 + 5 + 7) / 3)


def test_a_slow_function_is_interrupted_between_answers(tmp_path, monkeypatch):
    """Stop on request, and look for one before each group."""
    metric, looks = Metric(made(tmp_path, "def score(q, a, e):\n    return len(q)"), SingleProcess()), []
    assert metric.mean(ANSWERED, lambda: looks.append(1) or True) == pytest.approx((4 + 4 + 6) / 3)
    assert len(looks) == 1, "fast answers are one group"
    monkeypatch.setattr("gearbox.generation.metric.GROUP_SECONDS", -1.0)
    assert metric.mean(ANSWERED, lambda: looks.append(1) or True) == pytest.approx((4 + 4 + 6) / 3)
    assert len(looks) == 4
    assert metric.mean(ANSWERED, lambda: looks.append(1) or len(looks) < 6) is None and len(looks) == 6


def test_a_function_may_use_dataclasses_with_late_annotations(tmp_path):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Judge:\n"
        "    weight: float = 2.0\ndef score(q, a, e):\n    return Judge().weight\n"
    )
    assert Metric(made(tmp_path, text), SingleProcess()).mean(ANSWERED, lambda: True) == 2.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def score(q, a, e):\n    return 1 / 0", "of the question 'one?': raised ZeroDivisionError: division by zero"),
        ("def score(q, a, e):\n    return float(a == 1) / 0.0", "raised ZeroDivisionError"),
        ("def score(q, a, e):\n    return float('nan')", "returned nan; return a finite number"),
        ("def score(q, a, e):\n    return None", "raised TypeError"),
        ("def score(q, a):\n    return 1", "raised TypeError"),
        ("def score(q, a, e):\n    raise SystemExit(3)", "raised SystemExit: 3"),
        ("import no_such_module\ndef score(q, a, e):\n    return 1", "cannot be imported: ModuleNotFoundError"),
        ("score = 3", "has no function 'score'"),
    ],
)
def test_a_mistake_of_the_function_is_one_line(tmp_path, text, problem):
    with pytest.raises(UserError, match=r"^eval\.metric: ") as error:
        Metric(made(tmp_path, text), SingleProcess()).mean(ANSWERED, lambda: True)
    assert problem in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        ("def score(:", "is not Python: "),
        ("def scores(q, a, e): pass", "has no function 'score'; did you mean 'scores'?"),
        ("x = 1\0", "is not Python: "),
        ("def score(q, a, e):\n    pass", None),
        ("from other import score", None),
        ("score = lambda q, a, e: 1", None),
        ("try:\n    import x\nexcept ImportError:\n    score = 1", None),
    ],
)
def test_a_metric_is_checked_before_the_run_without_importing_it(tmp_path, text, problem):
    name = f"{tmp_path / 'scores.py'}:score"
    if text is not None:
        made(tmp_path, text + "\nraise SystemExit('imported')" if problem is None else text)
    found = metric_problem(name)
    assert (found is None) if problem is None else problem in (found or "")


def test_exact_match_needs_no_file():
    assert metric_problem("exact_match") is None and metric_problem(None) is None
