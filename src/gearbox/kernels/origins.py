"""Keep what a tensor was computed from, so that the backward pass computes it again instead of storing it.

A norm and an activation are cheap to compute, and their results are large. A layer that needs such a result in its
backward pass saves the inputs of the norm or activation instead. Those are saved already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch


class Origin(NamedTuple):
    """A function and the tensors from which it computes a tensor again."""

    compute: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def remember(tensor: torch.Tensor, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its origin. A view or a copy of it has no origin."""
    tensor.origin = Origin(compute, tuple(part.detach() for part in inputs))  # type: ignore[attr-defined]
    return tensor


def origin_of(tensor: torch.Tensor) -> Origin:
    """Return how to compute the tensor again; a tensor without an origin is its own."""
    return getattr(tensor, "origin", Origin(_itself, (tensor,)))


def apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:  # noqa: ANN401
    """Return the output of an autograd function that has one."""
    return cast(torch.Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]
