"""Take the picture of a run's report with headless Chromium."""

import io
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from gearbox.pages import html_report
from pictures.records import Record

SIZE = (960, 3000)  # pixels; what is empty at the bottom is cut off
MARGIN = 24
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --font-render-hinting=none
""".split()
# The same letters on every machine that has the fonts of `make packages`.
FONTS = "<style>body { font-family: 'Liberation Sans'; } pre { font-family: 'Liberation Mono'; }</style>"
NUM_COLOURS = 128


def missing() -> str:
    """Return what is missing for a screenshot; an empty text if nothing is."""
    if not shutil.which("chromium"):
        return "chromium is not installed (make packages)"
    fonts = subprocess.run(["fc-list", ":", "family"], capture_output=True, text=True, check=False).stdout
    return "" if "Liberation Sans" in fonts else "the Liberation fonts are not installed (make packages)"


def write_report(record: Record, folder: Path) -> Path:
    """Write the report of the measured run, by the code that writes every report; return its path."""
    lines: dict[int, dict[str, float]] = {}
    for key, points in record["metrics"].items():
        for step, value in points:
            lines.setdefault(step, {"step": int(step)})[key] = value
    run = folder / Path(record["run"]).name
    run.mkdir()
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(lines[step]) for step in sorted(lines)) + "\n")
    html_report.write(run, record["facts"], record["documents"], record["samples"])
    return run / "report.html"


def take(record: Record) -> bytes:
    """Return the report as PNG."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report, picture = write_report(record, folder), folder / "report.png"
        report.write_text(report.read_text(encoding="utf-8") + FONTS, encoding="utf-8")
        where = [
            f"--user-data-dir={folder / 'profile'}",
            f"--screenshot={picture}",
            f"--window-size={SIZE[0]},{SIZE[1]}",
        ]
        command = ["chromium", *FLAGS, *where, report.as_uri()]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if not picture.is_file():
            raise RuntimeError(f"chromium took no picture:\n{ended.stderr[-2000:]}")
        image = Image.open(picture).convert("RGB")
        *_, bottom = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
        image = image.crop((0, 0, image.width, min(image.height, bottom + MARGIN)))
        image = image.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        written = io.BytesIO()
        image.save(written, format="PNG", optimize=True)
        return written.getvalue()
