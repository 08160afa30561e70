"""Compare the closed form's numbers of weights with the models that transformers builds, and with published ones."""

import json

import pytest
import torch
import transformers

from gearbox.config.recipe import Model
from gearbox.errors import UserError
from gearbox.planning.architecture import ARCHITECTURES, FAMILIES, Architecture, model_of_size, read_config

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "vocab_size": 500,
    "pad_token_id": 0,
}  # fmt: skip
VARIANTS = {
    "own defaults": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True, "head_dim": 24},
    "untied": {"tie_word_embeddings": False, "head_dim": 24},
    "six experts": {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2},
    "biases": {"num_key_value_heads": 2, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
}
# As the pages of these models state them.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "allenai/OLMo-2-1124-7B-Instruct": 7_298_617_344,
    "google/gemma-3-1b-it": 999_885_952,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "microsoft/phi-4": 14_659_507_200,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
}
LLAMA = read_config(Model(name="meta-llama/Llama-3.1-8B-Instruct"))
MIXTURE = read_config(Model(name="Qwen/Qwen3-30B-A3B"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_those_that_transformers_builds(family, variant):
    changes = dict(VARIANTS[variant])
    if family == "olmoe":  # its norms follow the width, whatever the size of a head
        del changes["head_dim"]
    config = transformers.AutoConfig.for_model(family, **SMALL | changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    for content in (config.to_dict(), config.to_diff_dict() | {"model_type": family}):  # with and without defaults
        assert Architecture.of(content).num_weights == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_of_known_models(name):
    assert Architecture.of(read_config(Model(name=name))).num_weights == PUBLISHED[name]


def test_every_shipped_architecture_has_a_closed_form():
    paths = [*ARCHITECTURES.glob("*.json")]
    assert len(paths) > 15
    for path in paths:
        assert Architecture.of(json.loads(path.read_text())).num_weights > 10**8


def test_a_composite_model_is_planned_by_its_text():
    text = read_config(Model(name="google/gemma-3-1b-it"))
    assert Architecture.of({"model_type": "gemma3", "text_config": text}) == Architecture.of(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "qwen9"}, "the family 'qwen9' has no closed form; run src/plan.py with --simulate"),
        ({"model_type": "a\nb"}, r"the family 'a\nb' has no closed form"),
        ({}, "config.json has no model_type"),
        ({"model_type": ["llama"]}, "config.json has no model_type"),
        ({"model_type": "llama"}, "config.json has no 'hidden_size'"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size is '4096', not a positive whole number"),
        ({"model_type": "llama", "hidden_size": -1}, "hidden_size is -1"),
        ({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 0}, "num_attention_heads is 0"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, above 1,000"),
        (LLAMA | {"intermediate_size": [1] * 999}, "intermediate_size is [1, 1, 1, 1, 1, 1, ...], not a positive"),
        (MIXTURE | {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, above 128"),
        (MIXTURE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (MIXTURE | {"mlp_only_layers": 5}, "mlp_only_layers is 5, not a list"),
    ],
)
def test_a_wrong_config_is_one_line(content, message):
    with pytest.raises(UserError, match=r"^model\.name: ") as caught:
        Architecture.of(content)
    assert message in str(caught.value)


def test_a_size_names_a_known_model():
    assert model_of_size("70B") == "meta-llama/Llama-3.3-70B-Instruct"
    assert model_of_size("135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for wrong in ("5T", "0B", "big", "", "-7B"):
        with pytest.raises(UserError, match="--params"):
            model_of_size(wrong)


def test_the_config_is_read_from_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--mine"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc\n")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(Model(name="me/mine")) == {"model_type": "llama"}
    assert read_config(Model(name="me/other")) is None
    for text, message in (("[]", "must be a mapping"), ("[" * 10**5, "is not JSON"), ("{", "is not JSON")):
        (folder / "snapshots" / "abc" / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(Model(name="me/mine"))
