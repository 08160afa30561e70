"""Compute norms and gated activations in functions that save only their inputs for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from gearbox.kernels.origins import apply, remember

aten = torch.ops.aten


class NormStyle(NamedTuple):
    """Describe how a family's RMSNorm applies its weight."""

    offset: int
    """A number that is added to the weight: 1 in Gemma."""
    rounds_first: bool
    """True if the normed input is rounded to its dtype before it is multiplied by the weight."""


NORM_STYLES = (NormStyle(0, True), NormStyle(0, False), NormStyle(1, False))


class Activation(NamedTuple):
    """An activation and its derivative."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[..., torch.Tensor]
    """Multiply the gradient of the output by the derivative at the input, and write it to `grad_input`."""


ACTIVATIONS = (
    Activation(F.silu, aten.silu_backward.grad_input),
    Activation(partial(F.gelu, approximate="tanh"), partial(aten.gelu_backward.grad_input, approximate="tanh")),
    Activation(F.gelu, aten.gelu_backward.grad_input),
)


def _apply_norm(style: NormStyle, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the output of a norm for its input and the inverse of its root mean square."""
    normed = x.float() * rstd
    if not style.rounds_first:
        return normed.mul_(weight.float() + style.offset if style.offset else weight).to(x.dtype)
    normed = normed.to(x.dtype)
    return normed.mul_(weight) if weight.dtype == x.dtype else weight * normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor,
        style: NormStyle,
    ) -> torch.Tensor:
        ctx.style = style
        ctx.save_for_backward(x, rstd, weight)
        return _apply_norm(style, x, rstd, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        x, rstd, weight = ctx.saved_tensors
        dx = dw = None
        normed = x.float() * rstd
        if ctx.needs_input_grad[2]:
            dw = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            gradient = (dy * (weight.float() + ctx.style.offset if ctx.style.offset else weight)).float()
            along = (gradient * normed).mean(-1, keepdim=True)
            dx = gradient.addcmul_(normed, along, value=-1).mul_(rstd).to(x.dtype)
        return dx, None, dw, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return _apply_gate(activation, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        gate, up = ctx.saved_tensors
        dgate = dy * up
        ctx.activation.backward(dgate, gate, grad_input=dgate)
        return None, dgate, ctx.activation.forward(gate).mul_(dy)


def _apply_gate(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return activation.forward(gate).mul_(up)


def norm_forward(style: NormStyle, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the output of an RMSNorm of this style."""
    weight = cast(torch.Tensor, norm.weight)
    if type(weight) is not nn.Parameter or type(x) is not torch.Tensor or torch.compiler.is_compiling():
        return cast(torch.Tensor, type(norm).forward(norm, x))
    with torch.no_grad():
        rstd = x.float().square().mean(-1, keepdim=True).add_(epsilon(norm)).rsqrt_()
    return remember(apply(_RMSNorm, x, rstd, weight, style), partial(_apply_norm, style), x, rstd, weight)


def gated_forward(activation: Activation, mlp: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the output of a gated MLP with this activation."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    if type(gate) is not torch.Tensor or type(up) is not torch.Tensor or torch.compiler.is_compiling():
        return cast(torch.Tensor, mlp.down_proj(mlp.act_fn(gate) * up))
    y = apply(_Gated, activation, gate, up)
    return cast(torch.Tensor, mlp.down_proj(remember(y, partial(_apply_gate, activation), gate, up)))


def epsilon(norm: nn.Module) -> float:
    """Return the number that a norm adds to the mean square."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)  # type: ignore[arg-type]
