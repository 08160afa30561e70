"""Held-out loss, exact answers, and samples that people read. Every rank calls these together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gearbox.data.batches import IGNORE_INDEX, PackedRows, make_step_batch


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean over the target tokens of all held-out rows."""
    exact_match: float
    """Share of held-out documents whose every target is the model's most likely token.

    That is greedy decoding's exact match, by induction, without generating.
    """


def evaluate(
    accelerator: Any,
    model: torch.nn.Module,
    rows: PackedRows,
    rows_at_once: int,
    micro_rows: int,
    place: tuple[int, int],
    goes_on: Callable[[], bool] = lambda: True,
) -> Evaluation | None:
    """One pass over all held-out rows, dealt like training rows, so that any number of ranks agrees.

    `place` is this rank's part of the rows, and the number of parts; ranks with the same part count alike. None, if
    `goes_on`, which all ranks ask together before each portion of rows, says no.
    """
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)  # loss, targets, exact documents, documents
    with torch.no_grad():
        for first in range(0, len(rows), rows_at_once):
            if not goes_on():
                model.train()
                return None
            ids = list(range(first, min(first + rows_at_once, len(rows))))
            step = make_step_batch(rows, ids, place, micro_rows)
            for micro in step.micro_batches:
                batch = {name: tensor.to(accelerator.device) for name, tensor in micro.items()}
                documents = batch.pop("document_ids")
                losses, hits = model(**batch)
                target = batch["labels"] != IGNORE_INDEX
                num_documents = len(documents[documents >= 0].unique())
                num_wrong = len(documents[target & ~hits].unique())
                sums += torch.tensor(
                    [losses.sum(), target.sum(), num_documents - num_wrong, num_documents], device=sums.device
                )
    model.train()
    total_loss, targets, exact, documents = accelerator.reduce(sums, "sum").tolist()
    return Evaluation(total_loss / max(1, targets), exact / max(1, documents))


def answer(accelerator: Any, model: torch.nn.Module, tokenizer: Any, prompt: list[int], num_tokens: int) -> str:
    """The greedy answer to a prompt (token ids), by all ranks in step, so that sharded models can give it."""
    from accelerate.utils import broadcast

    tokens = torch.tensor([prompt], device=accelerator.device)
    first_new = tokens.shape[1]
    model.eval()
    with torch.no_grad():
        for _ in range(num_tokens):
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1).logits
            # Every rank takes rank 0's token: a tie broken differently on one of them would end in a hang.
            chosen = broadcast(logits[:, -1].argmax(-1, keepdim=True))
            tokens = torch.cat([tokens, chosen], 1)
            if tokens[0, -1].item() == tokenizer.eos_token_id:
                break
    model.train()
    return tokenizer.decode(tokens[0, first_new:], skip_special_tokens=True).strip()
