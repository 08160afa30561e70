"""Test that answers.jsonl survives a full disk, damaged lines, failed reads and a resumed run."""

import json
from pathlib import Path

import pytest

from gearbox import filesystem
from gearbox.console import make_console
from gearbox.metrics import answers_file, metrics_file
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


def test_the_rejected_answer_of_a_pair_is_kept(tmp_path):
    pair = line(0) | {"expected": "good", "rejected": "bad"}
    AnswersFile(tmp_path, make_console(speaks=True), -1).add([pair, line(0, "own question")])
    resumed = AnswersFile(tmp_path, make_console(speaks=True), 0)
    resumed.add([pair | {"step": 2, "answer": "b"}, line(2, "own question")])
    assert [one.get("rejected") for one in read(tmp_path)] == ["bad", None, "bad", None]
    first, second = resumed.compared(2)
    assert first == {"question": "q", "before": "a", "after": "b", "expected": "good", "rejected": "bad"}
    assert "rejected" not in second


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


@pytest.fixture
def stale_reads(monkeypatch):
    """Let each read fail after the first line, as on a network file system whose file was replaced."""
    open_file = Path.open

    class Stale:
        def __init__(self, file):
            self.file, self.lines = file, [file.readline()]

        def readline(self, size):
            if self.lines:
                return self.lines.pop()
            raise OSError(116, "Stale file handle")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    def opened(path, mode="r", *rest, **options):
        file = open_file(path, mode, *rest, **options)
        return Stale(file) if mode == "rb" and path.name.endswith(".jsonl") else file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)
        yield patched


@pytest.mark.parametrize("can_rename", [True, False])
def test_a_failed_read_loses_no_lines(tmp_path, stale_reads, capsys, can_rename):
    steps = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 4))
    answers = "".join(json.dumps(line(step)) + "\n" for step in range(3))
    (tmp_path / "metrics.jsonl").write_text(steps)
    (tmp_path / "answers.jsonl").write_text(answers)
    if not can_rename:
        stale_reads.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    told = []
    assert metrics_file.drop_after(tmp_path / "metrics.jsonl", 3, 3, told.append)[0].good == []
    file = AnswersFile(tmp_path, make_console(speaks=True), 2)
    file.add([line(3)])
    out = capsys.readouterr().out
    assert len(told) == 1 and "Stale file handle" in told[0] and out.count("Stale file handle") == 1
    aside = ".unread-1" if can_rename else ""
    assert (tmp_path / f"metrics.jsonl{aside}").read_text() == steps
    assert (tmp_path / f"answers.jsonl{aside}").read_text() == answers
    if not can_rename:
        stale_reads.undo()
        file.add([line(4)])
    assert [one["step"] for one in read(tmp_path)] == ([3] if can_rename else [0, 1, 2, 3, 4])


def test_secrets_are_looked_up_once_for_all_lines(tmp_path, monkeypatch):
    file, calls, find = AnswersFile(tmp_path, make_console(speaks=True), -1), [], answers_file.secrets
    monkeypatch.setattr("gearbox.redact.secrets", lambda: calls.append(1) or find())
    monkeypatch.setattr(answers_file, "secrets", lambda: calls.append(1) or find())
    file.add([line(0), line(1), line(2)])
    assert len(calls) == 1 and len(read(tmp_path)) == 3
