"""Compute the loss of an output head chunk by chunk, with its gradients in the forward pass: no logits are kept.

Shapes: N tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch

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


class _CrossEntropySum(torch.autograd.Function):
    """The sum of cross entropies. The forward pass computes the gradients, because it has the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> torch.Tensor:
        dtype = autocast_dtype(hidden) or hidden.dtype
        states, rows = hidden.to(dtype), weight.to(dtype)
        of_hidden = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = min(chunk_tokens(len(weight), weight.device), len(states))
        logits = states.new_empty(size, len(weight))  # one buffer, since a CPU would map new memory for each chunk
        for first in range(0, len(hidden), size or 1):
            part = slice(first, first + size)
            chunk = torch.mm(states[part], rows.T, out=logits[: len(states[part])])
            loss, gradient = _loss_and_gradient(chunk, labels[part], scale, cap)
            total += loss
            gradient = gradient if gradient is chunk else chunk.copy_(gradient)
            if of_hidden is not None:
                torch.mm(gradient, rows, out=of_hidden[part])
            if of_weight is not None and dtype == torch.float32:
                of_weight.addmm_(gradient.T, states[part])
            elif of_weight is not None:
                _add_product(of_weight, gradient, states[part])
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        gradients = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            # In place, since both are large. Autograd notices if a second backward pass would use them again.
            gradients.append(None if gradient is None else gradient.mul_(upstream.to(gradient.dtype)).to(dtype))
        return *gradients, None, None, None


def _add_product(total: torch.Tensor, gradient: torch.Tensor, states: torch.Tensor) -> None:
    """Add gradient.T @ states, [V, H], to a total in fp32, in pieces: the product is in bf16 and large."""
    size = chunk_tokens(states.shape[1], states.device)
    for first in range(0, len(total), size):
        total[first : first + size] += gradient[:, first : first + size].T @ states


def _loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, scale: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross entropies, [], and its gradient with respect to the unscaled logits, [N, V].

    logits: [N, V]. If they are in fp32, the gradient overwrites them.
    """
    values = logits.float()
    if scale != 1.0:
        values *= scale
    if cap:
        values.div_(cap).tanh_()
        slope = 1 - values.square()
        values *= cap
    chosen = labels[:, None]
    values -= values.amax(1, keepdim=True)
    target = values.gather(1, chosen)
    sums = values.exp_().sum(1, keepdim=True)
    loss = (sums.log() - target).sum()
    values /= sums
    values.scatter_add_(1, chosen, torch.full_like(target, -1.0))
    if cap:
        values *= slope
    if scale != 1.0:
        values *= scale
    return loss, values
