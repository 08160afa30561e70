"""Define small mixture-of-experts models."""

import transformers

from gearbox import ROOT

TOKENIZER = transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
EXPERTS, CHOSEN, LAYERS, WEIGHT = 4, 2, 2, 0.1
SMALL = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "num_experts_per_tok": CHOSEN,
    "router_aux_loss_coef": WEIGHT,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32},
}

# One family has experts with biases and interleaved gates; one has a correction bias, shared experts, a dense layer.
OTHERS = {
    "GptOss": {"num_local_experts": EXPERTS, "sliding_window": 32},
    "Olmoe": {"num_experts": EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": None,
    },
}  # fmt: skip


def config_of(family: str):
    return getattr(transformers, f"{family}Config")(**SMALL | (FAMILIES | OTHERS)[family])
