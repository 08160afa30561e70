"""Test reports of runs that diverged, of folders that others wrote, and of texts and numbers at their limits."""

import html
import json
import math
import os
import re
import shlex
import socket
from pathlib import Path

import pytest

import report as script
from gearbox import ROOT
from gearbox.config.gear import gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.launch import report_process
from gearbox.pages import charts, overlay, run_data, run_facts, run_report, scale
from support.run_folders import STATUS, make_run, text_of, write_lines


@pytest.mark.parametrize(
    "overrides",
    [
        ['eval.prompts=["What is 😀?", "a\\u2028b\\x85"]', "run.name='123'"],
        ["run.name='1.50'"],
        ["run.name='true'"],
        ["run.name='null'"],
        ["run.name='010'"],
        ["run.name=plain", "data.fields.output=answer", "optim.lr=1e-5", "train.epochs=null", "train.steps=4"],
    ],
)
def test_the_command_repeats_each_value(overrides):
    path = ROOT / "recipes" / "tiny.yaml"
    recipe = load_recipe(path, overrides)
    command = run_facts.repeating_command(Job.unchecked(path, recipe, load_gear(gear_path("single"))))
    words = shlex.split(command)
    assert words[:3] == ["python", "src/train.py", "recipes/tiny.yaml"] and len(words) == 3 + len(overrides)
    assert load_recipe(path, words[3:]).model_dump() == recipe.model_dump()


def test_a_peak_at_the_end_and_means_after_a_huge_value_stay():
    ys = [1.0] * 50_000
    ys[49_990] = 99.0
    points = scale.thinned(range(50_000), ys)
    assert (49_990, 99.0) in points and points[-1] == (49_999, 1.0)
    means, _ = scale.moving_mean([2.0] * 10 + [1e20, math.nan] + [2.1] * 100)
    assert means[:5] == [2.0] * 5 and means[-3:] == [2.1] * 3


@pytest.mark.parametrize(
    ("losses", "model_step", "shown"),
    [
        ([6.0, 3.0, None], 20, "held-out loss not finite from 6 in step 0 held-out perplexity not finite from 403 "),
        ([6.0, 3.0, None], None, "held-out loss not finite from 6 in step 0 "),
        ([None, 5.0, 3.0], 20, "held-out loss 3 from 5 in step 10 held-out perplexity 20.1 from 148 "),
        ([6.0, 3.0, 4.0], 10, "held-out loss 3 from 6 in step 0; the model is that of step 10, the best one "),
        ([None, None], 10, "held-out loss not finite held-out perplexity not finite "),
    ],
)
def test_a_diverged_model_is_not_hidden(tmp_path, losses, model_step, shown):
    one, other = make_run(tmp_path / "one", 5), make_run(tmp_path / "other", 5)
    lines = [{"step": 10 * number, "loss": 1.0, "eval_loss": loss} for number, loss in enumerate(losses)]
    write_lines(one / "metrics.jsonl", lines)
    status = STATUS | ({} if model_step is None else {"model_step": model_step})
    (one / "status.json").write_text(json.dumps(status))
    run_report.write(one)
    assert shown in text_of(one / "report.html")
    overlay.write(tmp_path / "x.html", [run_data.read(one), run_data.read(other)])
    row = re.search(r"<tr><td>one</td>.*?</tr>", (tmp_path / "x.html").read_text())[0]
    assert ("not finite" in row) == ("not finite" in shown) and ("best" in row) == ("not finite" not in shown)


def test_files_of_others_leave_no_traceback(tmp_path, capsys):
    run = make_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9t\xe9")), 5)
    status = {"outcome": "running", "host": socket.gethostname(), "pid": 2**31}
    (run / "status.json").write_text(json.dumps(STATUS | status))
    (run / "hang" / "a.txt").write_text("[" * 200_000)
    (run / "hang" / "b.txt").write_text(json.dumps({"rank": 0, "host": 0, "doing": 0, "seconds_ago": 10**400}))
    (run / "resolved.yaml").write_text("a: {b: &x [*x]}\n")
    (run / "run.json").write_text(json.dumps({"num_steps": 10**400, "num_weights": 10**400}))
    (run / "answers.jsonl").write_text('{"step": 0, "question": "q \\ud83d", "expected": null, "answer": "x"}\n')
    odd = [1.7e308, -1.7e308, 1e-310, 5e-324, math.inf]
    lines = [{"step": step, "loss": x, "eval_loss": x, "grad_norm": x, "lr": x} for step, x in enumerate(odd)]
    write_lines(run / "metrics.jsonl", [*lines, {"step": 6, "seconds_without_a_step": math.inf, "seconds": 1e308}])
    script.main([str(run)])
    assert "ended without a word" in text_of(run / "report.html")
    script.main([str(run), str(make_run(tmp_path / "other", 5)), "--output", str(tmp_path / "x.html")])
    assert capsys.readouterr().out.count("report: ") == 2


@pytest.mark.parametrize("text", ["a: {b: " + "[" * 100 + "]" * 100 + "}", "a: {b: &x [1], c: *x}"])
def test_a_recipe_that_cannot_be_one_is_left_out(tmp_path, text):
    run = make_run(tmp_path / "x", 5)
    (run / "resolved.yaml").write_text(text)
    assert run_data.read(run).recipe == {}


def test_long_questions_and_answers_are_compared_as_a_whole(tmp_path):
    run, long = make_run(tmp_path / "x", 5), "be helpful\n" * 300
    lines = [
        {"step": 0, "question": long + name, "expected": long + name, "answer": long + "c"} for name in ("a", "b", "c")
    ]
    write_lines(run / "answers.jsonl", lines)
    run_report.write(run)
    words = text_of(run / "report.html")
    assert words.count(" question be helpful") == 3 and words.count("[1,301 more characters]") == 9
    assert words.count("The last answer differs") == 2 and words.count("The last answer is the expected one") == 1
    assert 'class="facts answers"' in (run / "report.html").read_text(), "whose lines are not joined"


def test_a_folder_without_facts_tells_nothing_untrue(tmp_path):
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": 1, "loss": None, "num_skipped": 1}, {"step": 2, "loss": 1.0, "tokens": 9}]
    )
    run_report.write(tmp_path)
    words = text_of(tmp_path / "report.html")
    assert "step 1 was skipped" in words and "No resume" not in words and "nan" not in words


def test_a_running_run_of_another_machine_shows_its_last_line(tmp_path, monkeypatch):
    run = make_run(tmp_path / "x", 5)
    os.utime(run / "metrics.jsonl", (1.78e9, 1.78e9))
    monkeypatch.chdir(run)
    run_report.write(Path(), STATUS | {"outcome": "running", "host": "another machine"})
    content = html.unescape((run / "report.html").read_text())
    assert "Last update 2026-05-2" in content and 'data-updated="1780000000"' in content
    assert f"python src/report.py {run}<" in content, "not . as its commands are called elsewhere"
    assert run_facts.from_root(ROOT / "runs" / "first") == "runs/first"


def test_steps_without_known_tokens_are_left_out_and_many_runs_differ(tmp_path):
    runs = [make_run(tmp_path / f"run{number}", 100, seed=number) for number in range(10)]
    lines = (runs[9] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs[9] / "metrics.jsonl").write_text("".join(one for one in lines if not one.startswith('{"step": 100, "loss"')))
    overlay.write(tmp_path / "x.html", [*map(run_data.read, runs)])
    content = (tmp_path / "x.html").read_text()
    assert "nan" not in content
    looks = re.findall(r'data-name="(run\d)" style="([^"]*)"', content)[:10]
    assert len({look for _, look in looks}) == len(looks) == 10


def test_output_replaces_pages_alone(tmp_path, monkeypatch):
    runs = [str(make_run(tmp_path / name, 5)) for name in "ab"]
    metrics = tmp_path / "a" / "metrics.jsonl"
    for output in (metrics, Path("/dev/null"), tmp_path / "a"):
        with pytest.raises(UserError, match=r"--output: .* is there and is not a page"):
            script.main([*runs, "--output", str(output)])
    assert metrics.read_text().startswith("{")
    for _ in range(2):
        script.main([runs[0], "--output", str(tmp_path / "x.html")])
    assert "a done" in text_of(tmp_path / "x.html") and not (tmp_path / "a" / "report.html").exists()
    monkeypatch.setattr(run_data, "read", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match="a: cannot be read: Permission denied"):
        script.main(runs)


def test_each_kind_of_sign_has_its_row():
    signs = {kind: [(1.0, kind)] for kind in charts.SIGNS}
    drawn = charts.draw(charts.Chart("t", [charts.Line("a", [1, 2], [1.0, 2.0])], signs=signs))
    assert re.findall(r'class="lane" style="grid-row:(\d)"', drawn) == ["3", "4", "5", "6", "7"]


@pytest.mark.parametrize(
    ("value", "unit", "label"),
    [
        (999.7, "", "999.7"),
        (math.exp(140), "", "6.33e+60"),
        (3600.0, "s", "3,600 s"),
        (999.9 * 2**20, "bytes", "999.9 MiB"),
    ],
)
def test_labels_are_short(value, unit, label):
    assert scale.value_label(value, unit) == label and len(scale.compact(value)) < 9


def test_the_first_report_needs_no_request_and_a_killed_one_leaves_no_file(tmp_path, monkeypatch):
    class Writing:
        def poll(self):
            return None

        def kill(self):
            (tmp_path / "report.html.tmp-12345678").touch()

        def wait(self):
            return -9

    now, started = [1000.0], []
    monkeypatch.setattr(report_process, "_start", lambda _: started.append(Writing()) or started[-1])
    monkeypatch.setattr(report_process.time, "monotonic", lambda: now[0])
    process = report_process.ReportProcess(tmp_path, is_first_rank=True)
    now[0] += report_process.FIRST_SECONDS
    process.start_if_due()
    assert len(started) == 1
    process.close()
    assert [*tmp_path.iterdir()] == []
