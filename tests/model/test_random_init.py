"""Test random weights and the small copy of an architecture for a rehearsal."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.model import random_init


def test_a_rehearsal_has_few_experts():
    config = transformers.Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    made = transformers.Qwen3MoeForCausalLM(random_init.shrink_config(config, TOKENIZER))
    assert sum(p.numel() for p in made.parameters()) < 1e6
    assert made.model.layers[0].mlp.experts.down_proj.shape == (4, 64, 64)


@pytest.mark.parametrize(
    ("family", "layers"),
    {
        "bamba": 2,
        "deepseek_v3": 2,  # a dense layer, a layer of experts
        "dots3_note_text": 3,  # its kinds differ in their sizes
        "falcon_h1": 2,
        "gemma3": 2,  # nested configs
        "gemma3n_text": 6,  # each kind with and without keys of its own, and with and without sparsity
        "gpt_neo": 2,
        "hrm_text": 16,  # passes through two stacks of two layers
        "jamba": 2,
        "lfm2": 2,
        "llama4_text": 2,
        "mamba2": 2,
        "mllama": 2,
        "qwen3_next": 2,
        "recurrent_gemma": 3,
        "xlstm": 2,
        "zamba": 3,  # two hybrid layers that share their weights
    }.items(),
)
def test_a_rehearsal_of_any_family_has_a_narrow_layer_of_each_kind(family, layers):
    config = transformers.CONFIG_MAPPING[family]()
    narrow = random_init.shrink_config(config, TOKENIZER)
    text = narrow.get_text_config()
    assert (text.num_hidden_layers, text.vocab_size, text.eos_token_id) == (layers, 260, TOKENIZER.eos_token_id)
    assert {*(getattr(text, "layer_types", None) or [])} == {*(getattr(config.get_text_config(), "layer_types", []))}
    made = transformers.AutoModelForCausalLM.from_config(narrow)
    assert sum(p.numel() for p in made.parameters()) < 1e6
    assert made(torch.arange(20)[None], use_cache=False).logits.shape == (1, 20, 260)


def test_rotary_factors_fit_the_narrow_heads():
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = transformers.Phi3Config(rope_parameters=scaling | {"original_max_position_embeddings": 4096})
    narrow = random_init.shrink_config(config, TOKENIZER)
    assert transformers.Phi3ForCausalLM(narrow)(torch.arange(20)[None]).logits.shape == (1, 20, 260)
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}
    narrow = random_init.shrink_config(transformers.Qwen3Config(head_dim=128, rope_parameters=sections), TOKENIZER)
    assert narrow.rope_parameters["mrope_section"] == [4, 2, 2]


def test_a_family_that_its_config_cannot_build_is_refused():
    narrow = random_init.shrink_config(transformers.Dots1Config(), TOKENIZER)  # without the number of its experts
    with pytest.raises(UserError, match=r"^model.name: dots1 cannot be built: empty\(\).*$"):
        random_init.build(narrow)


def test_a_family_that_cannot_be_shrunk_is_refused(monkeypatch):
    monkeypatch.setattr(random_init, "shrink", lambda sizes, *_: sizes | {"num_attention_heads": 3})
    with pytest.raises(UserError, match=r"^model.name: llama cannot be shrunk: .*not a multiple of .*heads"):
        random_init.shrink_config(transformers.LlamaConfig(), TOKENIZER)


@pytest.mark.parametrize(("heads", "keys", "narrow"), [(3, 3, (2, 2)), (3, 1, (2, 1)), (9, 3, (4, 2))])
def test_a_narrow_model_has_heads_that_divide_its_width(heads, keys, narrow):
    config = transformers.LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=keys)
    small = random_init.shrink_config(config, TOKENIZER)
    assert (small.num_attention_heads, small.num_key_value_heads) == narrow


def test_a_rehearsal_of_a_quantized_model_is_not_quantized():
    config = transformers.GptOssConfig(quantization_config={"quant_method": "mxfp4"})
    assert not hasattr(random_init.shrink_config(config, TOKENIZER), "quantization_config")


TOKENIZER = transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
CONFIGS = sorted((ROOT / "recipes/architectures").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_narrowed_is_the_same_architecture(path):
    whole = transformers.AutoConfig.from_pretrained(path)
    narrow = random_init.shrink_config(transformers.AutoConfig.from_pretrained(path), TOKENIZER)
    assert type(narrow) is type(whole)
    assert (narrow.num_hidden_layers, narrow.vocab_size, narrow.eos_token_id) == (2, 260, TOKENIZER.eos_token_id)
    assert narrow.tie_word_embeddings == whole.tie_word_embeddings
    grouped = whole.num_attention_heads > whole.num_key_value_heads
    assert (narrow.num_attention_heads > narrow.num_key_value_heads) == grouped


def test_random_weights_are_the_same_in_bf16(tmp_path):
    config = random_init.shrink_config(transformers.AutoConfig.from_pretrained(ROOT / "recipes/tiny"), TOKENIZER)
    random_init.write_random(config, TOKENIZER, 0, tmp_path / "base")
    made = load_file(tmp_path / "base" / "model.safetensors")
    assert len(made) > 10
    assert all(tensor.dtype == torch.float32 for tensor in made.values())
    assert all(tensor.equal(tensor.bfloat16().float()) for tensor in made.values())
