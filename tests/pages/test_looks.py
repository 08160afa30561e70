"""Look at the pages in headless Chromium: at two widths and in both colour schemes, texts fit and can be read."""

import pytest

from gearbox.pages import overlay, run_comparison, run_data, run_report
from support import browser
from support.run_folders import HOSTILE, hostile_facts, make_pair_run, make_run

pytestmark = pytest.mark.root
WIDTHS = (1280, 390)
LEAST_FOR_TEXT, LEAST_FOR_LINES = 4.5, 3.0  # contrast ratios of WCAG 2, level AA


@pytest.fixture(scope="module")
def page():
    if reason := browser.missing():
        pytest.skip(reason)
    with browser.opened() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write a report, one with hostile texts, a comparison and a page of parity."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / name, 300, seed=seed) for seed, name in enumerate(("first", "second"))]
    runs.append(make_run(folder / "hostile", 40, hostile_facts()))
    runs.append(make_pair_run(folder / "pairs"))
    for run in runs:
        run_report.write(run)
    overlay.write(folder / "compare.html", [run_data.read(run) for run in runs])
    compared = [run_comparison.Compared(run.name, run) for run in runs[:2]]
    compared[1].differences = [
        run_comparison.Difference(step, True, dict.fromkeys(run_comparison.QUANTITIES, 1e-7 * step), {}, False)
        for step in range(1, 9)
    ]
    compared.append(run_comparison.Compared("third", folder, "did not start"))
    tolerances = run_comparison.TOLERANCES["no"]
    run_comparison.write(folder / "parity.html", "recipes/tiny.yaml, 8 steps", compared, tolerances)
    return {
        "report": runs[0] / "report.html", "hostile": runs[2] / "report.html", "compare": folder / "compare.html",
        "pairs": runs[3] / "report.html", "parity": folder / "parity.html",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["report", "hostile", "pairs", "compare", "parity"])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_texts_fit_and_can_be_read(page, pages, name, width, dark):
    page.open(pages[name], width, dark)
    found = page.measure()
    assert found["room"] == width and found["width"] <= width, "the page scrolls sideways"
    assert len(found["texts"]) > 40 and len(found["strokes"]) > 5
    texts = [one for one in found["texts"] if one["contrast"] < LEAST_FOR_TEXT or one["size"] < 11]
    assert texts == []
    assert [one for one in found["strokes"] if one["contrast"] < LEAST_FOR_LINES] == []
    outside = [
        one for one in found["texts"] if not one["scrolls"] and not -1 <= one["left"] <= one["right"] <= width + 1
    ]
    assert outside == []
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 19, 26)"
    assert is_dark == dark


def test_hostile_texts_do_not_run_and_nothing_is_loaded(page, pages):
    page.open(pages["hostile"])
    assert page.evaluate("document.title").startswith("hostile: ")
    assert HOSTILE in page.evaluate("document.body.innerText")
    requests = [
        event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if not url.startswith(("file://", "data:"))] == []
    assert [url for url in requests if url.startswith("file://")] == [pages["hostile"].as_uri()]
    assert not [event for event in page.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]


def test_values_are_shown_under_the_pointer(page, pages):
    page.open(pages["report"])
    place = page.evaluate("""(() => { const box = document.querySelector(".plot > svg").getBoundingClientRect();
      document.querySelector(".plot > svg").scrollIntoView({block: "center"});
      const now = document.querySelector(".plot > svg").getBoundingClientRect();
      return [now.left + now.width / 2, now.top + now.height / 2].join(); })()""")
    x, y = map(float, place.split(","))
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown = page.evaluate("document.querySelector('.plot .readout:not([hidden])').innerText").splitlines()
    assert shown[0].startswith("step 1") and "held-out loss 1.16 (step 100)" in shown, shown
