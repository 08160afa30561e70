"""Guards that rows fit the positions of a model, and that a model without a table has no such limit."""

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.model import probes, random_init

SMALL = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
CONFIGS = {
    "gpt2": transformers.GPT2Config(**SMALL, n_positions=24, n_embd=32, n_layer=1, n_head=2),
    "gptj": transformers.GPTJConfig(**SMALL, n_positions=24, n_embd=32, n_layer=1, n_head=2, rotary_dim=8),
    "ctrl": transformers.CTRLConfig(**SMALL, n_positions=24, n_embd=32, n_layer=1, n_head=2, dff=32),
    "gpt_neo": transformers.GPTNeoConfig(
        **SMALL,
        max_position_embeddings=24,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        attention_types=[[["global"], 1]],
    ),
    "opt": transformers.OPTConfig(**SMALL, **WIDE, max_position_embeddings=24, ffn_dim=32, word_embed_proj_dim=32),
    "biogpt": transformers.BioGptConfig(**SMALL, **WIDE, max_position_embeddings=24, intermediate_size=32),
    "xglm": transformers.XGLMConfig(
        **SMALL, max_position_embeddings=24, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2
    ),
    "bloom": transformers.BloomConfig(**SMALL, hidden_size=32, n_layer=1, n_head=2),
    "llama": transformers.LlamaConfig(**SMALL, **WIDE, max_position_embeddings=24, intermediate_size=32),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_limit_is_where_the_model_fails(name):
    config = CONFIGS[name]
    limit = probes.num_positions(config)
    assert limit == (None if name in ("xglm", "bloom", "llama") else 24)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()

    def run(length: int):
        model(input_ids=torch.ones(1, length, dtype=torch.long))

    run(24)
    if limit is None:
        run(25)
    else:
        with pytest.raises((IndexError, RuntimeError)):
            run(25)


def test_longer_rows_are_refused_by_a_table_and_only_hinted_at_by_rotary_models():
    with pytest.raises(UserError) as refused:
        probes.check_row_tokens(CONFIGS["gpt2"], 32, 24)
    assert str(refused.value) == (
        "batch.row_tokens: rows of 32 tokens, but gpt2 has 24 positions (n_positions in its config.json); "
        "use 24 or less"
    )
    assert probes.check_row_tokens(CONFIGS["gpt2"], 24, 24) is None
    assert probes.check_row_tokens(CONFIGS["bloom"], 10**6, None) is None
    assert "longer than the 24 positions that llama was trained" in probes.check_row_tokens(CONFIGS["llama"], 25, None)


def test_a_run_refuses_long_rows_and_samples_within_the_table(train, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer), "n_positions": 64}
    random_init.write_random(transformers.GPT2Config(**shape), tokenizer, 0, tmp_path / "gpt2")
    given = ("run.rehearse=false", "model.init=pretrained", f"model.name={tmp_path / 'gpt2'}", "eval.samples=4")
    refused = train("ddp", *given, ranks=2)
    assert refused.codes == [2, 2] and "Traceback" not in refused.output
    assert "batch.row_tokens: rows of 128 tokens, but gpt2 has 64 positions (n_positions in" in refused.output
    asked = train("ddp", *given, "batch.row_tokens=64", "eval.sample_tokens=500", "eval.fraction=0.2", ranks=2)
    assert asked.codes == [0, 0], asked.output
