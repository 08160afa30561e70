"""Create the optimizer and compute the learning rate of each step, as the recipe describes."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from gearbox.config.recipe_values import Optim, Schedule
from gearbox.model.probes import numberless
from gearbox.sharding.full_parameters import local_and_computed

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the polynomial of https://kellerjordan.github.io/posts/muon
ITERATIONS = 5


def make_optimizer(model: nn.Module, optim: Optim, unreached: Collection[str] = ()) -> torch.optim.Optimizer:
    """Return the optimizer over the trainable weights.

    Biases, norms and DoRA magnitudes are exempt from weight decay, because zero is not a neutral value for them.
    Weights that get no gradient, `unreached` by the loss (`probes.unreached_parameters`), are exempt as well: some
    engines would decay them and others would not.
    """
    by_kind: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    seen: set[nn.Parameter] = set()  # tied weights belong to several modules
    still = {parameter for name, parameter in model.named_parameters() if numberless(name) in unreached}
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    of_head = set() if head is None else {*head.modules()}
    for module in model.modules():
        is_norm = any(word in type(module).__name__.lower() for word in ("norm", "dora"))
        is_layer = not is_norm and not isinstance(module, nn.Embedding) and module not in of_head
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                is_matrix = is_layer and name == "weight" and parameter.dim() == 2
                is_exempt = is_norm or name == "bias" or parameter in still
                by_kind[optim.name == "muon" and is_matrix, is_exempt].append(parameter)
    groups = _groups(by_kind, optim.weight_decay)
    if optim.name in ("adamw", "muon"):
        adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        return adamw if optim.name == "adamw" else Muon(adamw)
    import bitsandbytes

    # On a CPU the optimizer computes the same steps without paging.
    warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
    bits, paged = 8 if optim.name.endswith("8bit") else 32, optim.name.startswith("paged")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, optim_bits=bits, is_paged=paged
    )
    return optimizer


def _groups(by_kind: dict[tuple[bool, bool], list[nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups. The keys are whether Muon steps the parameters, and whether they do not decay."""
    groups: list[dict[str, Any]] = []
    for (is_stepped_by_muon, is_exempt), parameters in sorted(by_kind.items()):
        group = {"params": parameters, "weight_decay": 0.0 if is_exempt else weight_decay}
        groups.append(group | {"momentum": MOMENTUM} if is_stepped_by_muon else group)
    return groups


class Muon(torch.optim.Optimizer):
    """Muon for the groups of matrices, which have a momentum, and AdamW for the other groups.

    Torch's own Muon has no AdamW, and computes in bfloat16 also where that is slow. It would multiply shards of a
    matrix in an order that depends on the gear.
    """

    def __init__(self, adamw: torch.optim.AdamW) -> None:
        """Take the groups of an AdamW that has not made a step."""
        super().__init__(adamw.param_groups, adamw.defaults)
        adamw.param_groups = []  # an engine replaces the groups here; the old ones would keep the full weights
        self._adamw = adamw

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of every weight that has a gradient."""
        loss = None if closure is None else closure()
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]
        self._adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if "momentum" in group else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, group)
        return loss

    def _step_matrix(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Step a matrix. Ranks with its shards gather the update, and each takes its own part: all make this call."""
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert gradient is not None
        update = gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - momentum), momentum)  # Nesterov's
        local, update = local_and_computed(parameter, update, orthogonalized)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        # This factor gives the update the root mean square of AdamW's (arXiv 2502.16982), so one rate suits both.
        local.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the same singular vectors, and singular values near 1, by Newton-Schulz iterations.

    A GPU computes it in bfloat16, as Muon is used elsewhere; a CPU, often without units for that, in fp32.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def learning_rate(step: int, num_steps: int, optim: Optim, schedule: Schedule) -> float:
    """Return the learning rate of step 0, 1, ... This is a pure function, so no engine can advance it wrongly."""
    num_warmup_steps = schedule.num_warmup_steps(num_steps)
    if step < num_warmup_steps:
        return optim.lr * (step + 1) / num_warmup_steps
    start = num_warmup_steps if schedule.name != "wsd" else num_steps - schedule.num_decay_steps(num_steps)
    progress = max(0, step - start) / max(1, num_steps - start)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "wsd": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[schedule.name]
    return optim.lr * shape
