"""Evaluate held-out loss, exact matches and generated answers. All ranks call these functions together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from gearbox.checkpoint.train_state import TrainState
from gearbox.config.job import BatchPlan
from gearbox.config.recipe import Eval, Recipe
from gearbox.distributed.engine import Engine
from gearbox.errors import UserError
from gearbox.generation import batched
from gearbox.generation.metric import Answered, Metric
from gearbox.metrics.answers_file import Line
from gearbox.model import export
from gearbox.rows.batches import PackedRows, make_step_batch
from gearbox.rows.splits import Sample, TrainingRows
from gearbox.rows.units import IGNORE_INDEX
from gearbox.training import comparing

HELD_OUT_LOSS = "held-out loss"
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
    figures: dict[str, float] | None = None
    """What is measured of answers that are compared; the loss is then the mean over units."""


def is_due(recipe: Eval, state: TrainState, num_steps: int) -> bool:
    """Return True if the model must be evaluated before the next step."""
    is_last = state.step == num_steps
    due = is_last or (state.step % recipe.every == 0 if recipe.every else state.step == 0)
    return due and state.evaluated < state.step


def last_step(recipe: Eval, state: TrainState, num_steps: int) -> int:
    """Return the step at which the run ends: this one if too many evaluations in a row were no new best."""
    is_stuck = recipe.patience is not None and state.num_not_better >= recipe.patience
    return state.step if is_stuck else num_steps


def best_by(recipe: Eval, held_out: str) -> tuple[str, str]:
    """Return the figure that decides which evaluation is the best, and a hash of what it is measured on.

    `held_out` identifies the held-out documents.
    """
    on = held_out if recipe.metric is None else f"{held_out} {recipe.metric_documents}"
    return recipe.metric or HELD_OUT_LOSS, hashlib.sha256(on.encode()).hexdigest()[:16]


def show_score(state: TrainState, score: float) -> str:
    """Return a score of the state as people know it, such as `held-out loss 1.23`."""
    return f"held-out loss {-score:.4f}" if state.best_by == HELD_OUT_LOSS else f"{state.best_by} {score:.4g}"


def evaluate(engine: Engine, rows: PackedRows, keep_going: Callable[[], bool]) -> Evaluation | None:
    """Evaluate all held-out rows. They are sharded like training rows, so the rank count does not change the result.

    All ranks call `keep_going` together before each group of rows. Return None if it returns False.
    """
    if rows.answers is not None:
        found = comparing.evaluate(engine, rows, keep_going)
        return None if found is None else Evaluation(found[0], None, found[1])
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
class Questions:
    """The questions that the model answers at each evaluation."""

    held_out: list[Sample]
    """The samples to show, and those to score: each time the first ones."""
    prompts: list[Sample]
    """Those of eval.prompts."""
    tokenizer: PreTrainedTokenizerFast
    metric: Metric | None

    @classmethod
    def of(cls, engine: Engine, rows: TrainingRows, tokenizer: PreTrainedTokenizerFast, is_text: bool) -> Questions:
        """Prepare the questions. Raise UserError for a prompt that does not fit, or if nothing can be scored.

        `is_text` is True if all documents are plain text. Then prompts are not turns of a chat.
        """
        recipe = engine.job.recipe
        refuse_nothing_held_out(recipe, len(rows.held_out))
        room = min(recipe.batch.row_tokens, engine.num_positions or recipe.batch.row_tokens)
        prompts = [Sample(text, _tokens_of(text, tokenizer, is_text), None) for text in recipe.eval.prompts]
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt.prompt) < room:
                raise UserError(
                    f"eval.prompts: number {number + 1} has {len(prompt.prompt):,} tokens with the chat template, and "
                    f"a row has {room:,}; shorten it, or raise batch.row_tokens"
                )
        metric = None
        if recipe.eval.metric is not None:
            metric = Metric(recipe.eval.metric, engine.world)
            if not rows.samples:
                raise UserError("eval.metric: no held-out document is a chat with a question and an answer to score")
        return cls(rows.samples, prompts, tokenizer, metric)

    def __len__(self) -> int:
        return len(self.held_out) + len(self.prompts)

    def answer(self, engine: Engine, keep_going: Callable[[], bool]) -> list[str] | None:
        """Return the answers to held-out questions and prompts, or None if `keep_going` returns False."""
        asked = [*self.held_out, *self.prompts]
        ends = {self.tokenizer.eos_token_id, *export.stops(engine.unwrapped)}
        limit = engine.job.recipe.eval.sample_tokens
        found = batched.answer_all(engine, [one.prompt for one in asked], limit, ends, keep_going)
        if found is None:
            return None
        return [str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in found]

    def shown(self, recipe: Eval, step: int, answers: list[str]) -> list[Line]:
        """Return the lines of answers.jsonl for the samples and the prompts."""
        asked = [*self.held_out, *self.prompts]
        numbers = [*range(len(self.held_out))[: recipe.samples], *range(len(self.held_out), len(asked))]
        lines = []
        for one, answer in [(asked[i], answers[i]) for i in numbers]:
            line = Line(step=step, question=one.question, expected=one.answer, answer=answer)
            if one.rejected is not None:
                line["rejected"] = one.rejected
            lines.append(line)
        return lines

    def score(self, recipe: Eval, answers: list[str], keep_going: Callable[[], bool]) -> float | None:
        """Return the mean score of the held-out answers, or None without a metric or if `keep_going` returns False."""
        if self.metric is None:
            return None
        scored = zip(self.held_out[: recipe.metric_documents], answers, strict=False)
        return self.metric.mean(
            [Answered(one.question, answer, one.answer or "") for one, answer in scored], keep_going
        )


def refuse_nothing_held_out(recipe: Recipe, num_held_out: int) -> None:
    """Raise UserError if evaluations are compared, and the share of the documents to hold out has none of them."""
    needs = {"eval.patience": recipe.eval.patience, "save.best": recipe.save.best}
    used = [key for key in needs if needs[key]]
    if used and recipe.eval.holds_out and not num_held_out:  # a rehearsal may replace documents
        raise UserError(
            f"{used[0]}: needs held-out documents, and eval.fraction={recipe.eval.fraction} holds out none of these; "
            "raise eval.fraction, or set eval.path"
        )


def _tokens_of(text: str, tokenizer: PreTrainedTokenizerFast, is_text: bool) -> list[int]:
    """Return a question as the first turn of a chat, or the start of a text."""
    if is_text or not tokenizer.chat_template:
        return [token for token in tokenizer(text)["input_ids"] if token != tokenizer.eos_token_id]
    chat = [{"role": "user", "content": text}]
    rendered = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    return [*tokenizer(rendered, add_special_tokens=False)["input_ids"]]
