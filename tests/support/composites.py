"""Write small composite models: a text decoder with a tower for images, all weights random."""

from pathlib import Path

import transformers
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.model import random_init

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
TEXT = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2,
    "max_position_embeddings": 512,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
}  # fmt: skip
# The parts of each family's config. The names in its files begin in different ways.
FAMILIES = {
    "Gemma3": {
        "text_config": {"sliding_window": 64, "query_pre_attn_scalar": 8},
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4, "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252,
    },
    "Gemma4": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 8,
                        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(TOKENIZER),
                        "num_kv_shared_layers": 0},
        "vision_config": TOWER | {"head_dim": 16, "global_head_dim": 16, "pooling_kernel_size": 1},
        "audio_config": None,
    },
    "Qwen3_5": {
        "text_config": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
                        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "vision_config": QWEN_TOWER,
    },
    "Mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
    },
    "Llama4": {
        "text_config": {"intermediate_size_mlp": 48, "num_local_experts": 2, "interleave_moe_layer_step": 2,
                        "attention_chunk_size": 64},
        "vision_config": TOWER | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
    },
}  # fmt: skip


def write_composite(family: str, folder: Path) -> Path:
    """Write a model of the family with random weights and the tokenizer of recipes/tiny; return its folder."""
    parts = FAMILIES[family] | {"text_config": TEXT | FAMILIES[family]["text_config"]}
    config = getattr(transformers, f"{family}Config")(**parts)
    random_init.write_random(config, TOKENIZER, 0, folder)
    return folder
