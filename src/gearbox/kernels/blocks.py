"""Checkpoint and compile the blocks of a decoder.

A block is a layer of the decoder. Only its forward is replaced, so the hooks of engines run around it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers.modeling_layers import GradientCheckpointingLayer

from gearbox.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# At the first selective layer it warns of operations in place, which torch refuses anyway.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
Checkpointing = Literal["none", "selective", "full", "offload"]
Forward = Callable[..., Any]
Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
RUNS = "gearbox_runs"  # the attribute of a block with its Running
# What selective checkpointing keeps: matrix products and attention. All else is recomputed.
KEPT = ("aten::mm", "aten::addmm", "aten::linear", "aten::_grouped_mm", "gearbox::lora")
KEPT_PARTS = ("scaled_dot_product", "varlen_attn", "flash_attn", "gearbox::attend")


class Running(NamedTuple):
    """Describe how a block runs."""

    checkpointing: Checkpointing = "none"
    compiled: bool = False


def running(block: nn.Module) -> Running:
    """Return how this block runs."""
    return cast(Running, vars(block).get(RUNS, Running()))


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of a model: the outermost layers that transformers checkpoints, or names as undivided."""
    names = {*(model._no_split_modules or ())}
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        is_named = any(cls.__name__ in names for cls in type(module).__mro__)  # an engine may derive a class
        if (is_named or isinstance(module, GradientCheckpointingLayer)) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def wrap_blocks(model: PreTrainedModel, checkpointing: Checkpointing, compile_: bool) -> None:
    """Replace the forward of each block by one that is checkpointed and compiled, as asked.

    Raise UserError if the family has no known blocks.
    """
    if checkpointing == "none" and not compile_:
        return
    blocks = blocks_of(model)
    if not blocks:
        key = "compile: false" if compile_ else "checkpointing: none"
        family = model.config.model_type
        raise UserError(f"perf.{key.split(':')[0]}: the layers of the family {family} are not known; use {key}")
    for block in blocks:
        forward = block.forward
        if checkpointing == "selective":  # inside, because a compiled function decides itself what it saves
            forward = _checkpointed(forward, context_fn=_selective_contexts)
        if compile_:
            forward = _compiled(forward)
        if checkpointing == "full":
            forward = _checkpointed(forward)
        elif checkpointing == "offload":
            forward = _offloaded(_checkpointed(forward))
        block.forward = forward
        vars(block)[RUNS] = Running(checkpointing, compile_)


def _checkpointed(forward: Forward, context_fn: Callable[[], Contexts] = noop_context_fn) -> Forward:
    """Return a forward that recomputes its activations in the backward pass. Frozen inputs need no gradient for it."""
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=context_fn)


def _offloaded(checkpointed: Forward) -> Forward:
    """Return a checkpointed forward whose inputs, the only activations that it saves, wait in pinned host memory."""

    def forward(*arguments: object, **options: object) -> object:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpointed(*arguments, **options)

    return forward


def _compiled(forward: Forward) -> Forward:
    """Return a forward that is compiled for training. Without gradients it runs as it is, at any length of a row."""
    torch._dynamo.config.optimize_ddp = False  # it would split a block at the borders of DDP's buckets
    compiled = torch.compile(forward)

    def train_or_evaluate(*arguments: object, **options: object) -> object:
        return (compiled if torch.is_grad_enabled() else forward)(*arguments, **options)

    return train_or_evaluate


@contextmanager
def compiling_all() -> Iterator[None]:
    """Raise UserError if the compiler would leave layers as they are, because it has made too many graphs."""
    from torch._dynamo import config, exc  # only a compiled run needs the compiler, which takes a second to import

    with config.patch(fail_on_recompile_limit_hit=True):
        try:
            yield
        except exc.FailOnRecompileLimitHit:
            raise UserError(
                "perf.compile: the layers of this model differ too much for the compiler; use compile: false"
            ) from None


def _selective_contexts() -> Contexts:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return, no-untyped-call]


def _policy(_context: object, operation: Any, *_: object, **__: object) -> CheckpointPolicy:  # noqa: ANN401
    name = operation.name()
    is_kept = name.partition(".")[0] in KEPT or any(part in name for part in KEPT_PARTS)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
