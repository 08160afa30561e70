"""The closed form and the simulated step agree on every recipe under every gear that can be simulated."""

import json

import pytest

from support import simulations

PEAKS = json.loads(simulations.FILE.read_text())
RATIOS = simulations.ratios()


def test_every_recipe_and_gear_is_in_the_file():
    """Run `make simulate` if a recipe is new."""
    assert {*PEAKS} == {f"{recipe} {gear}" for recipe in simulations.RECIPES for gear in simulations.GEARS}
    recipes = {path.stem for path in (simulations.ROOT / "recipes").glob("*.yaml")}
    assert {*simulations.RECIPES} == recipes
    assert {name for name, row in PEAKS.items() if "refused" in row} == {
        f"{name} tp" for name in ("qlora_1gpu", "dpo_1gpu", "smollm2_135m")
    }


@pytest.mark.parametrize("name", RATIOS)
def test_both_agree_within_5_percent(name):
    assert 0.95 < RATIOS[name] < 1.05


def test_the_page_has_the_ratios():
    """Run `make simulate` if the closed form has changed."""
    assert simulations.table() in simulations.PAGE.read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("gear", ["ddp", "hsdp", "ring"])
def test_a_new_simulation_has_the_peak_of_the_file(gear):
    """Delete the file and run `make simulate` if an engine or a kernel has changed."""
    job = simulations.work_of("tiny", gear)
    found = simulations.simulated(job, simulations.config_of(job))
    assert found["peak_bytes"] == pytest.approx(PEAKS[f"tiny {gear}"]["peak_bytes"], rel=0.01)
