"""Test random weights and the small copy of an architecture for a rehearsal."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gearbox import ROOT
from gearbox.model import random_init


def test_a_rehearsal_has_few_experts():
    config = transformers.Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    made = transformers.Qwen3MoeForCausalLM(random_init.shrink_config(config, TOKENIZER))
    assert sum(p.numel() for p in made.parameters()) < 1e6
    assert made.model.layers[0].mlp.experts.down_proj.shape == (4, 64, 64)


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
