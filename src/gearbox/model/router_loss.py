"""The loss that balances the experts of a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gearbox.data.batches import IGNORE_INDEX
from gearbox.distributed.unwrap import without_adapter
from gearbox.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_balance_loss(router_logits: tuple[torch.Tensor, ...], labels: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Return how unevenly tokens are sent to the experts: the sum over rows of a row's figure times its targets, [].

    A row's figure is the mean over layers of E x sum over experts of (share of the tokens that chose it x its mean
    probability): num_chosen where all are chosen alike, E where all choose the same, as in transformers. There it is
    one figure of a whole micro batch, which depends on how many ranks share the rows; here each row has its own, as
    in DeepSeek-V3 (arXiv 2412.19437, equation 17). Its tokens are those up to its last target: no padding.
    router_logits: [B * T, E] of each layer.
    """
    is_target = labels != IGNORE_INDEX
    counts = is_target.flip(1).cumsum(1).flip(1) > 0  # [B, T]
    num_tokens = counts.sum(1).clamp(min=1)[:, None]
    figures = []
    for logits in router_logits:
        probabilities = logits.view(*labels.shape, -1).float().softmax(-1) * counts[..., None]  # [B, T, E]
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(num_chosen).indices, 1.0)
        shares = (chosen * counts[..., None]).sum(1) / num_tokens
        figures.append(probabilities.shape[-1] * (shares * probabilities.sum(1) / num_tokens).sum(-1))
    return (torch.stack(figures).mean(0) * is_target.sum(1)).sum()


def router_weight(model: torch.nn.Module) -> float:
    """Return the factor of the router loss, 0 where there is none."""
    return float(without_adapter(model).router_weight)


def pop_router_loss(model: torch.nn.Module) -> torch.Tensor:
    """Return the router loss times targets, without its factor, of this rank's batches since the last call, []."""
    causal_lm = without_adapter(model)
    router_sum, causal_lm.router_sum = causal_lm.router_sum, 0.0
    return torch.as_tensor(router_sum, device=next(model.parameters()).device)


def resolve_router_weight(causal_lm: PreTrainedModel, requested: float | None) -> float:
    """Return the requested factor of the router loss, else that of the model's config; 0 for a dense model."""
    config = causal_lm.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None)
    weight = (own or 0.0) if requested is None else requested
    outputs = getattr(causal_lm.base_model, "_can_record_outputs", None) or {}
    if weight and (own is None or "router_logits" not in outputs or not hasattr(config, "num_experts_per_tok")):
        raise UserError(
            f"model.router_loss: {causal_lm.config.model_type} is no mixture of experts whose routers are balanced by "
            "a loss; set it to " + ("null" if own is None else "0")
        )
    return float(weight)
