"""Answer many prompts greedily on all ranks together, under every gear.

Each rank, or each group of ranks that compute the same rows, answers other prompts. All ranks call the model equally
often with equal shapes, because a sharded model gathers its weights in each call.

Rows are padded at their end. In a causal model no token reads what follows it, so this needs no mask, and is right for
each family and each attention. Nothing is cached between tokens, since the engines that divide a model keep no cache.

Shapes: B prompts of a rank's batch, W tokens of its rows, P different lengths of its rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from gearbox.config.job import BatchPlan
from gearbox.distributed.engine import Engine
from gearbox.rows.batches import micro_batches_of

MAX_ROWS = 16  # of a batch: the logits of 16 lengths and 16 rows of a vocabulary of 150,000 are 150 MB
WIDTH_STEP = 16  # rows grow in such steps, so that the model sees few shapes
LOOK_TOKENS = 8  # between two looks for a stop request


@dataclass
class _Row:
    """A prompt and its answer so far."""

    prompt: Sequence[int]
    most: int
    """The number of tokens that the answer may have."""
    answer: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def is_done(self) -> bool:
        return self.ended or len(self.answer) >= self.most

    def take(self, token: int, ends: Collection[int]) -> None:
        """Add the next token to the answer, unless the answer is complete or ends with it."""
        if not self.is_done:
            self.ended = token in ends
            self.answer += [] if self.ended else [token]


def answer_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    ends: Collection[int],
    keep_going: Callable[[], bool],
) -> list[list[int]] | None:
    """Return the tokens of the greedy answer to each prompt, on every rank.

    An answer has at most `num_tokens` tokens, and stops before a token of `ends`, or where the model's positions end.
    All ranks call `keep_going` together now and then. Return None if it returns False.
    """
    limit = engine.num_positions
    rows = [_Row(p, num_tokens if limit is None else min(num_tokens, limit - len(p))) for p in prompts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt))  # similar lengths share a batch
    _, num_shards = engine.eval_shard
    longest = max((len(prompt) for prompt in prompts), default=0) + num_tokens
    budget = engine.job.recipe.batch.micro_rows * engine.job.recipe.batch.row_tokens
    plan = BatchPlan.divide(len(rows), num_shards, max(1, min(MAX_ROWS, budget // longest))) if rows else None
    shards = [micro_batches_of(order, shard, plan) for shard in range(num_shards)] if plan else []
    model = engine.model
    model.eval()
    try:
        for round_of_shards in zip(*shards, strict=True):
            # A place without a prompt takes another one of the round, without an answer.
            spare = _Row(next(rows[i] for batch in round_of_shards for i in batch if i is not None).prompt, 0)
            batches = [[spare if i is None else rows[i] for i in batch] for batch in round_of_shards]
            if not _answer_round(engine, batches, ends, keep_going):
                return None
    finally:
        model.train()
    return [row.answer for row in rows]


def _answer_round(
    engine: Engine, batches: list[list[_Row]], ends: Collection[int], keep_going: Callable[[], bool]
) -> bool:
    """Answer one batch per shard, in lockstep. Return False if `keep_going` did."""
    shard, num_shards = engine.eval_shard
    gear, own = engine.job.gear, batches[shard]
    first_ranks = [next(r for r in range(gear.num_processes) if gear.eval_shard(r)[0] == s) for s in range(num_shards)]
    longest = max(len(row.prompt) for batch in batches for row in batch)
    most = max(row.most for batch in batches for row in batch)
    lengths = torch.tensor([len(row.prompt) for row in own])
    tokens = torch.zeros(len(own), _widened(longest + most, None), dtype=torch.int64)
    for i, row in enumerate(own):
        tokens[i, : len(row.prompt)] = torch.tensor(row.prompt)
    tokens, numbers = tokens.to(engine.device), torch.arange(len(own), device=engine.device)
    kept, place = torch.unique(lengths - 1, return_inverse=True)
    kept, place, lengths = (tensor.to(engine.device) for tensor in (kept, place, lengths))
    for count in range(most):
        if not count % LOOK_TOKENS and not keep_going():
            return False
        width = _widened(longest + count, engine.num_positions)
        logits = _logits(engine, tokens[:, :width], (kept + count).clamp(max=width - 1))
        # A tie that ranks of the same rows break differently would end in a hang, so all take their first rank's token.
        chosen = engine.accelerator.gather(logits[numbers, place].argmax(-1))
        chosen = chosen.view(-1, len(own))[first_ranks]
        tokens[numbers, (lengths + count).clamp(max=tokens.shape[1] - 1)] = chosen[shard]
        for batch, its_tokens in zip(batches, chosen.tolist(), strict=True):
            for row, token in zip(batch, its_tokens, strict=True):
                row.take(token, ends)
        if all(row.is_done for batch in batches for row in batch):
            break
    return True


def _widened(length: int, limit: int | None) -> int:
    """Return the width of rows of this length, within the number of positions."""
    width = -(-length // WIDTH_STEP) * WIDTH_STEP
    return width if limit is None else min(width, limit)


@torch.no_grad()
def _logits(engine: Engine, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, P, V] at the kept places [P] of rows [B, W]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False, "logits_to_keep": kept}
    logits: torch.Tensor = engine.model(**inputs).logits
    return logits if logits.shape[1] == len(kept) else logits[:, kept]  # a few models compute all logits
