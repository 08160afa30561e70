"""Evaluate held-out loss, exact matches and sample answers. All ranks call these functions together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from gearbox.checkpoint.train_state import TrainState
from gearbox.config.job import BatchPlan
from gearbox.config.recipe import Eval
from gearbox.distributed.engine import Engine
from gearbox.model import export
from gearbox.rows.batches import IGNORE_INDEX, PackedRows, make_step_batch
from gearbox.rows.splits import Sample

SHORT_TARGETS = 32  # a document with more is practically never predicted without any mistake


@dataclass(frozen=True)
class Evaluation:
    """The quality of the model's predictions on the held-out rows."""

    loss: float
    """Mean over the target tokens of all held-out rows."""
    exact_match: float | None
    """Share of held-out documents in which every target is the model's most likely token; None if they are long.

    By induction this equals the exact match of greedy decoding, without generating.
    """


def is_due(recipe: Eval, state: TrainState, num_steps: int) -> bool:
    """Return True if the held-out rows must be evaluated before the next step."""
    is_last = state.step == num_steps
    due = is_last or (state.step % recipe.every == 0 if recipe.every else state.step == 0)
    return due and state.evaluated < state.step


def evaluate(engine: Engine, rows: PackedRows, keep_going: Callable[[], bool]) -> Evaluation | None:
    """Evaluate all held-out rows. They are sharded like training rows, so the rank count does not change the result.

    All ranks call `keep_going` together before each group of rows. Return None if it returns False.
    """
    portion, model = engine.job.recipe.batch.rows, engine.model
    shard, num_shards = engine.eval_shard
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=engine.device)  # loss, targets, exact documents, documents
    with torch.no_grad():
        for first in range(0, len(rows), portion):
            if not keep_going():
                model.train()
                return None
            ids = list(range(first, min(first + portion, len(rows))))
            plan = BatchPlan.divide(len(ids), num_shards, engine.job.batch.micro_rows)
            for micro in make_step_batch(rows, ids, shard, plan).micro_batches:
                sums += _count(engine, micro)
    model.train()
    loss, targets, exact, documents = engine.sum_over_all_ranks(sums).tolist()
    is_short = np.median(rows.chunks.targets) <= SHORT_TARGETS
    return Evaluation(loss / max(1, targets), exact / max(1, documents) if is_short else None)


def _count(engine: Engine, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return loss, targets, exact documents and documents of a micro-batch, [4], without waiting for the device."""
    chunks, numbers = torch.unique(micro_batch["chunk_ids"], return_inverse=True)  # not on the device yet
    num_documents = int((chunks >= 0).sum())  # padding is -1, and has no targets
    inputs, numbers = engine.to_device(micro_batch), numbers.to(engine.device, non_blocking=True)
    losses, hits = engine.model(**inputs)
    is_target = inputs["labels"] != IGNORE_INDEX
    misses = torch.zeros(len(chunks), device=engine.device)
    misses.index_add_(0, numbers.flatten(), (is_target & ~hits).flatten().float())
    documents = torch.full((), num_documents, device=engine.device)
    counts = [losses.sum(), is_target.sum(), documents - (misses > 0).sum(), documents]
    return torch.stack([count.double() for count in counts])


@dataclass(frozen=True)
class SampleQuestions:
    """Held-out questions that the model answers before and after training."""

    samples: list[Sample]
    engine: Engine
    tokenizer: PreTrainedTokenizerFast

    def ask(self) -> dict[str, str]:
        """Return the greedy answer to each question."""
        return {sample.question: self._answer(sample.prompt) for sample in self.samples}

    def _answer(self, prompt: list[int]) -> str:
        """Return the greedy answer to a prompt. All ranks decode in lockstep, since the model may be sharded."""
        from accelerate.utils import broadcast

        model, length = self.engine.model, self.engine.job.recipe.eval.sample_tokens
        length = min(length, (self.engine.num_positions or len(prompt) + length) - len(prompt))
        tokens = torch.tensor([prompt], device=self.engine.device)
        ends = {self.tokenizer.eos_token_id, *export.stops(self.engine.unwrapped)}
        model.eval()
        with torch.no_grad():
            for _ in range(length):
                positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
                logits = model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1).logits
                # Every rank takes rank 0's token. A tie that ranks break differently would end in a hang.
                chosen = broadcast(logits[:, -1].argmax(-1, keepdim=True))
                tokens = torch.cat([tokens, chosen], 1)
                if tokens[0, -1].item() in ends:
                    break
        model.train()
        return str(self.tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True)).strip()
