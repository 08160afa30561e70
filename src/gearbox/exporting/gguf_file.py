"""Write an exported folder as one GGUF file, which llama.cpp and the programs around it read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from gearbox.errors import UserError
from gearbox.exporting import gguf_vocabulary
from gearbox.exporting.gguf_vocabulary import CONVERTER
from gearbox.exporting.source import Raw

if TYPE_CHECKING:
    from gguf import GGUFWriter

BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Bytes per weight of each type."""
BLOCK = 32  # weights that share a scale in q8_0


@dataclass(frozen=True)
class _Family:
    """Describe how a family is stored in a GGUF file."""

    architecture: str
    is_permuted: bool = False
    """True if the rows of q and k are stored so that rotated pairs are neighbours."""
    norm_offset: float = 0.0
    """What the family adds to the weight of each norm."""
    has_head_dim: bool = False
    """True if llama.cpp reads the size of a head from the file."""


FAMILIES = {
    "llama": _Family("llama", is_permuted=True),
    "mistral": _Family("llama", is_permuted=True),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3", has_head_dim=True),
    "gemma2": _Family("gemma2", norm_offset=1.0, has_head_dim=True),
    "gemma3_text": _Family("gemma3", norm_offset=1.0, has_head_dim=True),
}
ROTATIONS = ("default", "linear", "llama3")


def check(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise UserError if the family, its rotary positions or its tokenizer cannot be written here."""
    if find_spec("gguf") is None:
        raise UserError("--gguf: needs the package gguf; run pip install gguf")
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"--gguf: cannot write the family {config.model_type}, only {known}; {CONVERTER}")
    if (kind := _rotation(config).get("rope_type", "default")) not in ROTATIONS:
        raise UserError(f"--gguf: cannot write rotary positions of the type {kind}; {CONVERTER}")
    if config.model_type == "mistral" and config.sliding_window:
        raise UserError(f"--gguf: cannot write a sliding window of Mistral; {CONVERTER}")
    gguf_vocabulary.division_of(tokenizer)


def write(folder: Path, kind: str, name: str) -> str:
    """Write the model in `folder` to a GGUF file in it. Return the name of the file.

    Tensors are read and written one at a time. Vectors stay in fp32, as llama.cpp computes them.
    """
    import gguf

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    family = FAMILIES[config.model_type]
    file_name = f"{name}-{kind.upper()}.gguf"
    writer = _writer(folder / file_name, family.architecture)
    tensors = {one.name: one for one in _tensors(folder, config, family)}
    _add_settings(writer, config, family, kind, name)
    rows = tensors["token_embd.weight"].shape[0]
    gguf_vocabulary.add_to(writer, tokenizer, rows, _stops(folder))
    kinds = {name: _kind_of(tensor, kind) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        quant = gguf.GGMLQuantizationType[kinds[name].upper()]
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, quant) if kinds[name] in ("q8_0", "bf16") else tensor.shape
        stored = {"f32": np.float32, "f16": np.float16}.get(kinds[name], np.uint8)
        num_bytes = int(np.prod(shape)) * np.dtype(stored).itemsize
        writer.add_tensor_info(name, shape, np.dtype(stored), num_bytes, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        values = tensor.read()
        writer.write_tensor_data(gguf.quantize(values, gguf.GGMLQuantizationType[kinds[name].upper()]))
        del values
    writer.close()
    return file_name


def _writer(path: Path, architecture: str) -> GGUFWriter:
    """Return a writer that can write an empty list: llama.cpp wants the merges of a tokenizer even if it has none."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def _pack_val(
            self, val: object, vtype: gguf.GGUFValueType, add_vtype: bool, sub_type: gguf.GGUFValueType | None = None
        ) -> bytes:
            if val == [] and sub_type is not None:
                return (struct.pack("<I", vtype) if add_vtype else b"") + struct.pack("<IQ", sub_type, 0)
            return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))

    return Writer(path, architecture)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, which is read only when it is written."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.float32]]


def _kind_of(tensor: _Tensor, kind: str) -> str:
    """Return the type of a tensor: vectors are f32, and rows that no block divides are f16."""
    if len(tensor.shape) < 2:
        return "f32"
    return "f16" if kind == "q8_0" and tensor.shape[-1] % BLOCK else kind


def _tensors(folder: Path, config: PretrainedConfig, family: _Family) -> Iterator[_Tensor]:
    """Yield the tensors of the folder under llama.cpp's names. Raise UserError for one that it does not know."""
    import gguf

    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  no dict
        for key, shape in sorted(shapes.items()):
            found = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise UserError(
                    f"--gguf: {key} has no name in the GGUF architecture {family.architecture}; {CONVERTER}"
                )
            yield _Tensor(found, shape, _reader(path, key, config, family))
    rotation = _rotation(config)
    if rotation.get("rope_type") == "llama3":
        factors = _llama3_factors(config, rotation)
        yield _Tensor("rope_freqs.weight", factors.shape, lambda: factors)


def _reader(path: Path, key: str, config: PretrainedConfig, family: _Family) -> Callable[[], NDArray[np.float32]]:
    def read() -> NDArray[np.float32]:
        with safe_open(path, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(key).float()
        if family.is_permuted and ".self_attn.q_proj." in key:
            tensor = _neighbours(tensor, config.num_attention_heads)
        elif family.is_permuted and ".self_attn.k_proj." in key:
            tensor = _neighbours(tensor, config.num_key_value_heads)
        elif key.endswith("norm.weight"):
            tensor = tensor + family.norm_offset
        array: NDArray[np.float32] = tensor.contiguous().numpy()
        return array

    return read


def _neighbours(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows of q or k with the two halves of each head interleaved: pair i is at 2i and 2i + 1."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _rotation(config: PretrainedConfig) -> Raw:
    """Return the settings of the rotary positions; of a family with two kinds of layers, those of full attention."""
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found.get("full_attention", found))


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _llama3_factors(config: PretrainedConfig, rotation: Raw) -> NDArray[np.float32]:
    """Return by what Llama 3.1's scaling divides each frequency."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, _head_dim(config), 2).float() / _head_dim(config)
    array: NDArray[np.float32] = (rotation["rope_theta"] ** -exponents / scaled).float().numpy()
    return array


def _add_settings(writer: GGUFWriter, config: PretrainedConfig, family: _Family, kind: str, name: str) -> None:
    """Add the sizes and constants of the model."""
    import gguf

    types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[types[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim, rotation = _head_dim(config), _rotation(config)
    if family.has_head_dim or head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rotation["rope_theta"])
    if rotation.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotation["factor"])
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if getattr(config, key, None):
            add(getattr(config, key))
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)


def _stops(folder: Path) -> list[int]:
    """Return the tokens at which generation stops."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    return found if isinstance(found, list) else [] if found is None else [found]
