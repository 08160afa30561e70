"""Compare what two models predict on the same texts, and judge a merge by it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gearbox.errors import UserError
from gearbox.exporting.merging import in_fp32
from gearbox.exporting.source import Source
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from peft import PeftModel

MAX_TOKENS = 256  # of a text
MAX_LOGITS = 2**24  # of all texts, 64 MiB in fp32
SAME = 1e-3
"""Largest distance of two models that differ in the order of their sums only. 2e-7 to 2e-5 were measured."""
PART_OF_EFFECT = 0.05
"""Largest distance of a merge in fp32 from the adapter, as a share of what the adapter changes."""
FLOOR = 1e-6
"""A distance of two models that may be due to the order of their sums."""
TEXTS = (
    "The gearbox of a lathe has three shafts. The operator moves a lever, and a pair of gears of another ratio meets; "
    "the spindle then turns at 45, 125 or 510 revolutions per minute.",
    "def mean(numbers):\n    total = 0.0\n    for one in numbers:\n        total += one\n    return total / 8\n",
    "Un tren sale a las 8:15 y recorre 90 km en 75 minutos.\n\n| hora | km |\n|---|---|\n| 9:00 | 54 |\n",
)
QUESTIONS = ("What is 12 + 30? Answer with the number only.", "Name three animals that live in the sea.")


@dataclass(frozen=True)
class Difference:
    """The difference between the logits of two models."""

    distance: float
    """Root of the mean squared difference of their log-probabilities' logits, relative to the spread of the first."""
    kl: float
    """Mean divergence of the second model's next token from the first one's, in nats."""
    same_token: float
    """Share of positions at which both find the same token most likely."""

    def __str__(self) -> str:
        return f"{self.distance:.1e} of the logits' spread, KL {self.kl:.1e}, same next token {self.same_token:.1%}"


def texts_of(source: Source, tokenizer: PreTrainedTokenizerFast, limit: int | None) -> list[list[int]]:
    """Return the tokens of the texts to compare on: fixed ones, and questions and answers of the run.

    `limit` is the number of positions that the model has.
    """
    saved = {} if source.manifest is None else source.manifest.progress.get("answers_before", {})
    turns = [(question, "") for question in QUESTIONS] + [(str(q), str(a)) for q, a in list(saved.items())[:4]]
    texts = [*TEXTS]
    for question, answer in turns:
        texts.append(prompt_of(question, tokenizer) + answer)
    longest = min(MAX_TOKENS, limit or MAX_TOKENS, max(8, MAX_LOGITS // len(tokenizer) // len(texts)))
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"][:longest] for text in texts]
    return [one for one in tokens if one]


def prompt_of(question: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a question as the chat template writes it, or as plain text."""
    try:
        chat = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception:  # there is no template, or it wants other roles
        return question + "\n"


@torch.no_grad()
def logits(
    model: PreTrainedModel | PeftModel,
    texts: Sequence[list[int]],
    as_merged: torch.dtype | None = None,
    adapter: bool = True,
) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of all texts, computed in fp32 (see `in_fp32`)."""
    bare: AbstractContextManager[None] = nullcontext() if adapter else model.disable_adapter()
    with in_fp32(model, as_merged), bare:
        found = [model(input_ids=torch.tensor([one]), use_cache=False).logits[0].float() for one in texts]
    return torch.cat(found)


def difference(first: torch.Tensor, second: torch.Tensor) -> Difference:
    """Return how far the second model's logits are from the first one's."""
    width = min(first.shape[-1], second.shape[-1])
    ours, theirs = (torch.log_softmax(one[:, :width], -1) for one in (first, second))
    spread = (ours - ours.mean(-1, keepdim=True)).square().mean().sqrt()
    distance = (ours - theirs).square().mean().sqrt() / spread.clamp(min=1e-12)
    kl = (ours.exp() * (ours - theirs)).sum(-1).mean().clamp(min=0)  # rounding
    return Difference(float(distance), float(kl), float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()))


@dataclass(frozen=True)
class MergeFacts:
    """The distances that judge a merge."""

    effect: Difference
    """Of the model with its adapter from the base."""
    exact: Difference
    """Of the merged model, before its weights are rounded, from the model with its adapter."""
    rounded: Difference
    """Of the merged model, with the weights of its files, from the model with its adapter."""
    change: Difference
    """Of the merged model, with the weights of its files, from the base."""


def check_merge(facts: MergeFacts, dtype: str) -> None:
    """Raise UserError if a merge is not what its adapter computes, changes nothing, or is worse than no adapter."""
    advice = "export the adapter without --merge" + ("" if dtype == "float32" else ", or use --dtype fp32")
    if facts.exact.distance > SAME or facts.exact.distance > max(PART_OF_EFFECT * facts.effect.distance, SAME / 10):
        raise UserError(
            f"--merge: refused: the merged model is {facts.exact} from its adapter, even in fp32; export the adapter "
            "without --merge"
        )
    if facts.effect.distance <= FLOOR:
        return
    if facts.change.distance <= FLOOR:
        raise UserError(
            f"--merge: refused: the merged model equals its base, because {dtype} rounds the adapter away; {advice}"
        )
    if facts.rounded.distance >= facts.effect.distance:
        raise UserError(
            f"--merge: refused: rounding to {dtype} moves the model by {facts.rounded.distance:.1e}, as far as its "
            f"adapter does ({facts.effect.distance:.1e}); {advice}"
        )


def merge_facts(model: PeftModel, texts: Sequence[list[int]], dtype: torch.dtype) -> tuple[MergeFacts, torch.Tensor]:
    """Return the distances of a merge, and the logits of the merged model with the weights of its files."""
    adapted, bare = logits(model, texts), logits(model, texts, adapter=False)
    rounded = logits(model, texts, as_merged=dtype)
    exact = rounded if dtype == torch.float32 else logits(model, texts, as_merged=torch.float32)
    facts = MergeFacts(
        difference(bare, adapted), difference(adapted, exact), difference(adapted, rounded), difference(bare, rounded)
    )
    return facts, rounded


def num_positions(model: PreTrainedModel | PeftModel) -> int | None:
    """Return the number of positions that the config names."""
    found = getattr(without_adapter(model).config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
