"""Define the training methods as recipe overrides, and write the small models for testing them."""

from pathlib import Path

import transformers

from gearbox import ROOT
from gearbox.model import random_init

METHODS = {
    "full": (),
    "lora": ("adapter.method=lora",),
    "qlora": ("adapter.method=lora", "model.quantize=nf4"),
    "dora": ("adapter.method=dora",),
    "qdora": ("adapter.method=dora", "model.quantize=nf4"),
}
ADDED_TOKENS = ("model.add_tokens=[ab, sort, cd]",)  # one in answers, one in questions, one in both


def two_models(folder: Path) -> Path:
    """Write two small models: `tied` shares the embedding with the head, `untied` has a separate head."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    for name, is_tied in (("tied", True), ("untied", False)):
        config = random_init.shrink_config(transformers.AutoConfig.from_pretrained(ROOT / "recipes/tiny"), tokenizer)
        config.tie_word_embeddings, config.initializer_range = is_tied, 0.2
        random_init.write_random(config, tokenizer, 0, folder / name)
    return folder


def short(folder: Path) -> Path:
    """Write a recipe with only the required keys, so that an adapter's settings are not overridden."""
    recipe = folder / "short.yaml"
    if not recipe.exists():
        recipe.write_text("model: {name: tied}\ndata: {path: x}\nbatch: {rows: 8, row_tokens: 8}\noptim: {lr: 1}\n")
    return recipe
