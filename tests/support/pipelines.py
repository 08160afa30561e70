"""Write small models of the families that pipelines support, and load their stages."""

import copy

import torch
import transformers

from gearbox.distributed import pipeline_stages
from gearbox.model import loss

NARROW = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
FAMILIES = {
    "llama, tied": transformers.LlamaConfig(**NARROW, num_hidden_layers=3, tie_word_embeddings=True),
    "llama, untied": transformers.LlamaConfig(**NARROW, num_hidden_layers=3, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**NARROW, num_hidden_layers=4, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**NARROW, num_hidden_layers=4, query_pre_attn_scalar=8, sliding_window=8),
    "granite": transformers.GraniteConfig(**NARROW, num_hidden_layers=3, embedding_multiplier=12.0),
}


def write_model(config, folder, dtype=torch.float32):
    torch.manual_seed(0)
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).to(dtype).save_pretrained(folder)


def load_stage(folder, part):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = pipeline_stages.stage_class(config, part).from_pretrained(folder, dtype=torch.float32)
    loss.install_loss(model)
    return model
