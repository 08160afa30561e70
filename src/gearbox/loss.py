"""The token-exact loss, inside the model's own forward so that every engine's hooks hold.

Shapes: B rows of a micro batch, T tokens of a row, H hidden size, V vocabulary, E experts of a layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gearbox.config import UserError
from gearbox.data import IGNORED  # the one value both sides must agree on

CHUNK_TOKENS = 1024  # logits held at once: 1,024 x 152,064 (Qwen2.5) in fp32 are 0.6 GB instead of 5 GB for 4 x 2,048


def install(model: torch.nn.Module, router_loss: float | None = None) -> None:
    """Let `model(input_ids, position_ids, labels)` return the sum of the target tokens' losses, a scalar in fp32.

    A mixture of experts adds `unbalance` of its routers, times router_loss, or what its config says; `router_sum` of
    the model adds it up, without that factor, until it is taken.

    Without gradients it returns a pair: each token's loss, 0 where it is no target, and whether the most likely token
    is the target, both [B, T]. Without position_ids each row is one document.
    Without labels the model stays what it was. Labels are already shifted: labels[t] follows position t.
    A stage of a pipeline before the last has no head, and returns what it hands on: hidden states [B, T, H].
    """
    core = _core(model)
    head: Any = core.get_output_embeddings()
    is_adapted = hasattr(head, "base_layer")
    usual_forward, usual_head = core.forward, getattr(head, "forward", core.forward)
    scale, cap = _logit_shape(core.config)
    flash = str(core.config._attn_implementation).startswith("flash")
    core.router_weight = _router_weight(core, router_loss)
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
            lost = unbalance(decoded.router_logits, labels, self.config.get_text_config().num_experts_per_tok)
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
            return F.cross_entropy(chunk_logits(hidden), labels, ignore_index=IGNORED, reduction="sum")

        chunks = list(zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True))
        if torch.is_grad_enabled():
            # Only an adapter may draw numbers here, for its dropout, and must draw them again.
            options = {"use_reentrant": False, "preserve_rng_state": is_adapted}
            losses = [checkpoint(chunk_loss, h, y, **options) for h, y in chunks]
            return torch.stack(losses).sum()
        losses, hits = [], []
        for h, y in chunks:
            logits = chunk_logits(h)
            losses.append(F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="none"))
            hits.append(logits.argmax(-1) == y)
        return torch.cat(losses), torch.cat(hits)

    core.forward = types.MethodType(forward, core)
    if head is not None:
        head.forward = types.MethodType(head_forward, head)


def unbalance(router_logits: tuple[torch.Tensor, ...], labels: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """How unevenly tokens are sent to the experts: the sum over rows of a row's figure times its targets, [].

    A row's figure is the mean over layers of E x sum over experts of (share of the tokens that chose it x its mean
    probability): num_chosen where all are chosen alike, E where all choose the same, as in transformers. There it is
    one figure of a whole micro batch, which depends on how many ranks share the rows; here each row has its own, as
    in DeepSeek-V3 (arXiv 2412.19437, equation 17). Its tokens are those up to its last target: no padding.
    router_logits: [B * T, E] of each layer.
    """
    is_target = labels != IGNORED
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
    """The factor of the router loss, 0 where there is none."""
    return float(_core(model).router_weight)


def take_router_sum(model: torch.nn.Module) -> torch.Tensor:
    """The router loss, without its factor, times targets, of this rank's batches since it was taken last, []."""
    core = _core(model)
    taken, core.router_sum = core.router_sum, 0.0
    return torch.as_tensor(taken, device=next(model.parameters()).device)


def check(model: torch.nn.Module, num_tokens: int, device: torch.device, tolerance: float) -> None:
    """Hold the loss against plain cross entropy on the logits of the model's own forward; UserError where they part.

    Every rank runs it, on the wrapped model: families shape their logits in ways that _logit_shape may not know.
    """
    tokens = torch.arange(1, 17, device=device)[None] % num_tokens
    positions = torch.arange(16, device=device)[None]
    labels = tokens.roll(-1, 1)
    model.eval()
    with torch.no_grad():
        ours, _ = model(input_ids=tokens, position_ids=positions, labels=labels)
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    model.train()
    theirs = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").item()
    if not abs(ours.sum().item() - theirs) <= tolerance * abs(theirs):
        raise UserError(
            f"model.name: this family shapes its logits in a way that Gearbox does not know: its own loss is "
            f"{theirs:.5g}, ours {ours.sum().item():.5g}; extend _logit_shape in src/gearbox/loss.py"
        )


def leak(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    num_tokens: int,
    own_tokens: Callable[[dict[str, torch.Tensor]], AbstractContextManager[dict[str, torch.Tensor]]] = nullcontext,
) -> torch.Tensor:
    """How far documents see their neighbours: the largest change of a token's loss when another document changes, [].

    `batch` is a packed one, in the shape that training uses and on the model's device. The first document of each row
    gets other tokens; the losses of all others, on which it must have no influence, are compared. Every rank runs it,
    on the tokens that `own_tokens` leaves it, in the mode of training: engines treat the other one differently.
    """
    documents = batch["document_ids"]
    changed = documents == documents[:, :1]
    labels = torch.roll(batch["input_ids"], -1, 1).masked_fill(documents != torch.roll(documents, -1, 1), IGNORED)
    others = torch.where(changed, (batch["input_ids"] + num_tokens // 2) % num_tokens, batch["input_ids"])
    whole = {
        "usual": batch["input_ids"], "others": others, "position_ids": batch["position_ids"],
        "labels": labels.masked_fill(changed | (documents < 0), IGNORED),
    }  # fmt: skip
    losses = []
    with own_tokens(whole) as mine, torch.no_grad():
        for tokens in ("usual", "others"):
            torch.manual_seed(0)  # dropout, if any
            inputs = {"position_ids": mine["position_ids"], "labels": mine["labels"]}
            losses.append(model(input_ids=mine[tokens], **inputs)[0])
    return (losses[0] - losses[1]).abs().max()


def _logit_shape(config: Any) -> tuple[float, float | None]:
    """What some families do to their logits: Cohere multiplies, Granite divides, Gemma caps."""
    scale = getattr(config, "logit_scale", None) or 1.0
    return scale / (getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)


def _core(model: Any) -> Any:
    """Below an adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _router_weight(core: Any, asked: float | None) -> float:
    """What the recipe says, else the model's config; 0 for a dense model."""
    config = core.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None)
    weight = (own or 0.0) if asked is None else asked
    records = getattr(core.base_model, "_can_record_outputs", None) or {}
    if weight and (own is None or "router_logits" not in records or not hasattr(config, "num_experts_per_tok")):
        raise UserError(
            f"model.router_loss: {core.config.model_type} is no mixture of experts whose routers are balanced by a "
            "loss; set it to " + ("null" if own is None else "0")
        )
    return float(weight)
