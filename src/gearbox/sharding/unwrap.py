"""Reach what is inside: below the wrappers of engines and adapters, and the text part of a model that also sees images.

A composite model has a text decoder and towers for images or sound. Gearbox trains its text: the towers are never
built, and all names stay those of the full model. The last functions reach the blocks, the decoder's layers, of FSDP2.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import GenerationMixin
from transformers.models.auto import modeling_auto

from gearbox.errors import UserError
from gearbox.kernels.blocks import compiling_all

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

STEPPED_SHARD = "stepped_shard"
"""The attribute of a parameter with the local shard that the optimizer steps in its place."""


def without_adapter(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the model below an adapter, or the model itself if it has no adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer below accelerate's wrapper and DeepSpeed's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def resharded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters as the optimizer knows them.

    FSDP2 leaves the outermost parameters gathered after a forward pass without a backward pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def is_composite(config: PretrainedConfig) -> bool:
    """Return True for the config of a model with a text decoder and towers."""
    try:
        return config.get_text_config() is not config
    except ValueError:  # two texts, for example one that describes music and its codes
        return False


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a language model with this config, with its towers if it has any, or None."""
    mappings = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    if is_composite(config):  # of these, the mapping of causal models would give some without their towers
        mappings = [
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
            *mappings,
        ]
    return next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)


def text_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a model without its towers, for `from_pretrained`, which then reads only what is left."""
    full_class = model_class(config)
    if full_class is None or not is_composite(config):
        return cast("type[PreTrainedModel]", full_class)

    def build(self: PreTrainedModel, config: PretrainedConfig, *arguments: object, **options: object) -> None:
        full_class.__init__(self, config, *arguments, **options)
        drop_towers(self)

    return type(full_class.__name__, (full_class,), {"__init__": build, "__module__": full_class.__module__})


def drop_towers(model: PreTrainedModel) -> None:
    """Remove all of a composite model but its text decoder and its output head, in place."""
    kept = [decoder_of(model), model.get_output_embeddings()]
    towers = []

    def prune(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            inside = [*child.modules()]
            if any(child is one for one in kept):
                continue
            if any(one is module for one in kept for module in inside):
                prune(child, f"{prefix}{name}.")
            else:
                towers.append(f"{prefix}{name}.")
                setattr(parent, name, None)
        for name in dict(parent.named_parameters(recurse=False)):
            towers.append(f"{prefix}{name}")
            setattr(parent, name, None)

    prune(model, "")
    # Otherwise from_pretrained would list the towers' weights as unexpected.
    model._keys_to_ignore_on_load_unexpected = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(f"^{re.escape(name)}" for name in towers),
    }


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a language model that turns token ids into the hidden states that enter the output head."""
    inner = model.get_decoder() if is_composite(model.config) else model.base_model
    embedding = model.get_input_embeddings()
    while isinstance(inner, GenerationMixin):  # a model with a head: Llama 4's names a part that it does not have
        inner = next(child for child in inner.children() if any(module is embedding for module in child.modules()))
    return cast("PreTrainedModel", inner)


def step_on_local_shards(optimizer: Optimizer) -> None:
    """Let an elementwise optimizer step each rank's local shard (FSDP2): its kernels do not support DTensor."""
    pairs: list[tuple[Any, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if isinstance(parameter, DTensor):
                local = nn.Parameter(parameter.to_local())
                setattr(parameter, STEPPED_SHARD, local)  # so that state is saved under its name
                pairs.append((parameter, local))
                group["params"][i] = local

    def lend_gradients(*_: object) -> None:
        for parameter, local in pairs:
            local.grad = parameter.grad.to_local() if parameter.grad is not None else None

    def drop_gradients(*_: object) -> None:
        for parameter, local in pairs:
            parameter.grad = local.grad = None

    optimizer.register_step_pre_hook(lend_gradients)
    optimizer.register_step_post_hook(drop_gradients)


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
    """Check blocks during training steps in this context: all are compiled, and FSDP2's hooks run around them.

    Raise UserError if not. The compiler can leave out the hooks of a module that is compiled as a whole. Its weights
    are then gathered late or never freed, which costs more than compiling saves.
    """
    usual = [block.forward for block in blocks]
    seen: set[nn.Module] = set()
    for block in blocks:
        block.forward = functools.partial(_watched, block, block.forward, seen)
    try:
        with compiling_all():
            yield
    finally:
        for block, forward in zip(blocks, usual, strict=True):
            block.forward = forward
    problems = {
        "were not called": [block for block in blocks if block not in seen],
        "keep their full weights after a step": [block for block in blocks if not _has(block, "is_sharded")],
    }
    for text, wrong in problems.items():
        if wrong:
            raise UserError(f"perf.compile: {len(wrong)} of {len(blocks)} layers {text}; use compile: false")


def _watched(
    block: nn.Module, forward: Callable[..., object], seen: set[nn.Module], *arguments: object, **options: object
) -> object:
    if not _has(block, "is_unsharded"):
        raise UserError("perf.compile: FSDP2 does not gather a layer's weights before it computes; use compile: false")
    seen.add(block)
    return forward(*arguments, **options)


def _has(block: nn.Module, state: str) -> bool:
    """Return True if all weights that FSDP2 shards are in this state, is_sharded or is_unsharded."""
    groups = block._get_fsdp_state()._fsdp_param_groups if isinstance(block, FSDPModule) else ()
    return all(getattr(group, state) for group in groups)


def are_separate(model: nn.Module, name: str, embedding: nn.Module | None) -> bool:
    """Return True if the model has layers of this class that share no parameters, as Zamba's do, or the embedding."""
    layers = [module for module in model.modules() if type(module).__name__ == name]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    has_embedding = any(module is embedding for layer in layers for module in layer.modules())
    return bool(layers) and not has_embedding and len(parameters) == len({*parameters})


def shares_parameters(model: nn.Module, ends: tuple[nn.Module | None, ...]) -> bool:
    """Return True if the embedding or the output head shares a parameter with a third module (BERT's bias)."""
    theirs = {parameter for end in ends if end is not None for parameter in end.parameters()}
    inside = {module for end in ends if end is not None for module in end.modules()}
    others = [module for module in model.modules() if module not in inside]
    return any(parameter in theirs for module in others for parameter in module.parameters(recurse=False))
