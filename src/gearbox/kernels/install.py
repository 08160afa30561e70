"""Replace the forward of the layers of a model by a leaner one that computes the same.

A norm or an MLP is recognized by its results: a small copy of it must compute what ours does.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from gearbox.kernels.lora import lean_adapter, linear_forward, lora_forward
from gearbox.kernels.pointwise import ACTIVATIONS, NORM_STYLES, gated_forward, norm_forward

Forward = Callable[..., torch.Tensor]
# Each exists once, because the compiler makes a graph for each function that it meets.
NORMS: list[Forward] = [partial(norm_forward, style) for style in NORM_STYLES]
GATED_MLPS: list[Forward] = [partial(gated_forward, activation) for activation in ACTIVATIONS]
WIDTH = 8  # features of the small copies
KIND = "gearbox_kernel"  # the attribute of a layer that says which kind of forward it has


def install_kernels(model: Any) -> None:  # noqa: ANN401
    """Replace the forward of the layers that are known.

    Call this after adapters are attached and before an engine wraps the model.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, module in model.named_modules():
            is_inside = ".lora_" in name  # LoRA's own matrices
            if module is not head and not is_inside and (found := _leaner(module)) is not None:
                vars(module)[KIND] = found[0]
                module.forward = MethodType(found[1], module)


def installed_kernels(model: nn.Module) -> str:
    """Return how many layers of each kind have our forward."""
    counts = Counter(vars(module)[KIND] for module in model.modules() if KIND in vars(module))
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def _leaner(module: nn.Module) -> tuple[str, Forward] | None:
    """Return the kind of a layer and its leaner forward, or None if we know no better one.

    Tensor parallelism has already replaced the forward of layers that it shards.
    """
    if "forward" in vars(module):
        return None
    if type(module).__module__.startswith("peft.tuners.lora.") and type(module).__name__ in ("Linear", "Linear4bit"):
        return ("LoRA", lora_forward) if lean_adapter(module) else None
    if type(module) is nn.Linear:
        return ("linear", linear_forward) if module.weight.requires_grad else None
    children = set(module._modules)
    if not children and set(module._parameters) == {"weight"} and not module._buffers:
        forward = _first_equal(NORMS, _small_norm(module))
        return ("RMSNorm", forward) if forward else None
    if children == {"gate_proj", "up_proj", "down_proj", "act_fn"} and not module._parameters and not module._buffers:
        forward = _first_equal(GATED_MLPS, _small_mlp(module))
        return ("gated MLP", forward) if forward else None
    return None


def _small_norm(norm: nn.Module) -> nn.Module:
    """Return a small copy of a norm. It shares all but the weight, which an engine may have sharded already."""
    small = copy.copy(norm)
    small._parameters = {"weight": nn.Parameter(torch.rand(WIDTH) + 0.5)}
    return small


def _small_mlp(mlp: nn.Module) -> nn.Module:
    """Return a small copy of a gated MLP with the same activation."""
    small = copy.copy(mlp)
    small._modules = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("gate_proj", "up_proj", "down_proj")}
    small._modules["act_fn"] = mlp.act_fn  # type: ignore[assignment]
    return small


@torch.no_grad()
def _first_equal(candidates: Iterable[Forward], small: nn.Module) -> Forward | None:
    """Return the first candidate that computes what a layer computes, in fp32 and in bf16."""
    x = torch.randn(256, WIDTH) * 3
    for forward in candidates:
        try:
            if all(_same(forward, small.to(dtype), x.to(dtype)) for dtype in (torch.bfloat16, torch.float32)):
                return forward
        except (AttributeError, RuntimeError, TypeError):
            return None  # the layer takes other inputs
    return None


def _same(forward: Forward, layer: nn.Module, x: torch.Tensor) -> bool:
    """Return True if a forward computes what a layer does. In bf16 a few results may be rounded to the other side."""
    ours, theirs = forward(layer, x), type(layer).forward(layer, x)
    eps = torch.finfo(x.dtype).eps
    is_close = torch.allclose(ours.double(), theirs.double(), rtol=2 * eps, atol=8 * eps)
    differ: Any = (ours != theirs).double().mean()
    return ours.dtype == theirs.dtype and is_close and (x.dtype == torch.float32 or bool(differ < 0.02))
