"""The training methods as overrides of a recipe, and the small models that they are tried on."""

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
ADDED_TOKENS = ("model.add_tokens=[ab, sort, cd]",)  # in answers, in questions, in both


def two_models(folder: Path) -> Path:
    """Two small models, tied and untied: the second has a head of its own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    for name, is_tied in (("tied", True), ("untied", False)):
        config = random_init.shrink_config(transformers.AutoConfig.from_pretrained(ROOT / "recipes/tiny"), tokenizer)
        config.tie_word_embeddings, config.initializer_range = is_tied, 0.2
        random_init.write_random(config, tokenizer, 0, folder / name)
    return folder


def short(folder: Path) -> Path:
    """A recipe of the required keys alone. The default one gives every key; what an adapter says is given nowhere."""
    recipe = folder / "short.yaml"
    if not recipe.exists():
        recipe.write_text("model: {name: tied}\ndata: {path: x}\nbatch: {rows: 8, row_tokens: 8}\noptim: {lr: 1}\n")
    return recipe
