"""Add an adapter to the weights of its base, one layer at a time, and compute a model in fp32, one layer at a time.

A merged weight is computed in fp32 and rounded once. 4-bit weights are dequantized first, because the adapter was
trained on their dequantized values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gearbox.errors import UserError
from gearbox.kernels.blocks import blocks_of
from gearbox.model.export import file_dtypes
from gearbox.sharding.sharded_state import persistent_buffers
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"
LAYER = ".base_layer"


@dataclass
class MergedTensors:
    """The tensors of a model with its adapter added, by their names without adapter.

    Each one is computed when it is written (see `gearbox.model.export.Tensors`).
    """

    model: PreTrainedModel | PeftModel
    dtype: torch.dtype
    is_untied: bool = False
    """True if the embedding and the head shared a weight, but have other adapters."""
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    """A tensor without data for each one."""

    def __post_init__(self) -> None:
        self._base = without_adapter(self.model)
        self._adapted = adapters_by_layer(self._base)
        adapters = {id(m) for layer in self._adapted.values() for one in layer for m in _own_modules(one)}
        owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for path, module in self._base.named_modules(remove_duplicate=False):
            for name, parameter in module.named_parameters(recurse=False) if id(module) not in adapters else ():
                owners.setdefault(id(parameter), []).append((_clean(path, name), module, name))
        self._places: list[tuple[str, nn.Module, str]] = []
        for places in owners.values():
            differ = len(places) > 1 and any(module in self._adapted for _, module, _ in places)
            self.is_untied |= differ
            self._places += places if differ else places[:1]
        self._buffers = {_clean("", name): buffer for name, buffer in persistent_buffers(self._base)}
        for name in [name for name in self._buffers if "weight." in name]:  # the state of a 4-bit weight
            del self._buffers[name]
        dtype_of = file_dtypes(self._base, self.dtype)
        for name, module, own in self._places:
            shape = _shape(getattr(module, own))
            self.expected[name] = torch.empty(shape, dtype=dtype_of(name), device="meta")
        for name, buffer in self._buffers.items():
            self.expected[name] = torch.empty_like(buffer, device="meta")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module, own in self._places:
            yield name, merged(module, own, self._adapted.get(module, [])).to(self.expected[name].dtype)
        yield from self._buffers.items()


def adapters_by_layer(base: PreTrainedModel) -> dict[nn.Module, list[LoraLayer]]:
    """Return the adapters of each adapted layer. A layer of experts has one for each of its weights."""
    from peft.tuners.lora import LoraLayer

    found: dict[nn.Module, list[LoraLayer]] = {}
    for module in base.modules():
        if isinstance(module, LoraLayer):
            found.setdefault(module.get_base_layer(), []).append(module)
    return found


def _own_modules(adapter: LoraLayer) -> Iterator[nn.Module]:
    """Yield the modules of an adapter that are not those of the layer below it."""
    below = {*adapter.base_layer.modules()}
    yield from (module for module in adapter.modules() if module not in below)


def _clean(path: str, name: str) -> str:
    return f"{path}.{name}".replace(LAYER, "").removeprefix(".")


def _shape(parameter: torch.Tensor) -> torch.Size:
    state = getattr(parameter, "quant_state", None)
    return parameter.shape if state is None else torch.Size(state.shape)


@torch.no_grad()
def merged(layer: nn.Module, name: str, adapters: list[LoraLayer]) -> torch.Tensor:
    """Return the parameter `name` of a layer with its adapters added, in fp32, or as it is without any."""
    parameter: torch.Tensor = getattr(layer, name)
    if getattr(parameter, "quant_state", None) is not None:
        from peft.utils.integrations import dequantize_module_weight

        parameter = dequantize_module_weight(layer)
    ours = [one for one in adapters if getattr(one, "parameter_name", "weight") == name]
    if not ours:
        return parameter.detach()
    weight = parameter.detach().float()
    for one in ours:
        weight = _with_delta(weight, one, isinstance(layer, Conv1D))
    if not weight.isfinite().all():
        raise UserError(f"SOURCE: the adapter of {name} in {type(layer).__name__} makes it infinite; train it again")
    return weight


def _with_delta(weight: torch.Tensor, adapter: LoraLayer, is_transposed: bool) -> torch.Tensor:
    """Return the weight with LoRA's product added. DoRA then gives each output the length that it learnt."""
    total: torch.Tensor = weight + adapter.get_delta_weight(ADAPTER).float()
    if ADAPTER not in adapter.lora_variant:
        return total
    magnitude = adapter.lora_magnitude_vector[ADAPTER].weight.float()
    is_transposed = is_transposed or isinstance(adapter.get_base_layer(), nn.Embedding)
    lengths = torch.linalg.norm(total, dim=0 if is_transposed else 1)
    factor = magnitude / lengths
    scaled: torch.Tensor = total * (factor.view(1, -1) if is_transposed else factor.view(-1, 1))
    return scaled


@contextmanager
def in_fp32(model: PreTrainedModel | PeftModel, as_merged: torch.dtype | None = None) -> Iterator[None]:
    """Let the model compute in fp32, although its weights stay in their dtype.

    Only one layer at a time, and the head, are converted.

    With `as_merged`, it computes with merged weights, rounded to that dtype, and without adapters.
    """
    base = without_adapter(model)
    adapted = adapters_by_layer(base) if base is not model else {}
    kept: dict[nn.Module, list[Callable[[], None]]] = {}
    dtype_of = file_dtypes(base, as_merged or torch.float32)
    paths = {module: path for path, module in base.named_modules()}

    def convert(unit: nn.Module, *_: object) -> None:
        undo = kept.setdefault(unit, [])
        for module in units[unit]:
            for name, parameter in [*module.named_parameters(recurse=False)]:
                is_packed = getattr(parameter, "quant_state", None) is not None
                if as_merged is not None and (parameter.is_floating_point() or is_packed):
                    weight = merged(module, name, adapted.get(module, []))
                    weight = weight.to(dtype_of(_clean(paths[module], name))).float()
                elif is_packed or not parameter.is_floating_point():
                    continue
                else:
                    weight = parameter.data.float()
                if is_packed:  # its own forward takes only packed weights
                    module.forward = functools.partial(
                        nn.functional.linear, weight=weight, bias=getattr(module, "bias", None)
                    )
                    undo.append(functools.partial(delattr, module, "forward"))
                else:
                    undo.append(functools.partial(setattr, parameter, "data", parameter.data))
                    parameter.data = weight

    def revert(unit: nn.Module, *_: object) -> None:
        for put_back in reversed(kept.pop(unit, [])):
            put_back()

    units = _units(base)
    head = base.get_output_embeddings()  # some families cast its input to its dtype before it is called
    whole = [one for one in (head.parameters() if head is not None else ()) if not hasattr(one, "quant_state")]
    stored = [one.data for one in whole]
    for one in whole:
        one.data = one.data.float()
    hooks = [unit.register_forward_pre_hook(convert) for unit in units]
    hooks += [unit.register_forward_hook(revert, always_call=True) for unit in units]
    try:
        with model.disable_adapter() if as_merged is not None and base is not model else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for one, data in zip(whole, stored, strict=True):
            one.data = data


def _units(base: PreTrainedModel) -> dict[nn.Module, list[nn.Module]]:
    """Return what is converted at a time, and its modules: blocks, other adapted layers, and other layers."""
    units: dict[nn.Module, list[nn.Module]] = {block: [*block.modules()] for block in blocks_of(base)}
    inside = {module for modules in units.values() for module in modules}
    for module in base.modules():
        if module in inside:
            continue
        if hasattr(module, "base_layer"):
            units[module] = [*module.modules()]
            inside.update(units[module])
        elif next(module.parameters(recurse=False), None) is not None:
            units[module] = [module]
    return units
