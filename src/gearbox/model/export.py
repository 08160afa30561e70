"""Save a model or an adapter in a folder that `from_pretrained` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    build_glob_alternation,
    dot_natural_key,
    revert_weight_conversion,
)

from gearbox import filesystem
from gearbox.checkpoint.shards import FILE_DTYPES, file_header
from gearbox.checks.model import INDEX
from gearbox.distributed import pipeline_stages
from gearbox.model import dropout
from gearbox.model.pretrained import ADAPTER, Pretrained
from gearbox.sharding.full_parameters import FullParameters
from gearbox.sharding.unwrap import is_composite, without_adapter

if TYPE_CHECKING:
    from peft import PeftModel

SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in one file, unless a single tensor has more."""


class Tensors(Protocol):
    """The tensors of a model, which arrive one at a time by their names in it."""

    expected: dict[str, torch.Tensor]
    """A tensor without data for each one that arrives."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def save(
    model: PreTrainedModel | PeftModel,
    tensors: FullParameters,
    tokenizer: PreTrainedTokenizerFast,
    source: str,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write the full model, or only the adapter, in a folder that `from_pretrained` loads.

    All ranks of a sharded model must call this. Only the rank that receives tensors writes. A full model is cast to
    `dtype`, and written tensor by tensor; an adapter keeps its dtype. `source` is the base of the adapter, and has the
    towers of a composite model. A rename makes the complete folder appear at once.
    """
    if not tensors.arrive_here:
        for _ in tensors:
            pass
        return
    with filesystem.atomic_folder(folder) as aside:
        if without_adapter(model) is not model:
            save_adapter(model, dict(tensors), source, aside)
        else:
            save_full(model, tensors, source, dtype, aside)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while it tested its model


def save_full(model: PreTrainedModel, tensors: Tensors, source: str, dtype: torch.dtype, folder: Path) -> None:
    """Write a full model: its config, and then its tensors as they arrive."""
    model.config.get_text_config().use_cache = True
    dropout.set_rates(model.config, model.own_dropout)
    model.save_pretrained(folder, state_dict={}, save_original_format=False)  # all but the weights
    _set_dtype(model.config, dtype)  # save_pretrained has written the dtype of the masters
    model.config.save_pretrained(folder)
    renamed = _AsInFiles(model, tensors.expected, dtype)
    skipped = model._keys_to_ignore_on_save or ()
    planned = {name: tensor for name, tensor in renamed.planned.items() if name not in skipped}
    towers = _Towers(model, planned, source) if is_composite(model.config) else None
    files = ShardedFiles(folder, planned | (towers.planned if towers else {}))
    for name, tensor in renamed.convert(tensors):
        if name in planned:
            files.write(name, tensor)
        del tensor
    if towers:
        for name, tensor in towers.read():
            files.write(name, tensor)
    files.write_index()


def _set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Set the dtype in a config and in its parts."""
    config.dtype = dtype
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        _set_dtype(part, dtype)


@dataclass
class _Group:
    """Tensors of the model that are converted together."""

    key: str
    """The name that transformers gives to the group."""
    converter: WeightConverter | None
    """How they are converted; None if a tensor only changes its name."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """The names of the tensors, in the order that the converter expects, and the pattern that each one matches."""
    targets: list[str] = field(default_factory=list)
    """The names in the files."""
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)


class _AsInFiles:
    """The conversion of a model's tensors to those of its files: the reverse of what `from_pretrained` does.

    transformers reverts complete models (`revert_weight_conversion`). This does the same with the same parts, but keeps
    only the tensors of groups that have not arrived completely.
    """

    def __init__(self, model: PreTrainedModel, expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Plan the conversion of these tensors by converting them on the meta device."""
        self.model, self._dtype_of = model, file_dtypes(model, dtype)
        self.planned: dict[str, torch.Tensor] = {}
        """Tensors on the meta device, by their names in the files."""
        self._group_of: dict[str, _Group] = {}
        back = [conversion.reverse_transform() for conversion in reversed(_conversions(model))]
        renamings = [one for one in back if isinstance(one, WeightRenaming)]
        converters = [one for one in back if isinstance(one, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        groups: dict[str, _Group] = {}
        for name in sorted(expected, key=dot_natural_key):  # some converters and renamings depend on the order
            key, pattern = apply_converters(name, converters)
            if pattern is None:
                key = apply_renamings(name, renamings)
            group = groups.setdefault(key, _Group(key, of_pattern.get(pattern)))
            group.sources.append((name, pattern or name))
            self._group_of[name] = group
        for group in groups.values():
            for name, _ in group.sources:
                group.arrived[name] = self._cast(name, expected[name])
            made = self._convert(group)
            group.targets = [apply_renamings(name, renamings) if group.converter else name for name in made]
            self.planned |= zip(group.targets, made.values(), strict=True)

    def convert(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of the files as soon as all tensors that it is made of have arrived."""
        for name, tensor in tensors:
            group = self._group_of[name]
            group.arrived[name] = self._cast(name, tensor)
            del tensor  # so that it is not kept while the next one is gathered
            if len(group.arrived) == len(group.sources):
                made = self._convert(group)
                for target in group.targets:
                    yield target, made.pop(next(iter(made)))

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the dtype of the files. Integers, such as a table of tokens, stay as they are."""
        return tensor.to(self._dtype_of(name)) if tensor.is_floating_point() else tensor

    def _convert(self, group: _Group) -> dict[str, torch.Tensor]:
        """Return what a complete group becomes, by names that are not renamed yet. The group gives up its tensors."""
        if group.converter is None:
            return {group.key: group.arrived.popitem()[1]}
        converter = deepcopy(group.converter)
        for name, pattern in group.sources:
            converter.add_tensor(group.key, name, pattern, group.arrived.pop(name))
        made = converter.convert(group.key, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def file_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Return what gives the dtype in the files by a tensor's name: `dtype`, or fp32 where transformers keeps it.

    Some families route tokens by a bias that bf16 would change (DeepSeek, GLM).
    """
    plan = model._get_dtype_plan(dtype)
    pattern = build_glob_alternation([*plan])[0] if plan else None
    return lambda name: torch.float32 if pattern is not None and pattern.search(name) else dtype


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Return what `from_pretrained` did, or would do, to a model's tensors."""
    done = getattr(model, "_weight_conversions", None)
    if done is not None:
        return [*done]
    # Without a loaded file nothing shows whether its names had a prefix.
    usual = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in usual if not isinstance(conversion, PrefixChange)]


class _Towers:
    """The tensors of the source that are not part of the trained text, by their names in its files."""

    def __init__(self, model: PreTrainedModel, trained: Collection[str], source: str) -> None:
        """List them. `model` is a composite model without its towers, or a stage of it; `trained` names its tensors."""
        tied = dict.fromkeys(model._tied_weights_keys or (), torch.empty(0))
        text = {*trained, *revert_weight_conversion(model, tied)}
        revision = getattr(model.config, "_commit_hash", None)
        self.planned: dict[str, torch.Tensor] = {}
        """Tensors on the meta device."""
        self._names: dict[Path, list[str]] = {}
        for path in Pretrained(source, revision).weight_files():
            with safe_open(path, "pt") as file:
                self._names[path] = sorted({*file.keys()} - text)
                for name in self._names[path]:
                    self.planned[name] = torch.empty_like(file.get_tensor(name), device="meta")

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name and tensor. They are mapped from the files, so they take no memory of this process."""
        for path, names in self._names.items():
            with safe_open(path, "pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)


class ShardedFiles:
    """The safetensors files of a model, whose tensors are written one at a time, in any order, each to its place.

    They have the same bytes as files from transformers, which needs all tensors of a file at once.
    """

    def __init__(self, folder: Path, planned: Mapping[str, torch.Tensor]) -> None:
        """Write the files' headers. `planned` are tensors on the meta device, by name."""
        split = split_state_dict_into_shards_factory(
            {**planned},
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=SHARD_BYTES,
        )
        self.folder, self.file_of = folder, split.tensor_to_filename
        self.is_sharded = split.is_sharded
        self.total = {
            "total_parameters": sum(tensor.numel() for tensor in planned.values()),
            "total_size": sum(tensor.nbytes for tensor in planned.values()),
        }
        self._missing = {name: (tensor.shape, tensor.dtype) for name, tensor in planned.items()}
        self._start: dict[str, int] = {}
        for name, names in split.filename_to_tensors.items():
            self._write_header(folder / name, {one: planned[one] for one in names})

    def _write_header(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Write a file with its header and room for its tensors. Those of wide elements come first, for alignment."""
        order = sorted(
            tensors, key=lambda name: (-tensors[name].element_size(), FILE_DTYPES[tensors[name].dtype], name)
        )
        header, starts = file_header({name: tensors[name] for name in order}, format="pt")
        self._start |= starts
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor to its place."""
        if self._missing.pop(name, None) != (tensor.shape, tensor.dtype):
            raise RuntimeError(f"{name}: the tensor differs from the planned one")
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        with (self.folder / self.file_of[name]).open("r+b", buffering=0) as file:
            file.seek(self._start[name])
            while content:
                content = content[file.write(content) :]

    def write_index(self) -> None:
        """Write the index of several files. Call it when all tensors are written."""
        if self._missing:
            raise RuntimeError(f"{len(self._missing)} planned tensors were not written, such as {min(self._missing)}")
        if self.is_sharded:
            content = {"metadata": self.total, "weight_map": self.file_of}
            filesystem.write(self.folder / INDEX, json.dumps(content, indent=2, sort_keys=True) + "\n")


def bytes_to_load(folder: Path) -> int:
    """Return the size of the weights that loading a saved model needs: for an adapter, mostly those of its base."""
    saved = Pretrained(str(folder), is_adapter=(folder / ADAPTER).exists())
    files = saved.weight_files()
    if saved.is_adapter:
        settings = filesystem.read_json_object(folder / ADAPTER)
        files += Pretrained(settings["base_model_name_or_path"], settings.get("revision")).weight_files()
    return sum(path.stat().st_size for path in files)


def stops(model: PreTrainedModel | PeftModel) -> set[int]:
    """Return the tokens at which generation stops."""
    ids = getattr(without_adapter(model).generation_config, "eos_token_id", None)
    return {*ids} if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()


def stop_at(model: PreTrainedModel | PeftModel, tokens: set[int]) -> None:
    """Let generation also stop at these tokens, here and with the saved model."""
    config, new = without_adapter(model).generation_config, sorted(tokens - stops(model))
    if new and config is not None:
        config.eos_token_id = [*sorted(stops(model)), *new]
        # transformers refuses to save a changed config if it has a fault that a published one may have.
        config._original_object_hash = hash(config)


def save_adapter(model: PeftModel, weights: dict[str, torch.Tensor], source: str, folder: Path) -> None:
    """Write an adapter and its config in PEFT's format."""
    if pipeline_stages.is_stage(model):
        import peft

        # PEFT writes only weights for which the model has adapters, so give it the full model.
        model = peft.get_peft_model(pipeline_stages.meta_model(model.config), model.peft_config["default"])
    model.peft_config["default"].base_model_name_or_path = source
    # "auto" would ask the Hub for the size of the base's vocabulary.
    has_rows = any("lora_" not in name for name in weights)
    model.save_pretrained(folder, state_dict=weights, save_embedding_layers=has_rows)
    if (generation := without_adapter(model).generation_config) is not None:
        generation.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def stored_dtype(config: PretrainedConfig, source: Pretrained) -> torch.dtype:
    """Return the dtype of the weights in a pretrained checkpoint, which is also the dtype of the saved model."""
    dtype = config.dtype or config.get_text_config().dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    for path in source.weight_files()[:1]:
        with safe_open(path, "pt") as file:
            found = {file.get_tensor(name).dtype for name in [*file.keys()][:1]}
        return next((one for one in found if one.is_floating_point), torch.float32)
    return torch.float32
