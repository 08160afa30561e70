"""Checkpoint and compile the blocks of a decoder, and gather their parameters ahead.

A block is a layer of the decoder. Only its forward is replaced, so the hooks of FSDP2 and DeepSpeed run around it.
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
from torch.distributed.fsdp import FSDPModule
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
KEPT = ("aten::mm", "aten::addmm", "aten::linear", "aten::_grouped_mm")
KEPT_PARTS = ("scaled_dot_product", "varlen_attn", "flash_attn", "gearbox::")


class Running(NamedTuple):
    """What is done with a block."""

    checkpointing: Checkpointing = "none"
    compiled: bool = False


def running(block: nn.Module) -> Running:
    """Return what is done with this block."""
    return cast(Running, vars(block).get(RUNS, Running()))


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of a model: the outermost layers that transformers checkpoints, or names as undivided."""
    names = {*(model._no_split_modules or ())}
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        is_named = any(cls.__name__ in names for cls in type(module).__mro__)  # FSDP2 derives a class of its own
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


def _selective_contexts() -> Contexts:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return, no-untyped-call]


def _policy(_context: object, operation: Any, *_: object, **__: object) -> CheckpointPolicy:  # noqa: ANN401
    name = operation.name()
    is_kept = name.partition(".")[0] in KEPT or any(part in name for part in KEPT_PARTS)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def gather_ahead(blocks: list[nn.Module], num_blocks: int) -> None:
    """Let FSDP2 gather the weights of this many blocks ahead of the one that computes. It does so for one by itself."""
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for i, block in enumerate(sharded if num_blocks > 1 else ()):
        block.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + num_blocks])
        block.set_modules_to_backward_prefetch(sharded[max(0, i - num_blocks) : i][::-1])


def num_gathered_ahead(blocks: list[nn.Module]) -> int:
    """Return the number of blocks that FSDP2 gathers ahead, as its state says."""
    states = [block._get_fsdp_state() for block in blocks if isinstance(block, FSDPModule)]
    return max([1, *(len(state._states_to_forward_prefetch) for state in states)])


def frees_weights(block: FSDPModule) -> bool:
    """Return True if FSDP2 frees the gathered weights of a block between its forward and its backward pass."""
    return all(group.post_forward_mesh_info is not None for group in block._get_fsdp_state()._fsdp_param_groups)


@contextmanager
def checking_hooks(blocks: list[nn.Module]) -> Iterator[None]:
    """Check compiled blocks during a training step in this context: each is compiled, and FSDP2's hooks run around it.

    Raise UserError if not. The compiler can leave out the hooks of a module that is compiled as a whole; its weights
    are then gathered late or never freed, which costs more than compiling saves.
    """
    usual = [block.forward for block in blocks]
    seen: set[nn.Module] = set()
    for block in blocks:
        block.forward = functools.partial(_watched, block, block.forward, seen)
    try:
        yield
    finally:
        for block, forward in zip(blocks, usual, strict=True):
            block.forward = forward
    problems = {
        "were not called": [block for block in blocks if block not in seen],
        "are not compiled": [block for block in blocks if not running(block).compiled],
        "keep their full weights after a step": [block for block in blocks if not _has(block, "is_sharded")],
    }
    for text, wrong in problems.items():
        if wrong:
            raise UserError(f"perf.compile: {len(wrong)} of {len(blocks)} layers {text}; use compile: false")


def _watched(block: nn.Module, forward: Forward, seen: set[nn.Module], *arguments: object, **options: object) -> object:
    if not _has(block, "is_unsharded"):
        raise UserError("perf.compile: FSDP2 does not gather a layer's weights before it computes; use compile: false")
    seen.add(block)
    return forward(*arguments, **options)


def _has(block: nn.Module, state: str) -> bool:
    """Return True if all weights that FSDP2 shards are in this state, is_sharded or is_unsharded."""
    groups = block._get_fsdp_state()._fsdp_param_groups if isinstance(block, FSDPModule) else ()
    return all(getattr(group, state) for group in groups)
