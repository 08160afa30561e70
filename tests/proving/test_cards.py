"""The committed model cards match the gears, the methods, the planner and the index."""

import re

import pytest

from gearbox.config.gear import gear_names
from support import cards


@pytest.mark.parametrize("name", cards.FAMILIES)
def test_a_card_lists_every_gear_and_method(name):
    """Run `make cards` if a gear is new."""
    marks = cards.read_marks(name)
    assert {*marks} == {(gear, method) for gear in gear_names() for method in cards.METHODS}
    assert {*marks.values()} <= {"yes", "refused"}
    assert sum(marks[gear, "full"] == "yes" for gear in gear_names()) >= 10


@pytest.mark.parametrize("name", cards.FAMILIES)
def test_a_card_has_figures_of_every_gear_that_ran(name):
    text, marks = (cards.CARDS / f"{name}.md").read_text(), cards.read_marks(name)
    section = text.partition("## Full training under each gear")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert {row[0].strip("`") for row in rows} == {*gear_names()}
    for row in rows:
        has_run = marks[row[0].strip("`"), "full"] == "yes"
        assert has_run == all(re.search(r"\d|first|loads|bit for bit", cell) for cell in row[3:]), row
    assert "«" in text and f"`{cards.FAMILIES[name].rehearsed}`" in text


@pytest.mark.parametrize("name", cards.FAMILIES)
def test_the_sentences_of_a_card_agree_with_its_tables(name):
    """A card that was edited by hand, or only in part, fails."""
    text, marks = (cards.CARDS / f"{name}.md").read_text(), cards.read_marks(name)
    first, _, rest = text.partition("## Full training under each gear")
    rows = [line.strip("| ").split(" | ") for line in rest.splitlines() if line.startswith("| `")]
    ran = [row for row in rows if row[2] == "ran"]
    num_ran = sum(marks[gear, "full"] == "yes" for gear in gear_names())
    assert f"trained under {num_ran} gears" in first and len(ran) == num_ran
    exact = sum(row[5] == "bit for bit" for row in ran)
    assert f"{exact} of {num_ran} gears equal the uninterrupted run bit for bit" in rest
    loss, norm = (max((row[column] for row in ran[1:]), key=float) for column in (3, 4))
    assert f"- full: {loss} of the loss, {norm} of the gradient norm.\n" in first
    numbers = {row[0]: row[2] for row in rows if row[0].strip("`") in gear_names() and len(row) == 9}
    assert all(f"| {gear} | " in first for gear in numbers)
    for line in first.splitlines():
        if (cells := line.strip("| ").split(" | "))[0] in numbers:
            assert cells[2].replace("yes", "ran") == numbers[cells[0]], "both tables have the same notes"
    notes = re.findall(r"^(\d+)\. `", first, re.MULTILINE)
    assert notes == [str(1 + i) for i in range(len(notes))]
    assert {*re.findall(r"\[(\d+)\]", text)} == {*notes}


@pytest.mark.parametrize("name", cards.FAMILIES)
def test_the_predicted_memory_is_what_the_planner_computes(name):
    """Run `python tests/support/cards.py --memory` if the planner has changed."""
    assert cards.memory_of_card(name)[1] == cards.memory(cards.FAMILIES[name], cards.read_marks(name))


def test_the_index_counts_what_the_cards_say(monkeypatch, tmp_path):
    index = (cards.CARDS / "README.md").read_text()
    for path in cards.CARDS.glob("*.md"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(cards, "CARDS", tmp_path)
    cards.write_index()
    assert (tmp_path / "README.md").read_text() == index
    assert {path.stem for path in tmp_path.glob("*.md")} == {*cards.FAMILIES, "README"}
