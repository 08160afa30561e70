"""The token-exact loss, inside the model's own forward so that every engine's hooks hold.

Shapes: B rows of a micro batch, T tokens of a row, H hidden size, V vocabulary, E experts of a layer.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gearbox.data.batches import IGNORE_INDEX
from gearbox.distributed.unwrap import without_adapter
from gearbox.model.router_loss import load_balance_loss, resolve_router_weight

CHUNK_TOKENS = 1024  # logits held at once: 1,024 x 152,064 (Qwen2.5) in fp32 are 0.6 GB instead of 5 GB for 4 x 2,048


def install_loss(model: torch.nn.Module, router_loss: float | None = None) -> None:
    """Let `model(input_ids, position_ids, labels)` return the sum of the target tokens' losses, a scalar in fp32.

    A mixture of experts adds `unbalance` of its routers, times router_loss, or what its config says; `router_sum` of
    the model adds it up, without that factor, until it is taken.

    Without gradients it returns a pair: each token's loss, 0 where it is no target, and whether the most likely token
    is the target, both [B, T]. Without position_ids each row is one document.
    Without labels the model stays what it was. Labels are already shifted: labels[t] follows position t.
    A stage of a pipeline before the last has no head, and returns what it hands on: hidden states [B, T, H].
    """
    core = without_adapter(model)
    head: Any = core.get_output_embeddings()
    is_adapted = hasattr(head, "base_layer")
    usual_forward, usual_head = core.forward, getattr(head, "forward", core.forward)
    scale, cap = _logit_shape(core.config)
    flash = str(core.config._attn_implementation).startswith("flash")
    core.router_weight = resolve_router_weight(core, router_loss)
    core.router_sum = 0.0

    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if labels is None and head is not None:
            return usual_forward(input_ids=input_ids, **inputs)
        shape = input_ids.shape
        positions = inputs.get("position_ids")
        if flash and positions is not None:  # transformers recognises packed rows for it at batch size 1 only
            input_ids, positions = input_ids.view(1, -1), positions.view(1, -1)
        routed = {"output_router_logits": True} if self.router_weight and torch.is_grad_enabled() else {}
        decoded = self.base_model(input_ids=input_ids, position_ids=positions, use_cache=False, **routed)
        if head is None or labels is None:
            return decoded.last_hidden_state.view(*shape, -1)
        outcome = head(decoded.last_hidden_state.flatten(0, 1), labels.flatten())
        if not torch.is_grad_enabled():
            return tuple(part.view(shape) for part in outcome)
        if routed:
            lost = load_balance_loss(decoded.router_logits, labels, self.config.get_text_config().num_experts_per_tok)
            self.router_sum = self.router_sum + lost.detach()
            outcome = outcome + self.router_weight * lost
        return outcome

    def head_forward(self: Any, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if labels is None:
            return usual_head(hidden)

        # One call of the head for all chunks: ZeRO-3 and FSDP gather its weight once. The parts of an adapted one are
        # modules of their own, which ZeRO-3 gathers for each chunk where stage3_max_reuse_distance does not keep them.
        def chunk_logits(hidden: torch.Tensor) -> torch.Tensor:
            logits = usual_head(hidden).float() * scale
            return cap * torch.tanh(logits / cap) if cap else logits

        def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(chunk_logits(hidden), labels, ignore_index=IGNORE_INDEX, reduction="sum")

        chunks = list(zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True))
        if torch.is_grad_enabled():
            # Only an adapter may draw numbers here, for its dropout, and must draw them again.
            options = {"use_reentrant": False, "preserve_rng_state": is_adapted}
            losses = [checkpoint(chunk_loss, h, y, **options) for h, y in chunks]
            return torch.stack(losses).sum()
        losses, hits = [], []
        for h, y in chunks:
            logits = chunk_logits(h)
            losses.append(F.cross_entropy(logits, y, ignore_index=IGNORE_INDEX, reduction="none"))
            hits.append(logits.argmax(-1) == y)
        return torch.cat(losses), torch.cat(hits)

    core.forward = types.MethodType(forward, core)
    if head is not None:
        head.forward = types.MethodType(head_forward, head)


def _logit_shape(config: Any) -> tuple[float, float | None]:
    """What some families do to their logits: Cohere multiplies, Granite divides, Gemma caps."""
    scale = getattr(config, "logit_scale", None) or 1.0
    return scale / (getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)
