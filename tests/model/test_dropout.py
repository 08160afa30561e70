"""Guards that a model's own dropout is off unless the recipe keeps it, and that the saved config still has it."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, GPT2Config

from gearbox import ROOT
from gearbox.checkpoint.manifest import render_manifest
from gearbox.config.loader import load_recipe
from gearbox.model import dropout, loading, random_init

RATES = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Return the folder of a small GPT-2 with the dropout of its default config."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=32, n_layer=2, n_head=2, pad_token_id=0, eos_token_id=3
    )
    random_init.write_random(config, tokenizer, 0, folder)
    return folder


def test_rates_of_sub_configs_are_found_and_restored():
    config = transformers.Gemma3Config(text_config={"attention_dropout": 0.2}, vision_config={"attention_dropout": 0.3})
    found = dropout.switch_off(config)
    assert found == {"text_config.attention_dropout": 0.2, "vision_config.attention_dropout": 0.3}
    assert dropout.rates(config) == {} and config.text_config.attention_dropout == 0
    dropout.set_rates(config, found)
    assert dropout.rates(config) == found
    assert dropout.listed(found).startswith("text_config.attention_dropout 0.2, ")


@pytest.mark.parametrize("keeps", [False, True])
def test_a_loaded_model_draws_random_numbers_only_if_the_recipe_keeps_dropout(gpt2, keeps):
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", [f"model.name={gpt2}", f"model.dropout={keeps}"])
    model = loading.load(str(gpt2), recipe, AutoTokenizer.from_pretrained(gpt2), "no").train()
    tokens = torch.arange(8)[None]
    first, second = (model(input_ids=tokens).logits for _ in range(2))
    assert torch.equal(first, second) != keeps
    assert model.own_dropout == ({} if keeps else RATES)


def test_gears_agree_on_a_model_with_dropout(train, gpt2):
    given = ("run.rehearse=false", "model.init=pretrained", f"model.name={gpt2}", "optim.lr=5e-3")
    runs = [train(gear, *given, ranks=ranks) for gear, ranks in (("single", 1), ("ddp", 2), ("fsdp", 2), ("zero3", 3))]
    for run in runs:
        assert set(run.codes) == {0}, run.output
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)
        assert "off, where config.json has resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1" in run.output
    saved = AutoConfig.from_pretrained(runs[1].folder / "model")
    assert dropout.rates(saved) == RATES, "the saved model keeps its own dropout"
    kept = train("single", *given, "model.dropout=true", "run.name=kept")
    assert "off, where config.json" not in kept.output
    assert kept.losses != pytest.approx(runs[0].losses, rel=1e-4)


def test_a_checkpoint_trained_with_dropout_by_an_earlier_version_needs_the_key(train, gpt2):

    given = ("run.rehearse=false", "model.init=pretrained", f"model.name={gpt2}", "run.name=x", "save.every=1")
    first = train("single", *given)
    for path in first.folder.glob("checkpoints/*/manifest.json"):
        content = json.loads(path.read_text())["manifest"]
        del content["recipe"]["model"]["dropout"]
        path.write_text(render_manifest(content))
    more = (*given, "run.resume=latest", "train.steps=4")
    refused = train("single", *more)
    assert refused.codes == [2]
    assert "was trained with the dropout of config.json (resid_pdrop 0.1, " in refused.output
    kept = train("single", *more, "model.dropout=true")
    assert kept.codes == [0], kept.output
