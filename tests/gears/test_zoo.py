"""`make cells`: rehearse some families of docs/models.md each day, and compare them with the table."""

from datetime import UTC, datetime

import pytest

from gearbox.rows import batches
from support import zoo

pytestmark = [pytest.mark.long, pytest.mark.cells, pytest.mark.ranks]
NUM_ROTATING = 7  # per day, of about 190
FIRST = datetime.now(UTC).toordinal() * NUM_ROTATING
ROTATING = [[*zoo.CLASSES][i % len(zoo.CLASSES)] for i in range(FIRST, FIRST + NUM_ROTATING)]


@pytest.fixture
def keeper(monkeypatch, tmp_path):
    zoo.prepare(monkeypatch)
    return zoo.Zoo(tmp_path)


def test_the_table_has_every_family():
    table = zoo.read_table()
    assert [*table] == [*zoo.CLASSES]
    assert {mark for marks in table.values() for mark in marks.values()} == {"yes", "refused"}
    for column in ("single", "ddp", "fsdp", "zero3"):
        assert sum(marks[column] == "yes" for marks in table.values()) >= 0.95 * len(table)


@pytest.mark.parametrize("family", ROTATING)
def test_a_family_matches_the_table(keeper, family):
    """Fix what broke if this fails, or rebuild the table (make zoo)."""
    results = keeper.family(family)
    assert zoo.marks(results) == zoo.read_table()[family], results


def test_a_broken_family_is_noticed(monkeypatch, keeper):
    """Train the rows of rank 0 on every rank, and then no rows."""
    usual = batches.make_step_batch
    for broken, expected in (
        (lambda rows, ids, rank, plan: usual(rows, ids, 0, plan), "differs"),
        (lambda *_: None, "fails"),
    ):
        monkeypatch.setattr(batches, "make_step_batch", broken)
        results = {column: keeper.rehearse("llama", column) for column in ("single", "ddp")}
        assert zoo.marks(results)["ddp"] == expected
