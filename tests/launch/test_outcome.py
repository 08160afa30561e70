"""Test that a run reports its outcome to its launcher and in its folder."""

from gearbox.launch import outcome
from gearbox.launch.outcome import read_outcome, write_outcome


def test_the_outcome_file_equals_status_json(tmp_path, monkeypatch):
    monkeypatch.setenv(outcome.OUTCOME_FILE, str(tmp_path / "outcome"))
    (tmp_path / "run").mkdir()
    outcome.write_outcome("saved", "text", tmp_path / "run", step=3)
    assert outcome.read_outcome(tmp_path / "outcome") == outcome.read_outcome(tmp_path / "run" / "status.json")
    assert outcome.read_outcome(tmp_path / "nowhere") == {}


def test_status_is_written_in_place_where_it_cannot_be_replaced(mounted, capsys):
    with mounted() as runs:
        for outcome in ("running", "done"):
            write_outcome(outcome, "text", runs)
            assert read_outcome(runs / "status.json")["outcome"] == outcome
        assert [path.name for path in runs.iterdir()] == ["status.json"]
    assert capsys.readouterr().err == ""


def test_facts_of_another_type_are_passed_over(tmp_path):
    (tmp_path / "status.json").write_text('{"outcome": ["done"], "step": "3", "saved_step": {}, "pid": true, "run": 1}')
    assert read_outcome(tmp_path / "status.json") == {}
    (tmp_path / "status.json").write_text('{"outcome": "saved", "step": 3, "saved_step": 2.5, "text": null}')
    assert read_outcome(tmp_path / "status.json") == {"outcome": "saved", "step": 3}
