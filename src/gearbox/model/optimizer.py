"""Create the optimizer and compute the learning rate of each step, as the recipe describes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection

import torch

from gearbox.config.recipe import Optim, Schedule
from gearbox.model.probes import numberless


def make_optimizer(model: torch.nn.Module, optim: Optim, unreached: Collection[str] = ()) -> torch.optim.Optimizer:
    """Return AdamW over the trainable weights.

    Biases, norms and DoRA magnitudes are exempt from weight decay, because zero is not a neutral value for them.
    Weights that get no gradient, `unreached` by the loss (`probes.unreached_parameters`), are exempt as well: some
    engines would decay them and others would not.
    """
    decayed: list[torch.nn.Parameter] = []
    exempt: list[torch.nn.Parameter] = []
    seen: set[torch.nn.Parameter] = set()  # tied weights belong to several modules
    still = {parameter for name, parameter in model.named_parameters() if numberless(name) in unreached}
    for module in model.modules():
        is_norm = any(word in type(module).__name__.lower() for word in ("norm", "dora"))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                (exempt if is_norm or name == "bias" or parameter in still else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    import bitsandbytes

    # On a CPU the optimizer computes the same steps without paging.
    warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
    bits, paged = 8 if optim.name.endswith("8bit") else 32, optim.name.startswith("paged")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, optim_bits=bits, is_paged=paged
    )
    return optimizer


def learning_rate(step: int, num_steps: int, optim: Optim, schedule: Schedule) -> float:
    """Return the learning rate of step 0, 1, ... This is a pure function, so no engine can advance it wrongly."""
    num_warmup_steps = schedule.num_warmup_steps(num_steps)
    if step < num_warmup_steps:
        return optim.lr * (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[schedule.name]
    return optim.lr * shape
