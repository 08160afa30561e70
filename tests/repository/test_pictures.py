"""Draw every picture again from docs/pictures/measured.json, and README's table of proofs from the generated docs."""

import io
import re
import subprocess
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import parity
from gearbox import ROOT
from gearbox.launch import supervisor
from pictures import drawings, measure, proof, records, screenshot
from support.ranks import skip_loading_back, supervise_warm
from support.repository import GUIDES

RECORDS = records.read()
PINNED = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def drawn():
    if version("matplotlib") != PINNED:
        pytest.skip(f"matplotlib {version('matplotlib')} draws other bytes than the pinned {PINNED}")
    return drawings.draw(RECORDS)


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_picture_is_drawn_from_the_figures(drawn, name):
    assert drawn[name] == (records.FOLDER / name).read_bytes(), "run: python benchmarks/pictures draw"


@pytest.mark.root
def test_the_screenshot_shows_the_report():
    if reason := screenshot.missing():
        pytest.skip(reason)
    committed = (records.FOLDER / "report.png").read_bytes()
    assert len(committed) <= 200_000
    # Blocks of pixels: a word that changed shows, the edges of letters under another Chromium do not.
    images = [
        Image.open(io.BytesIO(png)).convert("L").reduce(8) for png in (screenshot.take(RECORDS["report"]), committed)
    ]
    ours, theirs = (np.asarray(image, float) for image in images)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 20, "run: python benchmarks/pictures draw"


def test_the_table_of_proofs_is_current():
    assert proof.with_table(README) == README, "run: python benchmarks/pictures table"


def test_a_readme_without_the_markers_is_an_error():
    for text in ("", proof.BEGIN + "\n", proof.END):
        with pytest.raises(ValueError, match=r"README\.md: the lines .* are missing"):
            proof.with_table(text)


def test_a_failed_fault_is_reported():
    rows = "| Kill all ranks | 3 | restart | passed (9 s) |\n| Damage every file | 7 | named | passed (1 s) |\n"
    soak = "| Inject 5 random faults | 5 | same weights | passed (9 s) |\n\nRandom faults: 2 x kill rank, 3 x term.\n"
    assert proof.faults(rows + soak)[2] == "8 faults in runs, 5 of them kills, and 7 damaged checkpoints: all passed"
    failed = "| Fill a disk | 1 | continues | **failed**: exit code 1 (5 s) |\n"
    counted = "4 faults in runs, 3 of them kills, and 7 damaged checkpoints: failed: Fill a disk"
    assert proof.faults(rows + failed)[2] == counted


def test_every_picture_is_shown_and_exists():
    shown = set()
    for guide in GUIDES:
        for link in re.findall(r'!\[[^\]]*\]\(([^)\s]+)|<img [^>]*src="([^"]+)"', guide.read_text()):
            path = (guide.parent / "".join(link)).resolve()
            assert path.is_file(), f"{guide.name}: {path} does not exist"
            shown.add(path)
    pictures = {path for path in records.FOLDER.iterdir() if path != records.FILE}
    assert pictures >= {records.FOLDER / name for name in [*drawings.DRAWINGS, "report.png"]}
    assert pictures - shown == set(), "README or docs show each picture"


def test_the_packed_row_is_measured_as_recorded(tmp_path, monkeypatch):
    """Compare the row, its colours and its mask: they do not depend on the machine."""
    measured = measure.packing(tmp_path, monkeypatch)
    assert {**measured, "influence": [list(one) for one in measured["influence"]]} == {
        key: value for key, value in RECORDS["packing"].items() if key != "made"
    }
    documents = measured["documents"]
    assert measured["influence"] == [(documents.index(one), place) for place, one in enumerate(documents)]


@pytest.mark.ranks
def test_bytes_are_measured_as_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "MEMORY_GEARS", ("single", "zero1"))
    measured = measure.memory(tmp_path, monkeypatch)
    assert measured["num_weights"] == RECORDS["memory"]["num_weights"]
    for gear, by_rank in measured["gears"].items():
        assert by_rank == RECORDS["memory"]["gears"][gear]


@pytest.mark.ranks
def test_parity_is_measured(tmp_path, monkeypatch, capsys):
    """Run src/parity.py in this process and its gears on forked ranks: three fresh processes take half a minute."""

    def run(command: list[str], **_) -> subprocess.CompletedProcess:
        assert Path(command[1]).resolve() == Path(parity.__file__)
        return subprocess.CompletedProcess(command, parity.main(command[2:]), *capsys.readouterr())

    skip_loading_back(monkeypatch)
    monkeypatch.setattr(measure, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(supervisor, "supervise", partial(supervise_warm, tmp_path))
    monkeypatch.setattr(measure, "PARITY_GEARS", ("single:1", "ddp:2"))
    measured = measure.parity(tmp_path, monkeypatch, num_steps=2)
    assert [*measured["losses"]] == ["single", "ddp"] and "--gears single:1,ddp:2" in measured["command"]
    assert len(measured["nudged"]) == 2
    for losses in (*measured["losses"].values(), measured["nudged"]):
        assert records.largest_difference(losses, measured["losses"]["single"]) < measured["tolerance"]
