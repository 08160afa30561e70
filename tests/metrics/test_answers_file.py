"""Test that answers.jsonl survives a full disk, damaged lines and a resumed run."""

import json

from gearbox import filesystem
from gearbox.console import make_console
from gearbox.metrics.answers_file import AnswersFile, Line


def line(step: int, question: str = "q", answer: str = "a") -> Line:
    return Line(step=step, question=question, expected=None, answer=answer)


def read(path) -> list[dict]:
    return [json.loads(text) for text in (path / "answers.jsonl").read_text().splitlines()]


def test_a_resumed_run_drops_later_answers_and_damaged_lines(tmp_path):
    first = AnswersFile(tmp_path, make_console(speaks=True), -1)
    first.add([line(0)]), first.add([line(2)]), first.add([line(4)])
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"step": 1}\n{"step": 1, "question": 3, "expected": null, "answer": "a"}\nnull\n{"step": 2, "que')
    resumed = AnswersFile(tmp_path, make_console(speaks=True), 2)
    resumed.add([line(4, answer="b")])
    assert [(one["step"], one["answer"]) for one in read(tmp_path)] == [(0, "a"), (2, "a"), (4, "b")]
    assert resumed.compared(4) == [{"question": "q", "before": "a", "after": "b"}]


def test_answers_wait_in_memory_while_the_disk_is_full(tmp_path, monkeypatch, capsys):
    answers = AnswersFile(tmp_path, make_console(speaks=True), -1)
    with monkeypatch.context() as full:
        full.setattr(filesystem, "atomic_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        answers.add([line(0)])
    assert "cannot be written: No space left" in capsys.readouterr().out
    answers.add([line(1)])
    assert [one["step"] for one in read(tmp_path)] == [0, 1]


def test_a_secret_in_an_answer_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz012345")
    answers = AnswersFile(tmp_path, make_console(speaks=True), -1)
    answers.add([line(0, answer="the token is hf_abcdefghijklmnopqrstuvwxyz012345")])
    assert "abcdefghij" not in (tmp_path / "answers.jsonl").read_text()


def test_only_the_first_rank_writes(tmp_path):
    AnswersFile(tmp_path, make_console(speaks=False), -1).add([line(0)])
    assert not [*tmp_path.iterdir()]
