"""Test report.html: it draws every curve and escapes text."""

import html
import re

from gearbox.pages import html_report


def test_the_report_of_a_run(train, tmp_path):
    outcome = train("ddp", "train.steps=6", "eval.every=2", "eval.fraction=0.2", "eval.samples=2", ranks=2)
    assert set(outcome.codes) == {0}, outcome.output
    page = (outcome.folder / "report.html").read_text()
    of_experts = "load imbalance of the experts"  # this model is not a mixture
    assert [title for title in html_report.CURVES if title not in page] == [of_experts]
    drawn = re.findall(r'<polyline points="([^"]*)"', page)
    assert [len(points.split()) for points in drawn] == [6, 4, 4, 6, 6, 6, 6, 6], "six steps, four evaluations"
    heights = [float(point.split(",")[1]) for point in drawn[0].split()]
    losses = outcome.losses
    assert sorted(range(6), key=lambda i: -heights[i]) == sorted(range(6), key=lambda i: losses[i]), (
        "a lower loss is drawn lower"
    )
    trained = [html.unescape(text) for text in re.findall(r"<b>(.*?)</b>", page)]
    assert trained and all(text.endswith("<|end|>") for text in trained)
    assert page.count("<td>expected</td>") == 2 and "documents</td>" in page
    assert "http" not in page and "<script" not in page


def test_a_report_shows_text_as_text(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 1.0}\n{"step": 1, "loss": 1e400, "lr": 0.1}\n')
    html_report.write(tmp_path, {"data": "<a&b>"}, [("f:1", [("<|user|>", False), ("<b>", True)])], [])
    page = (tmp_path / "report.html").read_text()
    assert "&lt;a&amp;b&gt;" in page and "<b>&lt;b&gt;</b>" in page and "Answers" not in page
