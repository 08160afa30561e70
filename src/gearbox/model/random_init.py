"""Draw random weights, and shrink a model's config for a rehearsal.

A small config has a narrow layer of each kind, whatever names its family has for sizes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from gearbox import filesystem
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError, one_line
from gearbox.model import loading
from gearbox.model.pretrained import Pretrained
from gearbox.sharding import unwrap
from gearbox.world import World

WIDTH, HEADS, HEAD_DIM, ROPE_DIM, INNER, EXPERT_INNER = 64, 4, 16, 8, 128, 64
LAYERS = re.compile(
    r"(conf_)?(num|n)_(hidden_|encoder_|decoder_|global_)?layers?|(en|de)coder_layers|num_layers_per_stack|num_blocks|depth"
)
FIRST_LAYERS = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers")
LAST_LAYERS = re.compile(r"num_kv_shared_layers")
LAYER_INDICES = re.compile(r".*(layers|_layer_ids|_indices|_indexes|_idxs)")
KEY_HEADS = re.compile(r"(.*_)?(key_value|kv)(_n)?_heads|kv_n_heads|num_query_groups|(linear_)?num_key_heads")
VOCABULARY = re.compile(r"((decoder|unpadded|ngram|audio)_)?vocab_size(_per_layer_input|_base)?|.*_group_vocab")
WIDTHS = r".*hidden_size.*|d_model|n_embd|dim|emb_dim|.*embed(ding)?_(proj_)?(dim|size)|lru_width|adapter_.+_(dim|size)"
# The first pattern that matches a key gives its size. A size never grows. Other keys keep their values.
SIZES = [
    (re.compile(pattern), size)
    for pattern, size in {
        r"qk_rope_head_dim|rotary_dim": ROPE_DIM,
        r"qk_head_dim": HEAD_DIM + ROPE_DIM,
        r".*head_?(dim|size)|dim_head|.*d_head|d_kv|kv_channels": HEAD_DIM,
        r".*_heads?|num_attention_heads_per_layer": HEADS,
        r"(.*_)?(low)?rank": 8,
        r".*(moe|expert).*(intermediate|hidden)_size": EXPERT_INNER,
        r".*(intermediate|ffn_hidden|feed_forward)_size.*|.*ffn_dim|(dim|d)_?ff|(n|d)_inner": INNER,
        r"mamba_d_ssm|attention_hidden_size": 2 * WIDTH,
        r".*n_?groups": 2,
        r".*(d_state|state_size)": 16,
        r".*(experts?_per_tok(en)?|moe_top_?k|top_k_experts|moe_k)": 2,
        r".*shared_experts": 1,
        r"(.*_)?(num|n)(_\w+)?_experts?|zero_expert_num": 4,
        r"n_group|num_expert_group": 2,
        r"topk_group": 1,
        r".*_layer_period": 2,
        r".*_layer_offset": 1,
        r"hidden_size_per_layer_input": 16,
        WIDTHS: WIDTH,
        r"base_channels": 32,
    }.items()
]
# The number of heads of a state space model, and their size.
STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"), ("num_heads", "head_dim"))


def shrink_config(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, num_added: int = 0, num_layers: int = 2
) -> PretrainedConfig:
    """Return a small config of the same family for a rehearsal: few layers, width 64, the tokenizer's vocabulary.

    The vocabulary excludes added tokens, because the model gets their rows later, as in a real run.
    """
    sizes = shrink(config.to_dict(), len(tokenizer) - num_added, num_layers)
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


def _seed(seed: int) -> None:
    """Seed every generator that a family may draw from. transformers.set_seed would import PEFT and bitsandbytes."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def write_random(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path) -> None:
    """Write random weights to a folder that every gear loads like pretrained weights.

    The values are exact in bf16, like most weights on the Hub. ZeRO in bf16 rounds the weights that it loads. Without
    exact values its fp32 masters would differ from those of other gears. The write is atomic. If another process
    finishes first, its folder is kept.
    """
    _seed(seed)
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
            origin = Pretrained.of(recipe.model, str(base))
            loading.check_weights(origin, origin.config())
    except Exception as error:  # any code of a family reads the damaged files
        return f"cannot be loaded ({one_line(error)})"
    return ""


def shrink(sizes: dict[str, Any], vocabulary: int, num_layers: int) -> dict[str, Any]:
    """Return a config's dictionary with small sizes, for its nested configs too.

    It keeps at least `num_layers` layers, and one of each kind that its lists of layers distinguish.
    """
    return _Shrinker(sizes, vocabulary, num_layers).result()


@dataclass
class _Shrinker:
    """Shrink the sizes of one config."""

    sizes: dict[str, Any]
    vocabulary: int
    num_layers: int

    def result(self) -> dict[str, Any]:
        """Return all keys with their small values. Random weights are not quantized."""
        small: dict[str, Any] = {key: self.value(key, value) for key, value in self.sizes.items()}
        small.pop("quantization_config", None)
        if small.get("num_layers_per_stack"):  # HRM counts each pass through its stacks
            passes = self.sizes["num_hidden_layers"] // self.sizes["num_layers_per_stack"]
            small["num_hidden_layers"] = small["num_layers_per_stack"] * passes
        if "qk_dim_factor" in small:  # xLSTM rounds its sizes up to multiples of 64
            small["qk_dim_factor"] = 1.0
        for heads, size in STATE_HEADS:
            if small.get(heads) and small.get(size) and ("mamba" in heads or "state_size" in small):
                inner = small.get("mamba_d_ssm") or WIDTH * small.get("mamba_expand", small.get("expand", 2))
                small[heads] = inner // small[size]
        return small

    def value(self, key: str, value: object) -> object:
        """Return the small value of a key."""
        if isinstance(value, list):
            return self.of_list(key, value)
        if isinstance(value, dict):
            return self.of_dict(key, value)
        return self.size(key, value) if type(value) is int else value

    def of_list(self, key: str, values: list[Any]) -> list[Any]:
        """Return the small value of a list. A list with an item for each layer keeps those of the kept layers."""
        if self.are_indices(key, values):
            return [self.kept.index(i) for i in values if i in self.kept]
        if key == "attention_types":  # GPT-Neo: [[kinds, how often]]
            return [[values[0][0], 1]]
        if key == "axial_pos_embds_dim":  # Reformer: their sum is the width
            return [WIDTH // 4, WIDTH - WIDTH // 4]
        if len(values) == self.count:
            values = [values[i] for i in self.kept]
        return [self.size(key, value) if type(value) is int else value for value in values]

    def of_dict(self, key: str, values: dict[Any, Any]) -> dict[Any, Any]:
        """Return the small value of a nested config, of rotary settings, or of settings by layer."""
        if key.startswith("rope"):
            return self.rotation(values)
        if key in ("id2label", "label2id"):
            return values
        if key == "per_layer_config":
            return {
                self.kept.index(int(i)): shrink(one, self.vocabulary, self.num_layers)
                for i, one in values.items()
                if int(i) in self.kept
            }
        return shrink(values, self.vocabulary, self.num_layers)

    def size(self, key: str, value: int) -> int:
        """Return the small value of an integer."""
        if FIRST_LAYERS.fullmatch(key):
            return sum(i < value for i in self.kept)
        if LAST_LAYERS.fullmatch(key):
            return sum(i >= self.count - value for i in self.kept)
        if key == "head_dim" and "qk_rope_head_dim" in self.sizes:  # either the rotated part, or both parts
            return ROPE_DIM if value == self.sizes["qk_rope_head_dim"] else HEAD_DIM + ROPE_DIM
        if LAYERS.fullmatch(key):
            small = len(self.kept)
        elif VOCABULARY.fullmatch(key):
            small = self.vocabulary
        elif KEY_HEADS.fullmatch(key):
            small = max(min(2, value), HEADS * value // self.query_heads(key, value))  # tp may divide them by 2
        else:
            small = next((size for pattern, size in SIZES if pattern.fullmatch(key)), value)
        small = min(value, small)
        is_count = key.endswith(("heads", "n_head")) and small
        return 2 ** (small.bit_length() - 1) if is_count else small  # 3 heads would not divide WIDTH

    def rotation(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return rotary settings with shorter lists: they have a number for every rotated pair of a head."""
        small = dict(settings)
        for key, value in settings.items():
            if isinstance(value, dict):  # one for each kind of layer
                small[key] = self.rotation(value)
            elif key in ("short_factor", "long_factor"):
                small[key] = value[: self.of_pairs(len(value))]
            elif key == "mrope_section":
                parts = [self.of_pairs(part) for part in value]
                missing = self.of_pairs(sum(value)) - sum(parts)
                small[key] = [part + (i < missing) for i, part in enumerate(parts)]
        return small

    def of_pairs(self, count: int) -> int:
        """Return how many of a head's rotated pairs remain."""
        head: int = self.sizes.get("qk_rope_head_dim") or self.sizes.get("head_dim") or 0
        head = head or self.sizes["hidden_size"] // self.sizes["num_attention_heads"]
        return count * self.size("head_dim", head) // head

    def query_heads(self, key: str, key_heads: int) -> int:
        """Return the number of heads that share the key heads of `key`."""
        names = ["num_attention_heads", "n_heads", "n_head"]
        if key.startswith("linear"):
            names = ["linear_num_value_heads"]
        elif key.startswith("swa"):
            names = ["swa_num_attention_heads"]
        return max(key_heads, *(self.sizes.get(name) or 0 for name in names))

    def are_indices(self, key: str, values: list[Any]) -> bool:
        """Return whether a list names layers by their indices, in ascending order."""
        are_integers = bool(values) and all(type(value) is int for value in values)
        is_named_so = LAYER_INDICES.fullmatch(key) is not None
        return is_named_so and are_integers and values == sorted({*values}) and values[-1] < self.count

    @cached_property
    def count(self) -> int:
        """The number of layers."""
        if stacked := self.sizes.get("num_layers_per_stack"):
            return int(stacked)
        counts = [value for key, value in self.sizes.items() if LAYERS.fullmatch(key) and type(value) is int]
        return max([*counts, len(self.sizes.get("layers_block_type") or [])])

    @cached_property
    def kept(self) -> list[int]:
        """The indices of the layers to keep: the first of each kind, and then the first ones."""
        kinds = list(zip(*(self.kinds_by(key, value) for key, value in self.sizes.items()), strict=True))
        # Zamba's hybrid layers share their weights, so one of them is not enough.
        kept = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 1 + ("hybrid" in kind)]
        others = [i for i in range(self.count) if i not in kept]
        needed = max(self.num_layers, len(self.sizes.get("block_types") or []))  # RecurrentGemma repeats them
        return sorted(kept + others[: max(0, needed - len(kept))])

    def kinds_by(self, key: str, value: object) -> list[object]:
        """Return an item for each layer. Layers that this key of the config treats differently have different items."""
        layers = range(self.count)
        if isinstance(value, list) and self.are_indices(key, value):
            return [i in value for i in layers]
        if isinstance(value, list) and len(value) == self.count:
            return [str(one) for one in value]
        if isinstance(value, dict) and key == "per_layer_config":
            settings = {int(i): str(one) for i, one in value.items()}
            return [settings.get(i) for i in layers]
        if type(value) is int and FIRST_LAYERS.fullmatch(key):
            return [i < value for i in layers]
        if type(value) is int and LAST_LAYERS.fullmatch(key):
            return [i >= self.count - value for i in layers]
        return [None] * self.count
