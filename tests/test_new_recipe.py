"""Write recipes for models that no file names, and train each under two gears without an edit."""

import pytest
from transformers import CONFIG_MAPPING, AutoTokenizer

import new_recipe
from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.model import random_init
from support.ranks import run_ranks, skip_loading_back

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
FAMILIES = "apertus cwm diffllama ernie4_5 gpt_neox helium jais2 minicpm3 persimmon phimoe".split()
SMALL = "batch.rows=4 batch.row_tokens=64 train.steps=2 eval.samples=0 save.every=0".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a function that writes a small random model of a family."""

    def make(family: str, tokenizer=TOKENIZER):
        folder = tmp_path_factory.mktemp("models") / family
        config = random_init.shrink_config(CONFIG_MAPPING[family](), tokenizer)
        random_init.write_random(config, tokenizer, 0, folder)
        return folder

    return make


@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_no_file_names_trains_without_an_edit(family, model, chats, tmp_path, monkeypatch):
    skip_loading_back(monkeypatch)
    recipe = tmp_path / "mine.yaml"
    arguments = ["--gpus", "2x24GB", "--data", str(chats), "--output", str(recipe)]
    new_recipe.main([str(model(family)), *arguments])
    assert load_recipe(recipe).data.path == str(chats)
    losses = []
    for gear in ("fsdp", "zero3"):
        outcome = run_ranks(gear, [str(recipe), f"run.dir={tmp_path}", f"run.name={gear}", *SMALL], tmp_path, 2)
        assert set(outcome.codes) == {0}, outcome.output
        losses.append(outcome.losses)
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)
