"""Read the shapes of a model from its config.json: a closed form for each family, without torch and without weights.

tests/planning/test_architecture.py compares the numbers of weights with the models that transformers builds.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gearbox import ROOT
from gearbox.config.recipe import Model
from gearbox.errors import UserError, one_line, shown

Config = Mapping[str, Any]
"""The content of a config.json."""
ARCHITECTURES = ROOT / "recipes" / "architectures"
KNOWN = sorted(ARCHITECTURES.glob("*.json"))
MOST, MOST_LAYERS = 10**7, 1000
"""More than any model has: of tokens or features, and of layers."""


class NoClosedForm(UserError):
    """The family of a model is none of FAMILIES."""


@dataclass(frozen=True)
class Family:
    """Describe the layers of a family. A string is the key of config.json that decides."""

    qkv_bias: bool | str = False
    """Biases of the queries, keys and values."""
    output_bias: bool | str = False
    """Bias of the attention's output."""
    mlp_bias: bool | str = False
    is_gated: bool = True
    """True if a gate multiplies the hidden part of the MLP."""
    fuses_attention: bool = False
    """True if queries, keys and values are one matrix."""
    fuses_mlp: bool = False
    """True if gate and up are one matrix."""
    num_norms: int = 2
    """Norms of a layer over the width, not counting those of queries and keys."""
    norms_outputs: bool = False
    """True if norms follow attention and MLP only, instead of preceding them."""
    norm_parts: int = 1
    """Vectors of a norm: 2 with a bias."""
    qk_norm: str = ""
    """Norms of queries and keys: over each `head`, over `all` heads, or none."""
    expert_bias: bool = False
    """Biases of experts and router, and a learned sink for each head, as in gpt-oss."""
    adapts_experts: bool = False
    """True if PEFT's all-linear also adapts experts and router."""
    score_bytes: int = 0
    """Bytes that attention keeps for each pair of tokens of a row, if the family has no sdpa."""
    cap_bytes: int = 0
    """Bytes that a cap adds to each logit of a chunk."""
    defaults: Config = field(default_factory=dict)
    """Values of keys that a config.json may lack."""


_GEMMA: Config = {"tie_word_embeddings": True, "head_dim": 256, "vocab_size": 256_000}
_BIASES = Family(qkv_bias="attention_bias", output_bias="attention_bias")
FAMILIES = {
    "arcee": replace(_BIASES, mlp_bias="mlp_bias", is_gated=False),
    "exaone4": Family(norms_outputs=True, qk_norm="head"),
    "gemma": replace(_BIASES, defaults=_GEMMA),
    "gemma2": replace(_BIASES, num_norms=4, score_bytes=8, cap_bytes=8, defaults=_GEMMA),
    "gemma3_text": replace(
        _BIASES, num_norms=4, qk_norm="head", defaults={**_GEMMA, "vocab_size": 262_208, "num_key_value_heads": 4}
    ),
    "glm4": Family(
        qkv_bias="attention_bias", fuses_mlp=True, num_norms=4, defaults={"attention_bias": True, "head_dim": 128}
    ),
    "gpt_oss": replace(
        _BIASES,
        expert_bias=True,
        score_bytes=2,
        defaults={"attention_bias": True, "head_dim": 64, "num_local_experts": 128},
    ),
    "granite": replace(_BIASES, mlp_bias="mlp_bias"),
    "llama": replace(_BIASES, mlp_bias="mlp_bias"),
    "ministral": Family(),
    "mistral": Family(defaults={"num_key_value_heads": 8}),
    "mixtral": Family(
        adapts_experts=True, defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "olmo2": replace(_BIASES, norms_outputs=True, qk_norm="all"),
    "olmo3": replace(_BIASES, norms_outputs=True, qk_norm="all"),
    "olmoe": replace(
        _BIASES, qk_norm="all", adapts_experts=True, defaults={"num_experts": 64, "num_experts_per_tok": 8}
    ),
    "phi3": Family(fuses_attention=True, fuses_mlp=True),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        defaults={"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632},
    ),
    "qwen3": replace(_BIASES, qk_norm="head", defaults={"head_dim": 128}),
    "qwen3_moe": replace(
        _BIASES,
        qk_norm="head",
        adapts_experts=True,
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "seed_oss": Family(
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
    ),
    "smollm3": replace(_BIASES, mlp_bias="mlp_bias", defaults={"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "starcoder2": Family(
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        is_gated=False,
        norm_parts=2,
        defaults={"use_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
}


@dataclass(frozen=True)
class Matrix:
    """A linear layer of a block."""

    name: str
    inputs: int
    outputs: int
    has_bias: bool = False

    @property
    def num_weights(self) -> int:
        """The number of its weights, with its bias."""
        return self.outputs * (self.inputs + self.has_bias)


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, whose matrices of one kind are one parameter."""

    count: int
    chosen: int
    """Experts that compute a token."""
    width: int
    has_bias: bool

    def num_weights(self, hidden: int) -> int:
        """Return the number of weights of all experts."""
        biases = 2 * self.width + hidden if self.has_bias else 0
        return self.count * (3 * hidden * self.width + biases)


@dataclass(frozen=True)
class Architecture:
    """The shapes of a decoder."""

    family: str
    num_layers: int
    width: int
    """Features of a hidden state."""
    heads: int
    key_heads: int
    head_size: int
    mlp_width: int
    """Features inside the MLP of a dense layer."""
    vocabulary: int
    is_tied: bool
    """True if embedding and output head share their weights."""
    positions: int | None
    """The length of a row that the model was trained for, None if it has no such limit."""
    style: Family
    experts: Experts | None = None
    num_sparse: int = 0
    """Layers with experts."""
    shared_width: int = 0
    """Features inside the expert that computes every token."""

    @classmethod
    def of(cls, config: Config) -> Architecture:
        """Return the shapes for the content of a config.json. Raise NoClosedForm for a family that has none."""
        config = text_config(config)
        name = config.get("model_type")
        if not isinstance(name, str):
            raise UserError("model.name: config.json has no model_type; add it, or download the file again")
        if name not in FAMILIES:
            raise NoClosedForm(
                f"model.name: the family {shown(name)} has no closed form; run src/plan.py with --simulate"
            )
        style = FAMILIES[name]
        given = {**style.defaults, **{key: value for key, value in config.items() if value is not None}}
        try:
            return cls._read(name, style, given)
        except KeyError as error:
            raise UserError(f"model.name: config.json has no {error}; add it, or download the file again") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"model.name: config.json: {error}; correct it, or download the file again") from None

    @classmethod
    def _read(cls, name: str, style: Family, given: Config) -> Architecture:
        width, heads = _count(given, "hidden_size"), _count(given, "num_attention_heads")
        num_layers = _count(given, "num_hidden_layers", MOST_LAYERS)
        experts = _experts(given, style)
        return cls(
            family=name,
            num_layers=num_layers,
            width=width,
            heads=heads,
            key_heads=_count({"num_key_value_heads": heads, **given}, "num_key_value_heads"),
            head_size=_count({"head_dim": width // heads, **given}, "head_dim"),
            mlp_width=_count(given, "intermediate_size"),
            vocabulary=_count(given, "vocab_size"),
            is_tied=bool(given.get("tie_word_embeddings", False)),
            positions=_count(given, "max_position_embeddings") if "max_position_embeddings" in given else None,
            style=_decided(style, given),
            experts=experts,
            num_sparse=_num_sparse(given, num_layers) if experts else 0,
            shared_width=int(given.get("shared_expert_intermediate_size", 0)) if experts else 0,
        )

    @property
    def attention(self) -> tuple[Matrix, ...]:
        """The matrices of a layer's attention."""
        style, queries, keys = self.style, self.heads * self.head_size, self.key_heads * self.head_size
        bias, output = bool(style.qkv_bias), Matrix("o_proj", queries, self.width, bool(style.output_bias))
        if style.fuses_attention:
            return Matrix("qkv_proj", self.width, queries + 2 * keys, bias), output
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        return *(Matrix(name, self.width, size, bias) for name, size in sizes.items()), output

    @property
    def mlp(self) -> tuple[Matrix, ...]:
        """The matrices of a dense layer's MLP."""
        return self._mlp(self.mlp_width)

    @property
    def shared(self) -> tuple[Matrix, ...]:
        """The matrices of the expert that computes every token, with its gate."""
        gate = Matrix("shared_expert_gate", self.width, 1)
        return (*self._mlp(self.shared_width), gate) if self.shared_width else ()

    def _mlp(self, size: int) -> tuple[Matrix, ...]:
        bias, down = bool(self.style.mlp_bias), Matrix("down_proj", size, self.width, bool(self.style.mlp_bias))
        if self.style.fuses_mlp:
            return Matrix("gate_up_proj", self.width, 2 * size, bias), down
        names = ("gate_proj", "up_proj") if self.style.is_gated else ("up_proj",)
        return *(Matrix(name, self.width, size, bias) for name in names), down

    @property
    def matrices(self) -> Iterator[tuple[Matrix, int]]:
        """Yield each linear layer of a block, and the number of blocks that have it, without experts and routers."""
        yield from ((matrix, self.num_layers) for matrix in self.attention)
        yield from ((matrix, self.num_layers - self.num_sparse) for matrix in self.mlp)
        yield from ((matrix, self.num_sparse) for matrix in self.shared)

    @property
    def embedding_weights(self) -> int:
        """The number of weights of the embedding; the output head has as many, or shares them."""
        return self.vocabulary * self.width

    @property
    def norm_weights(self) -> int:
        """The number of weights of a layer's norms."""
        style = self.style
        of_heads = {"": 0, "head": 2, "all": self.heads + self.key_heads}[style.qk_norm] * self.head_size
        return style.num_norms * style.norm_parts * self.width + of_heads

    def layer_weights(self, sparse: bool = False) -> int:
        """Return the number of weights of a dense or of a sparse layer."""
        count = self.norm_weights + sum(matrix.num_weights for matrix in self.attention)
        count += self.heads if self.style.expert_bias else 0
        if not sparse or self.experts is None:
            return count + sum(matrix.num_weights for matrix in self.mlp)
        router = self.experts.count * (self.width + self.style.expert_bias)
        return count + self.experts.num_weights(self.width) + router + sum(one.num_weights for one in self.shared)

    @property
    def num_weights(self) -> int:
        """The number of all weights."""
        num_dense = self.num_layers - self.num_sparse
        blocks = num_dense * self.layer_weights() + self.num_sparse * self.layer_weights(sparse=True)
        return blocks + (1 if self.is_tied else 2) * self.embedding_weights + self.style.norm_parts * self.width

    @property
    def active_weights(self) -> int:
        """The number of weights that multiply a token, with the output head."""
        count = sum(matrix.inputs * matrix.outputs * layers for matrix, layers in self.matrices)
        if self.experts is not None:
            count += self.num_sparse * self.width * (3 * self.experts.width * self.experts.chosen + self.experts.count)
        return count + self.embedding_weights


def text_config(config: Config) -> Config:
    """Return the part of a config.json that describes the text decoder."""
    inner = config.get("text_config")
    return {"tie_word_embeddings": config.get("tie_word_embeddings"), **inner} if isinstance(inner, dict) else config


def read_config(model: Model) -> Config | None:
    """Return the config.json of a model's folder, of the Hub's cache or of recipes/architectures; None without one."""
    for path in places(model):
        if path.is_file():
            try:
                content = json.loads(path.read_text())
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(f"{path}: is not JSON ({one_line(error, 100)}); download it again") from None
            if not isinstance(content, dict):
                raise UserError(f"{path}: must be a mapping; download it again")
            return content
    return None


def model_of_size(text: str) -> str:
    """Return the name of the known model with about this number of weights, such as 70B. Raise UserError for others."""
    size = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*([MBT])", text.strip(), re.IGNORECASE)
    known = {path.stem.replace("--", "/"): Architecture.of(json.loads(path.read_text())).num_weights for path in KNOWN}
    if size is not None and (wanted := float(size[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[size[2].upper()]):
        name = min(known, key=lambda name: abs(math.log(known[name] / wanted)))
        if abs(math.log(known[name] / wanted)) < math.log(1.25):
            return name
    sizes = ", ".join(f"{count / 1e9:.3g}B" for count in sorted({*known.values()}))
    raise UserError(f"--params: {text!r} is not a known size; the models of recipes/architectures have {sizes}")


def places(model: Model) -> Iterator[Path]:
    """Yield where the config.json of a model may be."""
    yield Path(model.name) / "config.json"
    cache = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or cache / "hub").expanduser()
    folder = hub / f"models--{model.name.replace('/', '--')}"
    reference = folder / "refs" / (model.revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else model.revision or ""
    if commit:
        yield folder / "snapshots" / commit / "config.json"
    yield ARCHITECTURES / f"{model.name.replace('/', '--')}.json"


def _decided(style: Family, given: Config) -> Family:
    """Return the style with each key of config.json replaced by its value."""

    def decided(key: bool | str) -> bool:
        return bool(given.get(key)) if isinstance(key, str) else key

    return replace(
        style,
        qkv_bias=decided(style.qkv_bias),
        output_bias=decided(style.output_bias),
        mlp_bias=decided(style.mlp_bias),
    )


def _experts(given: Config, style: Family) -> Experts | None:
    """Return the experts of a family that has them. Other families may carry the keys of a common base config.

    transformers writes the number of some families under the other name. What differs from the default counts.
    """
    names = ("num_local_experts", "num_experts")
    own = next((name for name in names if name in style.defaults), None)
    if own is None:
        return None
    stated = [name for name in names if name in given and given[name] != style.defaults[own]]
    name = stated[0] if stated else own
    if not given[name]:
        return None
    width = "moe_intermediate_size" if "moe_intermediate_size" in style.defaults else "intermediate_size"
    count = _count(given, name)
    return Experts(count, _count(given, "num_experts_per_tok", count), _count(given, width), style.expert_bias)


def _num_sparse(given: Config, num_layers: int) -> int:
    """Return the number of layers with experts."""
    step, dense = _count({"decoder_sparse_step": 1, **given}, "decoder_sparse_step"), given.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers is {shown(dense)}, not a list")
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def _count(given: Config, key: str, most: int = MOST) -> int:
    """Return a whole number of config.json from 1 to `most`. Raise ValueError for anything else."""
    value = given[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {shown(value)}, not a positive whole number")
    if value > most:
        raise ValueError(f"{key} is {shown(value)}, above {most:,}")
    return value
