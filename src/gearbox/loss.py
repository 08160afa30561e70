"""The token-exact loss, inside the model's own forward so that every engine's hooks hold.

Shapes: B rows of a micro batch, T tokens of a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gearbox.config import UserError
from gearbox.data import IGNORED  # the one value both sides must agree on

CHUNK_TOKENS = 1024  # logits held at once: 1,024 x 152,064 (Qwen2.5) in fp32 are 0.6 GB instead of 5 GB for 4 x 2,048


def install(model: torch.nn.Module) -> None:
    """Let `model(input_ids, position_ids, labels)` return the sum of the target tokens' losses, a scalar in fp32.

    Without gradients it returns a pair: that sum, and whether the most likely token is the target, [B, T] bool.
    Without labels the model stays what it was. Labels are already shifted: labels[t] follows position t.
    """
    core: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    head = core.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise UserError("adapter.targets: an adapter on the output head is not supported; take it out of the list")
    usual_forward, usual_head = core.forward, head.forward
    scale, cap = _logit_shape(core.config)
    flash = str(core.config._attn_implementation).startswith("flash")

    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if labels is None:
            return usual_forward(input_ids=input_ids, **inputs)
        shape = labels.shape
        if flash:  # transformers recognises packed rows for flash attention at batch size 1 only
            input_ids, inputs["position_ids"] = input_ids.view(1, -1), inputs["position_ids"].view(1, -1)
        decoded = self.base_model(input_ids=input_ids, position_ids=inputs["position_ids"], use_cache=False)
        outcome = head(decoded.last_hidden_state.flatten(0, 1), labels.flatten())
        return outcome if torch.is_grad_enabled() else (outcome[0], outcome[1].view(shape))

    def head_forward(self: Any, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if labels is None:
            return usual_head(hidden)

        # One call of the head for all chunks: ZeRO-3 and FSDP gather its weight once.
        def chunk_logits(hidden: torch.Tensor) -> torch.Tensor:
            logits = F.linear(hidden, self.weight, self.bias).float() * scale
            return cap * torch.tanh(logits / cap) if cap else logits

        def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(chunk_logits(hidden), labels, ignore_index=IGNORED, reduction="sum")

        chunks = list(zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True))
        if torch.is_grad_enabled():
            losses = [checkpoint(chunk_loss, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in chunks]
            return torch.stack(losses).sum()
        losses, hits = [], []
        for h, y in chunks:
            logits = chunk_logits(h)
            losses.append(F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum"))
            hits.append(logits.argmax(-1) == y)
        return torch.stack(losses).sum(), torch.cat(hits)

    core.forward = types.MethodType(forward, core)
    head.forward = types.MethodType(head_forward, head)


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
    theirs = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    if not abs(ours.item() - theirs.item()) <= tolerance * abs(theirs.item()):
        raise UserError(
            f"model.name: this family shapes its logits in a way that Gearbox does not know: its own loss is "
            f"{theirs.item():.5g}, ours {ours.item():.5g}; extend _logit_shape in src/gearbox/loss.py"
        )


def _logit_shape(config: Any) -> tuple[float, float | None]:
    """What some families do to their logits: Cohere multiplies, Granite divides, Gemma caps."""
    scale = getattr(config, "logit_scale", None) or 1.0
    return scale / (getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)
