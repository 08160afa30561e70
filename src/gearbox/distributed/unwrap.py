"""Reach models, optimizers and parameters below the wrappers of accelerate, DeepSpeed, FSDP2 and PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

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
