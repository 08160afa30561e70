"""Compute the loss of an output head chunk by chunk, with its gradients: no logits are kept.

Shapes: N tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from gearbox.kernels.lora import autocast_dtype
from gearbox.planning import layer_memory

NUM_LOGITS = {"cpu": layer_memory.NUM_LOGITS_ON_CPU, "cuda": layer_memory.NUM_LOGITS}
"""Logits of a chunk by type of device: 64 MiB and 256 MiB in fp32. More would not be faster."""


def chunk_tokens(num_rows: int, device: torch.device) -> int:
    """Return how many rows of so many numbers are computed at one time, such as the tokens of V logits each."""
    return max(1, NUM_LOGITS.get(device.type, 2**26) // num_rows)


def cross_entropy_sum(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float = 1.0, cap: float | None = None
) -> torch.Tensor:
    """Return the sum of the cross entropies of all tokens, [] in fp32, where logits are hidden @ weight.T.

    hidden: [N, H]. weight: [V, H]. labels: [N], all of them targets. `scale` multiplies the logits; `cap` bounds them
    by tanh. The product is computed in the dtype of autocast if that is on, and the softmax in fp32.
    """
    total: torch.Tensor = _CrossEntropySum.apply(hidden, weight, labels, scale, cap)  # type: ignore[no-untyped-call]
    return total


def log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float = 1.0, cap: float | None = None
) -> torch.Tensor:
    """Return the log-probability of each token's target, [N] in fp32. The arguments are those of `cross_entropy_sum`.

    With a frozen weight the forward pass computes the gradient of each token, and the backward pass scales it. The
    gradient of a weight is a sum over tokens that the backward pass weighs, so it needs the logits again.
    """
    losses: torch.Tensor = _CrossEntropies.apply(hidden, weight, labels, scale, cap)  # type: ignore[no-untyped-call]
    return -losses


class _Context(Protocol):
    """Name what autograd gives to a function, and what the functions here keep in it."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    """Those of the hidden states and of the weight."""
    shape: tuple[float, float | None]
    """The factor and the bound of the logits."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors as `saved_tensors`."""


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropies, [N] in fp32, as `log_probs` computes them. The logits, [N, V], are overwritten."""
    return _losses_and_gradient(logits, labels, 1.0, None, wants_gradient=False)[0]


class _CrossEntropySum(torch.autograd.Function):
    """The sum of cross entropies. The forward pass computes the gradients, because it has the probabilities."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> torch.Tensor:
        dtype = autocast_dtype(hidden) or hidden.dtype
        logits = _Logits(hidden.to(dtype), weight.to(dtype), labels, scale, cap)
        of_hidden, of_weight = _empty_gradients(logits, ctx.needs_input_grad)
        total = logits.losses(of_hidden, of_weight).sum()
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: _Context, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            # In place, since both are large. Autograd notices if a second backward pass would use them again.
            gradients.append(None if gradient is None else gradient.mul_(upstream.to(gradient.dtype)).to(dtype))
        return *gradients, None, None, None


class _CrossEntropies(torch.autograd.Function):
    """The cross entropy of each token. Where the weight is trained, the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> torch.Tensor:
        dtype = autocast_dtype(hidden) or hidden.dtype
        logits = _Logits(hidden.to(dtype), weight.to(dtype), labels, scale, cap)
        ctx.dtypes, ctx.shape = (hidden.dtype, weight.dtype), (scale, cap)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(logits.states, weight, labels)
            return logits.losses()
        of_hidden, _ = _empty_gradients(logits, ctx.needs_input_grad)
        losses = logits.losses(of_hidden)
        ctx.save_for_backward(of_hidden)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.needs_input_grad[1]:
            states, weight, labels = ctx.saved_tensors
            logits = _Logits(states, weight.to(states.dtype), labels, *ctx.shape)
            of_hidden, of_weight = _empty_gradients(logits, ctx.needs_input_grad)
            logits.losses(of_hidden, of_weight, upstream)
        else:
            (of_hidden,), of_weight = ctx.saved_tensors, None
            of_hidden = None if of_hidden is None else of_hidden.mul_(upstream[:, None])
        pairs = zip((of_hidden, of_weight), ctx.dtypes, strict=True)
        return *[None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs], None, None, None


@dataclass(frozen=True)
class _Logits:
    """The logits of an output head, of which only a chunk is in memory at a time."""

    states: torch.Tensor
    """[N, H], in the dtype to compute in."""
    rows: torch.Tensor
    """[V, H], in the same dtype."""
    labels: torch.Tensor
    scale: float
    cap: float | None

    def losses(
        self,
        of_hidden: torch.Tensor | None = None,
        of_weight: torch.Tensor | None = None,
        upstream: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the cross entropy of each token, [N] in fp32.

        Write its gradient to `of_hidden`, [N, H], and add it to `of_weight`, [V, H] in fp32, if these are given. Each
        token's gradient is first multiplied by its number in `upstream`, [N].
        """
        states, rows = self.states, self.rows
        losses = torch.empty(len(states), dtype=torch.float32, device=states.device)
        wants_gradient = of_hidden is not None or of_weight is not None
        size = min(chunk_tokens(len(rows), rows.device), len(states))
        logits = states.new_empty(size, len(rows))  # one buffer, since a CPU would map new memory for each chunk
        for first in range(0, len(states), size or 1):
            part = slice(first, first + size)
            chunk = torch.mm(states[part], rows.T, out=logits[: len(states[part])])
            losses[part], gradient = _losses_and_gradient(
                chunk, self.labels[part], self.scale, self.cap, wants_gradient=wants_gradient
            )
            if gradient is None:
                continue
            if upstream is not None:
                gradient *= upstream[part, None]
            gradient = gradient if gradient is chunk else chunk.copy_(gradient)
            if of_hidden is not None:
                torch.mm(gradient, rows, out=of_hidden[part])
            if of_weight is not None and states.dtype == torch.float32:
                of_weight.addmm_(gradient.T, states[part])
            elif of_weight is not None:
                _add_product(of_weight, gradient, states[part])
        return losses


def _empty_gradients(
    logits: _Logits, needs_gradient: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return tensors for the gradients of the hidden states and of the weight, or None where none is needed."""
    return (
        torch.empty_like(logits.states) if needs_gradient[0] else None,
        torch.zeros_like(logits.rows, dtype=torch.float32) if needs_gradient[1] else None,
    )


def _add_product(total: torch.Tensor, gradient: torch.Tensor, states: torch.Tensor) -> None:
    """Add gradient.T @ states, [V, H], to a total in fp32, in pieces: the product is in bf16 and large."""
    size = chunk_tokens(states.shape[1], states.device)
    for first in range(0, len(total), size):
        total[first : first + size] += gradient[:, first : first + size].T @ states


def _losses_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, scale: float, cap: float | None, *, wants_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the cross entropies, [N], and the gradient of each with respect to its unscaled logits, [N, V].

    logits: [N, V]. If they are in fp32, they are overwritten, with the gradient if it is wanted.
    """
    values, slope = logits.float(), None
    if scale != 1.0:
        values *= scale
    if cap:
        values.div_(cap).tanh_()
        slope = 1 - values.square() if wants_gradient else None
        values *= cap
    chosen = labels[:, None]
    values -= values.amax(1, keepdim=True)
    target = values.gather(1, chosen)
    sums = values.exp_().sum(1, keepdim=True)
    losses = (sums.log() - target)[:, 0]
    if not wants_gradient:
        return losses, None
    values /= sums
    values.scatter_add_(1, chosen, torch.full_like(target, -1.0))
    if slope is not None:
        values *= slope
    if scale != 1.0:
        values *= scale
    return losses, values
