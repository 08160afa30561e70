"""Compute linear layers, with or without LoRA, in functions that save little for the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from gearbox.kernels.origins import apply, origin_of

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Frozen = tuple[torch.Tensor, torch.Tensor | None]  # a weight and a bias that are not trained

# Selective checkpointing keeps the results of matrix products, so it must not see the sum in place inside this one.
_LIBRARY: Any = torch.library.Library("gearbox", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("lora(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scaling) -> (Tensor, Tensor)")


def _lora(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a linear layer with its adapter, and the adapter's inner product x A^T."""
    low = x @ a.t()
    return F.linear(x, weight, bias).addmm_(low, b.t(), alpha=scaling), low


_LIBRARY.impl("lora", _lora, "CompositeExplicitAutograd")


class _Lora(torch.autograd.Function):
    """LoRA on a frozen layer: on its weight and bias, or on its output where the weight is not a plain matrix.

    The output has a row for each token: [tokens, features].
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, base: Frozen | torch.Tensor, *adapter: Any) -> torch.Tensor:  # noqa: ANN401
        a, b, scaling = adapter
        rows = x.flatten(0, -2).to(a.dtype)
        if isinstance(base, torch.Tensor):
            weight, low = None, rows @ a.t()
            y = torch.addmm(base.flatten(0, -2), low, b.t(), alpha=scaling)
        else:
            weight = base[0]
            y, low = torch.ops.gearbox.lora(rows, *base, a, b, scaling)
        origin = origin_of(x)
        ctx.compute, ctx.scaling, ctx.shape, ctx.dtype = origin.compute, scaling, x.shape, x.dtype
        ctx.save_for_backward(weight, a, b, low, *origin.inputs)
        return y  # not a view, so that a layer may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows_dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        weight, a, b, low, *inputs = ctx.saved_tensors
        needs_x, needs_base, needs_a, needs_b, _ = ctx.needs_input_grad
        dx = da = db = None
        dlow = (rows_dy @ b).mul_(ctx.scaling)
        if needs_a:
            da = dlow.t() @ ctx.compute(*inputs).flatten(0, -2).to(a.dtype)
        if needs_b:
            db = (rows_dy.t() @ low).mul_(ctx.scaling)
        if needs_x:
            dx = dlow @ a if weight is None else (rows_dy @ weight).addmm_(dlow, a)
            dx = dx.view(ctx.shape).to(ctx.dtype)
        dbase = rows_dy.view(*ctx.shape[:-1], -1) if needs_base else None
        return dx, dbase, da, db, None


class _Linear(torch.autograd.Function):
    """A trained linear layer whose input is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ANN401
        origin = origin_of(x)
        ctx.compute, ctx.dtype = origin.compute, x.dtype
        ctx.save_for_backward(weight, *origin.inputs)
        return F.linear(x.to(weight.dtype), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        weight, *inputs = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows_dy = dy.flatten(0, -2)
        dx = dw = db = None
        if needs_weight:
            dw = rows_dy.t() @ ctx.compute(*inputs).flatten(0, -2).to(weight.dtype)
        if needs_bias:
            db = rows_dy.sum(0)
        if needs_x:
            dx = (rows_dy @ weight).view(*dy.shape[:-1], -1).to(ctx.dtype)
        return dx, dw, db


def linear_forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a linear layer. Its input is not saved if it can be computed again."""
    weight, bias = layer.weight, layer.bias
    dtype = _compute_dtype(x, weight)
    is_lean = dtype is not None and hasattr(x, "origin") and type(weight) is nn.Parameter
    if not is_lean or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return apply(_Linear, x, weight.to(dtype), None if bias is None else bias.to(dtype))


def lora_forward(layer: LoraLayer, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
    """Return the output of a layer with LoRA. Where PEFT would do more than add a product, PEFT computes it."""
    name = None if arguments or options or torch.compiler.is_compiling() else lean_adapter(layer)
    dtype = None if name is None else _compute_dtype(x, layer.lora_A[name].weight)
    if name is None or dtype is None:
        return cast(torch.Tensor, type(layer).forward(layer, x, *arguments, **options))
    plain = layer.base_layer
    base: Frozen | torch.Tensor
    if _is_plain(plain) and plain.weight.dtype == dtype and not any(p.requires_grad for p in plain.parameters()):
        base = plain.weight, plain.bias
    else:
        base = plain(x)
    a, b = (part[name].weight.to(dtype) for part in (layer.lora_A, layer.lora_B))
    return apply(_Lora, x, base, a, b, layer.scaling[name]).view(*x.shape[:-1], -1)


def lean_adapter(layer: LoraLayer) -> str | None:
    """Return the name of the adapter of a layer, or None if it is not a single plain LoRA of whole matrices.

    Engines that shard a layer's own parts put hooks on them, which run only if PEFT calls each part.
    """
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name]:
        return None
    dropout = layer.lora_dropout[name]
    if not isinstance(dropout, nn.Identity) and layer.training:
        return None
    return name if _is_plain(layer.lora_A[name]) and _is_plain(layer.lora_B[name]) else None


def _is_plain(linear: nn.Module) -> bool:
    """Return True if calling a linear layer does no more than multiply by its whole weight."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    is_changed = any(hooks) or "forward" in vars(linear)
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not is_changed


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of the product of an input and a weight, or None if it is not defined."""
    return autocast_dtype(x) or (x.dtype if x.dtype == weight.dtype else None)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes on a tensor's device, or None if it is off."""
    kind = tensor.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None
