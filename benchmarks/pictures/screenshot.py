"""Take the picture of a run's report with headless Chromium."""

import io
import json
import tempfile
from pathlib import Path

import yaml
from PIL import Image

from gearbox.pages import run_report
from pictures.records import Record
from support import browser
from support.browser import missing  # noqa: F401  for the callers of `take`

WIDTH, HEIGHT = 1120, 2300  # pixels; the page continues below
NUM_COLOURS = 128


def write_report(record: Record, folder: Path) -> Path:
    """Write the report of the measured run, by the code that writes every report; return its path."""
    lines: dict[int, dict[str, float]] = {}
    for key, points in record["metrics"].items():
        for step, value in points:
            lines.setdefault(step, {"step": int(step)})[key] = value
    run = folder / record["run"]
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(lines[step]) for step in sorted(lines)) + "\n")
    (run / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in record["answers"]))
    (run / "run.json").write_text(json.dumps(record["facts"]))
    (run / "resolved.yaml").write_text(yaml.safe_dump(record["settings"], sort_keys=False))
    (run / "model").mkdir()
    run_report.write(run, record["status"])
    page = run / "report.html"
    page.write_text(page.read_text().replace(str(run), record["run"]))  # the path that a user has
    return page


def take(record: Record) -> bytes:
    """Return the upper part of the report as PNG."""
    with tempfile.TemporaryDirectory() as name, browser.opened() as page:
        page.open(write_report(record, Path(name)), WIDTH)
        page.style(browser.FONTS)
        image = Image.open(io.BytesIO(page.picture(HEIGHT))).convert("RGB")
    image = image.quantize(NUM_COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    written = io.BytesIO()
    image.save(written, format="PNG", optimize=True)
    return written.getvalue()
