"""What lies below accelerate's, DeepSpeed's and PEFT's wrappers."""

from __future__ import annotations

from typing import Any

import torch


def without_adapter(model: Any) -> Any:
    """Below an adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


FULL_PARAMETER = (
    "whole"  # where a parameter of an optimizer is only this rank's part of one: the attribute that names it
)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Under accelerate's wrapper and DeepSpeed's."""
    while hasattr(optimizer, "optimizer") and isinstance(optimizer.optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
