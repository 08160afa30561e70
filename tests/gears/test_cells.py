"""`make cells`: test the committed table of gears and methods, namely its diagonal and a daily sample of the rest."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gearbox.config.gear import gear_names
from support import matrix
from support.gears import why_no_disk_operations
from support.ranks import skip_loading_back

pytestmark = [pytest.mark.long, pytest.mark.cells, pytest.mark.ranks]
GEARS, METHODS = gear_names(), list(matrix.COLUMNS)
DIAGONAL = [(gear, METHODS[i % len(METHODS)]) for i, gear in enumerate(GEARS)]
REST = [(gear, method) for gear in GEARS for method in METHODS if (gear, method) not in DIAGONAL]
NUM_ROTATING = 4  # per day, of about 140
FIRST = datetime.now(UTC).toordinal() * NUM_ROTATING
ROTATING = [REST[i % len(REST)] for i in range(FIRST, FIRST + NUM_ROTATING)]


def test_the_table_has_every_cell():
    table = matrix.read_table()
    assert {*table} == {*DIAGONAL, *REST}
    assert {*table.values()} == {"yes", "refused"}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    return matrix.Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(("gear", "method"), [*DIAGONAL, *ROTATING])
def test_a_cell_matches_the_table(running, monkeypatch, gear, method):
    """Fix what broke if this fails, or rebuild the table (make matrix)."""
    if gear == "zero3_nvme" and (reason := why_no_disk_operations()):
        pytest.skip(reason)
    skip_loading_back(monkeypatch)
    cell = running.cell(gear, method)
    assert cell.mark == matrix.read_table()[gear, method], cell.why


def test_a_broken_cell_is_noticed(monkeypatch, tmp_path):
    """Break each stage of a cell in turn."""
    from gearbox.checkpoint import folders
    from gearbox.sharding import sharded_state

    skip_loading_back(monkeypatch)
    running = matrix.Matrix(tmp_path)
    running.reference("full")
    wrong = [
        (sharded_state, "_make_state", lambda *_: None, ("train", "save")),
        (folders, "commit", lambda *_: None, ("train",)),
    ]
    for owner, name, broken, passed in wrong:
        with monkeypatch.context() as here:
            here.setattr(owner, name, broken)
            here.setattr(running, "folder", Path(tmp_path / name))
            assert running.cell("ddp", "full").passed == passed
