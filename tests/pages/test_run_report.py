"""Test report.html and loss.png: what they show, from which files, at which size and cost; and src/report.py."""

import html
import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
from PIL import Image

import report as script
from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.launch import report_process
from gearbox.pages import charts, overlay, page, run_data, run_facts, run_report
from support.repository import HEAVY
from support.run_folders import FACTS, HOSTILE, STATUS, hostile_facts, make_pair_run, make_run, text_of, write_lines


def test_the_report_of_a_run(train):
    given = ("train.steps=6", "eval.every=2", "eval.fraction=0.2", "eval.samples=2", "save.every=3")
    outcome = train("ddp", *given, ranks=2)
    assert set(outcome.codes) == {0}, outcome.output
    content = (outcome.folder / "report.html").read_text()
    words = text_of(outcome.folder / "report.html")
    (drawn,) = re.findall(r'<path class="faint"[^>]* d="([^"]*)"', content.split("<h3>Exact match")[0])
    heights = [float(point.split()[1]) for point in re.split("[ML]", drawn)[1:]]
    losses = outcome.losses
    assert sorted(range(6), key=lambda i: -heights[i]) == sorted(range(6), key=lambda i: losses[i]), (
        "a lower loss is drawn lower"
    )
    trained = [html.unescape(text) for text in re.findall(r"<mark>(.*?)</mark>", content)][1:]
    assert trained and all(text.endswith("<|end|>") for text in trained)
    facts = run_facts.read(outcome.folder)
    assert facts.gear == "ddp" and len(facts.ranks) == 2 and facts.num_steps == 6 and facts.resumes == []
    assert facts.num_weights_trained == facts.num_weights > 0 and facts.plan["engine"]
    for shown in ("done", facts.commit, facts.versions["torch"], "gear ddp on 2 ranks", "rank 0-1", "6 100% of 6",
                  "Use the model", "train.steps=6", "No resume, no skipped step", "save 2"):  # fmt: skip
        assert shown in words, shown
    with Image.open(outcome.folder / "loss.png") as image:
        assert image.format == "PNG" and image.size == (1200, 640)


def test_a_resumed_run_tells_where_it_was_resumed(train):
    first = train("single", "run.name=x", "train.steps=2", "save.every=1", "schedule.warmup=1")
    started = run_facts.read(first.folder)
    second = train("ddp", "run.name=x", "run.resume=latest", "train.steps=4", "schedule.warmup=1", ranks=2)
    assert set(second.codes) == {0}, second.output
    facts = run_facts.read(first.folder)
    assert (facts.started, facts.first.gear, facts.gear) == (started.started, "single", "ddp")
    assert [(one.step, one.gear, one.num_ranks) for one in facts.resumes] == [(2, "ddp", 2)]
    assert "resumed from step 2 under ddp on 2 ranks, after" in text_of(first.folder / "report.html")


def test_every_part_is_shown(tmp_path):
    run = make_run(tmp_path / "first")
    run_report.write(run)
    words = text_of(run / "report.html")
    for shown in ("Where the time of a step goes", "Load of the experts", "Memory of the first rank",
                  "available 700 MiB",
                  "predicted peak 600 MiB", "resume 1", "skipped 1", "spike 1", "failed save 1",
                  "resumed from step 250 under fsdp on 2 ranks, after 43 s without a step",
                  "rank 1 on node1 was in step 250, micro-batch 2 for 61 s; the stacks are in hang/rank-1.44.txt",
                  "All 3 answers through the run", "The last answer is the expected one.", "0.0301",
                  "from 6.03 in step 0",
                  "held-out perplexity", "cuda:0-1 NVIDIA H100", "Resolved recipe, 3 keys",
                  "step 640 could not be saved",
                  "trained 2 min 20 s", FACTS["command"], "python src/chat.py", "python src/export.py"):  # fmt: skip
        assert shown in words, shown


def test_a_run_that_compares_answers(tmp_path):
    run = make_pair_run(tmp_path / "pairs")
    run_report.write(run)
    words = text_of(run / "report.html")
    for shown in ("recipes/tiny, full fine-tuning, dpo", "objective dpo: beta 0.1", "Loss per pair",
                  "held-out accuracy", "held-out margin", "Reward accuracy", "Reward margin", "Rewards by step",
                  "chosen, held out", "rejected, held out", "KL divergence, estimated",
                  "question add 2 3 chosen 5 rejected 6 step 0 ???? step 300 5 The last answer is the chosen one.",
                  "The last answer is the rejected one.", "The last answer differs from both.",
                  "pairs.jsonl:3 chosen <|user|>add 2 3<|end|><|assistant|> 5<|end|> rejected <|user|>add",
                  ):  # fmt: skip
        assert shown in words, shown
    assert "perplexity" not in words and words.count("pairs.jsonl:3") == 1
    usual = make_run(tmp_path / "usual", 20)
    run_report.write(usual)
    assert not any(word in text_of(usual / "report.html") for word in ("Reward", "margin", "accuracy", "KL", "chosen"))
    overlay.write(tmp_path / "both.html", [run_data.read(one) for one in (run, usual)])
    words = text_of(tmp_path / "both.html")
    assert "Held-out reward accuracy" in words and "nats per token or per pair" in words
    rows = re.findall(r"<tr><td>(?:pairs|usual)</td>.*?</tr>", (tmp_path / "both.html").read_text())
    cells = [[re.sub("<[^>]*>", " ", cell).split() for cell in row.split("<td>")] for row in rows]
    losses_and_perplexities = [row[2:4] for row in cells]
    assert losses_and_perplexities == [[["0.254"], ["-"]], [["6.03"], ["416"]]], "losses of two kinds have no best"
    (run / "resolved.yaml").write_text("train:\n  objective: kto\n")
    run_report.write(run)
    words = text_of(run / "report.html")
    assert "Loss per answer" in words and "good, held out" in words and "bad, held out" in words


def test_the_page_loads_nothing_and_lets_only_its_script_run(tmp_path):
    run = make_run(tmp_path / "first", 20)
    run_report.write(run)
    content = (run / "report.html").read_text()
    assert "http:" not in content and "https:" not in content and "url(" not in content and "@import" not in content
    assert not re.search(r'(src|href)="(?!data:,")', content)
    assert "default-src 'none'" in content and content.count("<script") == 1
    assert content.endswith("</html>\n") and 'name="viewport" content="width=device-width' in content


def test_hostile_texts_stay_texts(tmp_path):
    run = make_run(tmp_path / "<img src=x>", 20, hostile_facts())
    write_lines(run / "answers.jsonl", [{"step": 0, "question": HOSTILE, "expected": HOSTILE, "answer": HOSTILE}])
    (run / "resolved.yaml").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}}))
    (run / "status.json").write_text(json.dumps(STATUS | {"outcome": HOSTILE, "text": HOSTILE}))
    run_report.write(run)
    overlay.write(tmp_path / "both.html", [run_data.read(run), run_data.read(make_run(tmp_path / "y", 5))])
    for path in (run / "report.html", tmp_path / "both.html"):
        content = path.read_text()
        assert content.count("<script") == 1 and "<img" not in content, path
    assert (run / "report.html").read_text().count("&lt;img") > 10


def test_damaged_and_missing_files_leave_parts_out(tmp_path):
    run = make_run(tmp_path / "x", 5)
    for name, content in {
        "run.json": '{"gear": "ddp", "ranks": 7, "resumes": [[]], "plan": {"a": 1}, "documents": "x"}',
        "status.json": "[1]",
        "resolved.yaml": "\0",
        "answers.jsonl": '{"step": 1, "question": 3}\n{"step": 1}\n[]\n',
        "hang/rank-1.44.txt": "not JSON\n",
    }.items():
        (run / name).write_text(content)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 6, "loss": "high", "grad_norm": null, "lr": [], "spike": 1, "saved": "x"}\nxx\n{"step": 7, "lo'
        )
    run_report.write(run)
    words = text_of(run / "report.html")
    assert "state unknown" in words and "gear ddp" in words and "1 damaged lines of metrics.jsonl" in words
    for name in ("run.json", "status.json", "resolved.yaml", "answers.jsonl"):
        (run / name).unlink()
    run_report.write(run)  # the folder of an earlier version
    (run / "metrics.jsonl").write_text("")
    run_report.write(run)  # of a run that has not taken a step
    assert "Curves" not in text_of(run / "report.html")


@pytest.mark.parametrize("outcome", [*run_report.WORDS])
def test_the_state_is_shown(tmp_path, outcome):
    run = make_run(tmp_path / "x", 5)
    run_report.write(run, STATUS | {"outcome": outcome, "text": "gearbox: the reason"})
    words = text_of(run / "report.html")
    assert words.split("recipes/tiny")[0].endswith(f"x {run_report.WORDS[outcome][0]} ") and "the reason" in words
    assert ("may have ended since" in words) == (outcome == "running")


def test_a_killed_run_is_not_shown_as_running(tmp_path):
    import socket

    run = make_run(tmp_path / "x", 5)
    status = STATUS | {"outcome": "running", "host": socket.gethostname(), "pid": os.getpid()}
    (run / "status.json").write_text(json.dumps(status))
    assert run_data.read(run).outcome == "running"
    unused = next(pid for pid in range(2**22 - 1, 1, -1) if not psutil.pid_exists(pid))
    (run / "status.json").write_text(json.dumps(status | {"pid": unused}))
    assert run_data.read(run).outcome == "crashed"
    (run / "status.json").write_text(json.dumps(status | {"pid": unused, "host": "another machine"}))
    assert run_data.read(run).outcome == "running", "only that machine knows"


def test_a_hundred_thousand_steps(tmp_path):
    """Measure the process's own time, so that other processes do not count."""
    run = make_run(tmp_path / "x", 999)
    lines = [line.partition(",")[2] for line in (run / "metrics.jsonl").read_text().splitlines() if "rows_hash" in line]
    steps = (f'{{"step": {step},{lines[step % 999]}' for step in range(1, 100_001))
    (run / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    before = time.process_time()
    run_report.write(run)
    assert time.process_time() - before < 10, "5 s on an idle machine, where it takes 3 s"
    assert (run / "report.html").stat().st_size < 2e6 and (run / "loss.png").stat().st_size < 2e5


@pytest.mark.cold
def test_the_script_needs_no_torch(tmp_path):
    run = make_run(tmp_path / "x", 5)
    code = f"import sys, report; report.main([{str(run)!r}]); print({{*sys.argv}} & {{*sys.modules}})"
    ended = subprocess.run(
        [sys.executable, "-c", code, *HEAVY], cwd=ROOT / "src", capture_output=True, text=True, check=False
    )
    assert ended.stdout == f"report: {run / 'report.html'}\nset()\n", ended.stderr


def test_several_runs_are_laid_over_each_other(tmp_path, capsys):
    runs = [make_run(tmp_path / name, 300, seed=seed) for seed, name in enumerate(("a/run", "b/run", "b/other"))]
    script.main([*map(str, runs)])
    output = tmp_path / "a" / "compare.html"
    assert capsys.readouterr().out == f"report: {output}\n"
    words = text_of(output)
    assert "a/run, b/run, b/other" in words and "optim.lr 0.001 0.002 0.003" in words and "optim.name" not in words
    assert output.read_text().count('data-x="token"') == 2
    script.main([*map(str, runs), "--output", str(tmp_path / "here.html")])
    assert (tmp_path / "here.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: python src/report.py RUN"),
        (["nowhere"], "nowhere: is not the folder of a run; give one that has metrics.jsonl"),
        (["."], ".: is not the folder of a run"),
    ],
)
def test_a_user_error_is_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        script.main(arguments)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_a_full_disk_is_an_error_of_the_script_alone(tmp_path, limit_of_file_size):
    run = make_run(tmp_path / "x", 50)
    limit_of_file_size(1000)
    with pytest.raises(UserError, match=r"report.html: cannot be written: File too large; give another place"):
        script.main([str(run)])
    assert not [*run.glob("*.tmp-*")]


def test_lines_are_thinned_but_peaks_stay():
    ys = [1.0] * 50_000
    ys[31_111] = 99.0
    points = charts.thinned(range(50_000), ys)
    assert len(points) <= 602 and (31_111, 99.0) in points and points[-1][0] == 49_999
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_a_line_with_gaps_is_interrupted():
    drawn = charts.draw(charts.Chart("t", [charts.Line("a", [1, 2, 3, 4], [1.0, float("nan"), 2.0, 3.0])]))
    (path,) = re.findall(r'data-name="a"[^>]* d="([^"]*)"', drawn)
    assert path.count("M") == 2 and path.count("L") == 1
    assert charts.draw(charts.Chart("t", [charts.Line("a", [1], [float("nan")])])) == ""


class FakeProcess:
    """A process that ends when the test says so."""

    code = None

    def poll(self):
        return self.code

    def kill(self):
        self.code = -9

    def wait(self):
        return self.code


def test_one_process_at_a_time_writes_the_report(tmp_path, monkeypatch):
    started, now = [], [1000.0]
    monkeypatch.setattr(report_process, "_start", lambda folder: started.append(FakeProcess()) or started[-1])
    monkeypatch.setattr(report_process.time, "monotonic", lambda: now[0])
    process = report_process.ReportProcess(tmp_path, is_first_rank=True)
    process.request()
    assert not started, "a short run writes its report at its end"
    now[0] += report_process.FIRST_SECONDS
    process.start_if_due()
    process.request()
    assert len(started) == 1, "the first is still writing"
    now[0] += 3
    started[0].code = 0
    process.start_if_due()
    assert len(started) == 1, "it took 3 s, so the next one waits for a minute"
    now[0] += 3 * report_process.REST
    process.start_if_due()
    assert len(started) == 2 and not process.is_due
    started[1].code = 0
    process.start_if_due()
    now[0] += report_process.REFRESH_SECONDS + 1
    process.start_if_due()
    assert len(started) == 3, "without evaluations and saves it is written again from time to time"
    process.close()
    assert started[2].code == -9
    other = report_process.ReportProcess(tmp_path, is_first_rank=False)
    now[0] += 1000
    other.request()
    assert len(started) == 3


@pytest.mark.cold
def test_the_process_writes_the_report(tmp_path):
    run = make_run(tmp_path / "x", 5)
    report_process.write(run)
    assert (run / "report.html").read_text().endswith("</html>\n") and (run / "loss.png").is_file()


def test_a_report_that_fails_does_not_stop_the_run(train, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a mistake in the page")

    monkeypatch.setattr(run_report, "write", fail)
    outcome = train("single")
    assert outcome.codes == [0], outcome.output
    assert "report.html not written: ZeroDivisionError: a mistake in the page" in outcome.output
    assert json.loads((outcome.folder / "status.json").read_text())["outcome"] == "done"


def test_a_failed_run_has_a_report(train):
    outcome = train("single", "optim.lr=1e30", "train.steps=40", "run.max_bad_steps=2", "optim.max_grad_norm=1e30")
    assert outcome.codes == [2], outcome.output
    words = text_of(outcome.folder / "report.html")
    assert "failed" in words and "not finite for 2 steps in a row" in words


def test_secrets_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklm")
    run = make_run(tmp_path / "x", 5, FACTS | {"command": "python src/train.py data.path=hf_abcdefghijklm"})
    run_report.write(run)
    assert "[HF_TOKEN]" in text_of(run / "report.html") and "hf_abc" not in (run / "report.html").read_text()
    run_facts.write(run, run_facts.RunFacts(command="hf_abcdefghijklm"))
    assert "hf_abc" not in (run / "run.json").read_text()


def test_the_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    page.write(tmp_path / "x.html", "t", ["<p>first</p>"])
    monkeypatch.setattr(page.filesystem, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError):
        page.write(tmp_path / "x.html", "t", ["<p>second</p>"])
    assert "first" in (tmp_path / "x.html").read_text() and [*tmp_path.iterdir()] == [tmp_path / "x.html"]
