"""Draw random weights, and shrink a model's config for a rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from gearbox import filesystem
from gearbox.config.recipe import Recipe
from gearbox.distributed import unwrap
from gearbox.errors import UserError, one_line
from gearbox.model import loading, shrinking
from gearbox.world import World


def shrink_config(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, num_added: int = 0, num_layers: int = 2
) -> PretrainedConfig:
    """Return a small config of the same family for a rehearsal: few layers, width 64, the tokenizer's vocabulary.

    The vocabulary excludes added tokens, because the model gets their rows later, as in a real run.
    """
    sizes = shrinking.shrink(config.to_dict(), len(tokenizer) - num_added, num_layers)
    for part in (sizes, *(value for value in sizes.values() if isinstance(value, dict) and "vocab_size" in value)):
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if key in part:  # some families do not accept None
                token = getattr(tokenizer, key)
                part[key] = tokenizer.eos_token_id if token is None else token
    try:
        small = type(config).from_dict(sizes)
    except Exception as error:  # a family checks its sizes in its own way
        raise UserError(f"model.name: {config.model_type} cannot be shrunk: {one_line(error)}") from None
    small.dtype = torch.float32
    return small


def build(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with random weights, and with its towers if it has any. Raise UserError if its family cannot."""
    full_class = unwrap.model_class(config)
    assert full_class is not None, "load_config has checked it"
    try:
        return full_class(config)
    except Exception as error:  # any code of a family, which may need a package, or a value that its config lacks
        raise UserError(f"model.name: {config.model_type} cannot be built: {one_line(error)}") from None


def write_random(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path) -> None:
    """Write random weights to a folder that every gear loads like pretrained weights.

    The values are exact in bf16, like most weights on the Hub. ZeRO in bf16 rounds the weights that it loads. Without
    exact values its fp32 masters would differ from those of other gears. The write is atomic. If another process
    finishes first, its folder is kept.
    """
    transformers.set_seed(seed)
    model = build(config)
    model = model.to(torch.bfloat16).to(config.dtype or torch.float32)
    try:
        with filesystem.atomic_folder(folder) as filled:
            model.save_pretrained(filled)
            tokenizer.save_pretrained(filled)
    except OSError:
        if not folder.exists():
            raise


def weights_of(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    run_folder: Path,
    world: World,
    num_layers: int,
    tell: Callable[[str], None],
) -> str:
    """Return the folder or Hub id of the initial weights. Random weights are written once, to the run's folder.

    They depend only on the recipe, so missing or damaged ones are drawn again. A rehearsal's model has `num_layers`
    layers. Every rank must call this.
    """
    if recipe.model.init == "pretrained":
        return recipe.model.name
    base = run_folder / "base"
    if world.rank == 0 and (problem := _problem_of(base, recipe)):
        tell(f"{base}: {problem}; the random weights are drawn again")
        filesystem.remove(base)
    for is_my_turn in (world.rank == 0, world.rank != 0):  # a machine without access to rank 0's folder writes its own
        if is_my_turn and not base.exists():
            config = loading.load_config(recipe.model, recipe.run.rehearse)
            if recipe.run.rehearse:
                config = shrink_config(config, tokenizer, len(recipe.model.add_tokens), num_layers)
            write_random(config, tokenizer, recipe.train.seed, base)
        world.barrier()
    return str(base)


def _problem_of(base: Path, recipe: Recipe) -> str:
    """Return why existing random weights cannot be loaded, or an empty string."""
    try:
        if base.exists():
            loading.check_weights(str(base), recipe.model)
    except Exception as error:  # any code of a family reads the damaged files
        return f"cannot be loaded ({one_line(error)})"
    return ""
