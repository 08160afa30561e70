"""Check the real model before training: our loss equals its own, and packed documents do not leak."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from gearbox.data.batches import IGNORE_INDEX, PackedRows, fullest_rows
from gearbox.distributed.engine import Engine
from gearbox.errors import UserError


def check_loss(model: torch.nn.Module, num_tokens: int, device: torch.device, tolerance: float) -> None:
    """Compare the loss with plain cross entropy on the model's own logits. Raise UserError if they differ.

    Some families transform their logits in ways that _logit_shape does not know. Every rank must call this, on the
    wrapped model.
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
            f"model.name: this family transforms its logits in an unknown way (model's loss {theirs:.5g}, ours "
            f"{ours.sum().item():.5g}); extend _logit_shape in src/gearbox/model/loss.py"
        )


def packing_leak(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    num_tokens: int,
    local_tokens: Callable[[dict[str, torch.Tensor]], AbstractContextManager[dict[str, torch.Tensor]]] = nullcontext,
) -> torch.Tensor:
    """Return how much packed documents affect each other: the largest change of a token's loss, [].

    `batch` is packed, has the shape used in training, and is on the model's device. The probe changes the tokens of the
    first document in each row. It then compares the losses of all other documents, which must not change.

    Every rank must call this. Each uses the tokens that `local_tokens` selects. The model stays in training mode,
    because engines treat evaluation differently.
    """
    documents = batch["chunk_ids"]
    changed = documents == documents[:, :1]
    labels = torch.roll(batch["input_ids"], -1, 1).masked_fill(documents != torch.roll(documents, -1, 1), IGNORE_INDEX)
    others = torch.where(changed, (batch["input_ids"] + num_tokens // 2) % num_tokens, batch["input_ids"])
    rows = {
        "usual": batch["input_ids"],
        "others": others,
        "position_ids": batch["position_ids"],
        "labels": labels.masked_fill(changed | (documents < 0), IGNORE_INDEX),
    }
    losses: list[torch.Tensor] = []
    with local_tokens(rows) as mine, torch.no_grad():
        for tokens in ("usual", "others"):
            torch.manual_seed(0)  # dropout, if any
            inputs = {"position_ids": mine["position_ids"], "labels": mine["labels"]}
            losses.append(model(input_ids=mine[tokens], **inputs)[0])
    return (losses[0] - losses[1]).abs().max()


def measure_packing_leak(engine: Engine, rows: PackedRows, num_tokens: int) -> float:
    """Return the largest packing leak over all ranks, for a batch with the shape used in training."""
    batch = rows.batch(fullest_rows(rows, engine.job.batch.micro_rows))
    on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    leak = packing_leak(engine.model, on_device, num_tokens, engine.local_tokens)
    return float(engine.accelerator.gather(leak[None]).max())
