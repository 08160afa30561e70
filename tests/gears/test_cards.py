"""`make cells`: prove one family under some gears each day, and compare the result with its card."""

from datetime import UTC, datetime

import pytest

from gearbox.config.gear import gear_names
from support import cards

pytestmark = [pytest.mark.long, pytest.mark.cells, pytest.mark.ranks]
DAY = datetime.now(UTC).toordinal()
FAMILY = [*cards.FAMILIES][DAY % len(cards.FAMILIES)]
METHOD = [*cards.METHODS][DAY // len(cards.FAMILIES) % len(cards.METHODS)]
OTHERS = [name for name in gear_names() if name != "single"]
GEARS = ["single", *(OTHERS[(DAY + i) % len(OTHERS)] for i in range(3))]


def test_a_card_matches_what_runs(monkeypatch, tmp_path):
    """Fix what broke if this fails, or rebuild the cards (make cards)."""
    family = cards.FAMILIES[FAMILY]
    if family.template and not cards.template_of(family).copy.is_file():
        pytest.skip("the family's chat template is not here: python tests/support/template_files.py")
    if not family.template and not (cards.ROOT / family.rehearsed).is_dir():
        pytest.skip("the family's model is not here: make smollm2")
    monkeypatch.setattr(cards, "WORK", tmp_path)
    proof, marks = cards.prove(FAMILY, METHOD, GEARS), cards.read_marks(FAMILY)
    for gear in GEARS:
        assert cards.word_of(cards.result_of(proof, gear)) == marks[gear, METHOD], [one.problems for one in proof.gears]
