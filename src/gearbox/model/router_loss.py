"""Compute the load-balancing loss of a mixture of experts, and count the tokens of each expert."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import transformers

from gearbox.errors import UserError
from gearbox.rows.units import IGNORE_INDEX
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_balance_loss(router_logits: tuple[torch.Tensor, ...], labels: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Return the load imbalance of the experts, summed over rows and weighted by each row's number of targets, [].

    Each of the E experts contributes E x share of tokens routed to it x its mean probability. A row's imbalance is the
    sum over experts, averaged over layers. It is num_chosen if all experts get equal load, and E if all tokens choose
    the same experts.

    transformers uses the same formula for the complete micro-batch, so its result depends on how ranks share the rows.
    Here each row has its own value, as in DeepSeek-V3 (arXiv 2412.19437, equation 17). Padding is excluded: a row ends
    at its last target.

    router_logits: [B * T, E] of each layer. labels: [B, T].
    """
    is_target, counts = labels != IGNORE_INDEX, is_balanced(labels)
    num_tokens = counts.sum(1).clamp(min=1)[:, None]
    figures = []
    for logits in router_logits:
        probabilities = logits.view(*labels.shape, -1).float().softmax(-1) * counts[..., None]  # [B, T, E]
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(num_chosen).indices, 1.0)
        shares = (chosen * counts[..., None]).sum(1) / num_tokens
        figures.append(probabilities.shape[-1] * (shares * probabilities.sum(1) / num_tokens).sum(-1))
    return (torch.stack(figures).mean(0) * is_target.sum(1)).sum()


def is_balanced(labels: torch.Tensor) -> torch.Tensor:
    """Return True for each token up to the last target of its row, [B, T]: padding does not count."""
    return (labels != IGNORE_INDEX).flip(1).cumsum(1).flip(1) > 0


def count_loads(causal_lm: PreTrainedModel) -> None:
    """Let training passes count the tokens of each expert in `expert_loads` [L, E]; None without experts.

    The forward pass sets `balanced` to the tokens that count, [B, T]. A layer that is computed again in the backward
    pass counts them again, which changes no ratio.
    """
    plan = causal_lm._expand_parallel_plan(causal_lm.ep_plan or {})
    layers = [causal_lm.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]
    causal_lm.expert_loads = torch.zeros(len(layers), layers[0].num_experts) if layers else None

    def count(layer: int, chosen: torch.Tensor) -> None:
        balanced = causal_lm.balanced
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if balanced is not None and balanced.numel() == len(chosen):
            loads = causal_lm.expert_loads = causal_lm.expert_loads.to(chosen.device)
            counts = balanced.flatten()[:, None].expand_as(chosen).flatten()
            loads[layer].scatter_add_(0, chosen.flatten(), counts.to(loads.dtype))

    for number, experts in enumerate(layers):
        # The second argument of experts is the number of each expert that a token has chosen, [N, K].
        experts.register_forward_pre_hook(lambda _, inputs, number=number: count(number, inputs[1]))


def pop_loads(model: torch.nn.Module) -> torch.Tensor | None:
    """Return and reset the tokens of each expert on this rank since the last call, [L, E]; None without experts."""
    causal_lm = without_adapter(model)
    loads: torch.Tensor | None = causal_lm.expert_loads
    causal_lm.expert_loads = None if loads is None else torch.zeros_like(loads)
    return loads


def imbalance(loads: torch.Tensor, num_groups: int) -> float:
    """Return the tokens of the fullest of equal groups of experts, relative to the mean group, averaged over layers."""
    groups = loads.view(len(loads), num_groups, -1).sum(2)
    return float((groups.amax(1) / groups.mean(1)).mean())


def router_weight(model: torch.nn.Module) -> float:
    """Return the factor of the router loss, or 0 without such a loss."""
    return float(without_adapter(model).router_weight)


def pop_router_loss(model: torch.nn.Module) -> torch.Tensor:
    """Return and reset this rank's unweighted router loss, summed over targets since the last call, []."""
    causal_lm = without_adapter(model)
    router_sum, causal_lm.router_sum = causal_lm.router_sum, 0.0
    return torch.as_tensor(router_sum, device=next(model.parameters()).device)


def has_router_loss(config: PretrainedConfig) -> bool:
    """Return True for a mixture of experts that has such a loss in transformers (Llama 4 has only the factor)."""
    text = config.get_text_config()
    decoder_class = transformers.MODEL_MAPPING.get(type(text), None)
    outputs = getattr(decoder_class, "_can_record_outputs", None) or {}
    is_known = hasattr(sys.modules.get(getattr(decoder_class, "__module__", "")), "load_balancing_loss_func")
    has_factor = getattr(text, "router_aux_loss_coef", None) is not None
    return is_known and has_factor and "router_logits" in outputs and hasattr(text, "num_experts_per_tok")


def resolve_router_weight(causal_lm: PreTrainedModel, requested: float | None) -> float:
    """Return the requested factor of the router loss, else the one in the model's config; 0 for a dense model."""
    own = getattr(causal_lm.config.get_text_config(), "router_aux_loss_coef", None)
    has_loss = has_router_loss(causal_lm.config)
    weight = (own or 0.0) * has_loss if requested is None else requested
    if weight and not has_loss:
        raise UserError(
            f"model.router_loss: {causal_lm.config.model_type} is not a mixture of experts with a load-balancing loss; "
            f"set it to {'null' if own is None else '0'}"
        )
    return float(weight)
