"""Draw random weights, and shrink a model's config for a rehearsal."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import uuid4

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from gearbox import filesystem
from gearbox.config.recipe import Recipe
from gearbox.distributed import unwrap
from gearbox.model import loading
from gearbox.world import World


def shrink_config(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, num_added: int = 0, num_layers: int = 2
) -> PretrainedConfig:
    """Shrink a config in place for a rehearsal: few layers, width 64, the same ratio of query to key heads.

    The vocabulary excludes added tokens, because the model gets their rows later, as in a real run.
    """
    heads, num_layers = 4, min(num_layers, config.num_hidden_layers)
    ratio = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    narrow = {
        "num_hidden_layers": num_layers,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // ratio),
        "head_dim": None if hasattr(config, "qk_rope_head_dim") else 64 // heads,  # derived from qk_rope_head_dim
        "vocab_size": len(tokenizer) - num_added,
        "layer_types": config.layer_types[:num_layers] if getattr(config, "layer_types", None) else None,
        "max_window_layers": num_layers,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    for key, value in narrow.items():
        if value is not None and getattr(config, key, None) is not None:
            setattr(config, key, value)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, key, getattr(tokenizer, key))
    config.dtype = torch.float32
    return config


def write_random(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path) -> None:
    """Write random weights to a folder that every gear loads like pretrained weights.

    The values are exact in bf16, like most weights on the Hub. ZeRO in bf16 rounds the weights that it loads. Without
    exact values its fp32 masters would differ from those of other gears. The write is atomic. If another process
    finishes first, its folder is kept.
    """
    aside = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}")  # machines may share a folder and process ids
    transformers.set_seed(seed)
    full_class = unwrap.model_class(config)
    assert full_class is not None, "load_config has checked it"
    model = full_class(config)
    model = model.to(torch.bfloat16).to(config.dtype or torch.float32)
    try:
        with filesystem.atomic_folder(folder, aside) as filled:
            model.save_pretrained(filled)
            tokenizer.save_pretrained(filled)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not folder.exists():
            raise


def weights_of(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, run_folder: Path, world: World, num_layers: int
) -> str:
    """Return the folder or Hub id of the initial weights. Random weights are written once, to the run's folder.

    A rehearsal's model has `num_layers` layers. Every rank must call this.
    """
    if recipe.model.init == "pretrained":
        return recipe.model.name
    base = run_folder / "base"
    for is_my_turn in (world.rank == 0, world.rank != 0):  # a machine without access to rank 0's folder writes its own
        if is_my_turn and not base.exists():
            config = loading.load_config(recipe.model, recipe.run.rehearse)
            if recipe.run.rehearse:
                config = shrink_config(config, tokenizer, len(recipe.model.add_tokens), num_layers)
            write_random(config, tokenizer, recipe.train.seed, base)
        world.barrier()
    return str(base)
