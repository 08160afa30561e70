"""Answer questions with a saved model on one device: a conversation of many turns, streamed token by token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gearbox.console import printable
from gearbox.data.chat_rendering import shows
from gearbox.errors import UserError, one_line_with_type
from gearbox.generation.saved_model import base_of
from gearbox.generation.streaming import Piece, Pieces, TextStream
from gearbox.model import probes
from gearbox.model.loading import load_for_answers
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from peft import PeftModel

Turn = dict[str, str]
Hear = Callable[[Piece], None]

ROOM = 4  # the prompt leaves at least 1/4 of the positions to the answer, if the answer may be so long
NO_SYSTEM = "the chat template has no system role; the system prompt is put before the first question"
NO_TEMPLATE = "the model has no chat template: it continues each text, and does not read earlier ones"


@dataclass(frozen=True)
class Sampling:
    """Settings of generation."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0

    def options(self) -> dict[str, float]:
        """Return the arguments of generate()."""
        if not self.temperature:
            return {"do_sample": False, "num_beams": 1}
        return {"do_sample": True, "num_beams": 1, "temperature": self.temperature, "top_p": self.top_p}


@dataclass(frozen=True)
class Answer:
    """An answer."""

    text: str
    """Without special tokens, and without spaces around it."""
    num_tokens: int
    end: str
    """done, interrupted (by Ctrl-C), or full: it has as many tokens as it may have."""


@dataclass
class Speaker:
    """A model that answers, and its tokenizer."""

    name: str
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerFast
    ignores_adapter: bool = False
    """Answer with the base of the adapter."""

    def __post_init__(self) -> None:
        text = self.model.config.get_text_config(decoder=True)
        self.table = probes.num_positions(self.model.config)
        """The number of positions that the model can read at all, or None if it computes them."""
        trained = getattr(text, "max_position_embeddings", None)
        self.positions = self.table or (trained if type(trained) is int and trained > 0 else None)
        """The number of positions with which it was trained, or None if that is not known."""

    def render(self, system: str | None, turns: list[Turn]) -> tuple[str, bool]:
        """Return the prompt, and whether the template takes no system role.

        The system prompt is then put before the first question. Without a template, return the last question.
        """
        if not self.tokenizer.chat_template:
            return turns[-1]["content"], False
        if system is None:
            return self._render(turns), False
        problem = None
        try:
            text = self._render([{"role": "system", "content": system}, *turns])
            if shows(text, system):
                return text, False
        except Exception as error:  # a template is code that can raise anything
            problem = error
        first = turns[0] | {"content": f"{system}\n\n{turns[0]['content']}"}
        try:
            return self._render([first, *turns[1:]]), True
        except Exception as error:
            raise problem or error from None

    def _render(self, turns: list[Turn]) -> str:
        text = str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        if not shows(text, turns[-1]["content"]):
            raise ValueError("the chat template leaves out the question")
        return text

    def encode(self, prompt: str) -> torch.Tensor:
        """Return the tokens of a prompt, [1, n]. A text without a template gets the tokens with which texts begin."""
        is_plain, end = not self.tokenizer.chat_template, self.tokenizer.eos_token_id
        ids = list(self.tokenizer(prompt, add_special_tokens=is_plain, verbose=False)["input_ids"])
        if is_plain and ids[-1:] == [end]:
            ids.pop()
        if not ids:
            raise ValueError("the prompt has no tokens")
        if max(ids) >= (rows := len(self.model.get_input_embeddings().weight)):
            raise ValueError(f"its tokenizer has {len(self.tokenizer)} tokens, but its model has {rows}")
        return torch.tensor([ids])

    def generate(self, ids: torch.Tensor, sampling: Sampling, stream: TextStream) -> str:
        """Generate an answer to these tokens. The stream gets each token. Return how the answer ended."""
        ids = ids.to(self.model.device)
        most = sampling.max_new_tokens
        if self.table is not None:
            most = min(most, self.table - ids.shape[1])
        with self._adapter():
            self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
                pad_token_id=self.tokenizer.eos_token_id,
                streamer=stream,
                tokenizer=self.tokenizer,  # for stop_strings in generation_config.json
                **sampling.options(),
            )
        is_full = len(stream.tokens) >= most and stream.tokens[-1] not in self.tokenizer.all_special_ids
        return "full" if is_full else "done"

    def _adapter(self) -> AbstractContextManager[None]:
        if not self.ignores_adapter:
            return nullcontext()
        base: AbstractContextManager[None] = self.model.disable_adapter()
        return base


@dataclass
class Chat:
    """A conversation with a model."""

    speaker: Speaker
    sampling: Sampling
    tell: Callable[[str], None]
    """Take what the user should know, in one line."""
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    _told: set[str] = field(default_factory=set)
    _num_unread: int = 0

    def ask(self, question: str, hear: Hear = lambda piece: None) -> Answer:
        """Return the answer to a question, which `hear` gets in pieces before. Both become turns.

        Ctrl-C ends the answer, and what there is of it becomes the turn.
        """
        if self.turns and self.turns[-1]["role"] == "user":  # it was not answered
            self.turns.pop()
        self.turns.append({"role": "user", "content": question})
        return self._answer(hear)

    def retry(self, hear: Hear = lambda piece: None) -> Answer:
        """Answer the last question again. The answer takes the place of the earlier one."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        if not self.turns:
            raise UserError("nothing was asked yet")
        return self._answer(hear)

    def reset(self) -> None:
        """Forget the conversation, but not the system prompt."""
        self.turns, self._num_unread = [], 0

    def _answer(self, hear: Hear) -> Answer:
        stream = TextStream(self.speaker.tokenizer, lambda text: pieces.add(text))
        pieces = Pieces(hear, "")
        try:
            prompt, ids = self._prompt()
            pieces = Pieces(hear, prompt)
            end = self.speaker.generate(ids, self.sampling, stream)
        except KeyboardInterrupt:
            end = "interrupted"
            stream.end()
        except torch.OutOfMemoryError:
            raise UserError(
                "out of GPU memory: ask less, use --quantize nf4, or answer on the CPU with CUDA_VISIBLE_DEVICES="
            ) from None
        except UserError:
            raise
        except Exception as error:  # the template, generation_config.json and the config come with the model
            raise UserError(f"MODEL: {self.speaker.name!r} cannot answer: {one_line_with_type(error)}") from None
        pieces.end()
        text = stream.text.strip()
        if text or end != "interrupted":
            self.turns.append({"role": "assistant", "content": text})
        return Answer(text, len(stream.tokens), end)

    def _prompt(self) -> tuple[str, torch.Tensor]:
        """Return the prompt and its tokens. Leave out the oldest turns if they exceed the model's positions."""
        speaker, limit = self.speaker, self.speaker.positions
        room = 0 if limit is None else min(self.sampling.max_new_tokens, limit // ROOM)
        for first in range(0, len(self.turns), 2):
            prompt, has_no_system = speaker.render(self.system, self.turns[first:])
            ids = speaker.encode(prompt)
            if limit is None or ids.shape[1] + room <= limit:
                break
        if has_no_system:
            self._tell_once(NO_SYSTEM)
        if speaker.table is not None and ids.shape[1] >= speaker.table:
            raise UserError(f"the question has {ids.shape[1]:,} tokens, but the model has {limit:,} positions")
        if limit is not None and ids.shape[1] > limit:
            self._tell_once(f"the question is longer than the {limit:,} tokens that the model was trained to read")
        if speaker.tokenizer.chat_template and first > self._num_unread:
            self.tell(f"the model reads {limit:,} tokens: it no longer reads the oldest {first // 2} of your questions")
        self._num_unread = first
        return prompt, ids

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.tell(text)


@dataclass
class Speakers:
    """The model that was trained, and the one from which its training started."""

    source: str
    tuned: Speaker
    trust_remote_code: bool
    switch: str
    quantize: bool
    _base: Speaker | None = None

    @classmethod
    def load(cls, source: str, trust_remote_code: bool, switch: str, quantize: bool = False) -> Speakers:
        """Load the model in a folder or on the Hub. `switch` is what a user sets to let its code run."""
        transformers.logging.set_verbosity_error()  # its advice is for programs that call it
        tuned = load_for_answers(source, trust_remote_code, "MODEL", switch, quantize)
        return cls(source, Speaker(source, *tuned), trust_remote_code, switch, quantize)

    @property
    def has_adapter(self) -> bool:
        """True if the model is an adapter on its base."""
        return hasattr(self.tuned.model, "peft_config")

    def base(self) -> Speaker:
        """Return the base: the model without its adapter, or the one that was fine-tuned, loaded at the first call."""
        if self._base is None:
            self._base = self._without_adapter() if self.has_adapter else self._load_base()
        return self._base

    def _without_adapter(self) -> Speaker:
        name = without_adapter(self.tuned.model).name_or_path
        return Speaker(name, self.tuned.model, self.tuned.tokenizer, ignores_adapter=True)

    def _load_base(self) -> Speaker:
        found = base_of(self.source)
        if found is None:
            raise UserError(f"/base: {self.source} does not say from which model its training started")
        name, revision = found
        model, tokenizer = load_for_answers(name, self.trust_remote_code, "/base", self.switch, self.quantize, revision)
        if not tokenizer.chat_template:
            tokenizer.chat_template = self.tuned.tokenizer.chat_template
        return Speaker(name, model, tokenizer)


def shown(text: str) -> str:
    """Return an answer as it may reach a terminal: with its tabs, and other control characters escaped."""
    return "\t".join(map(printable, text.split("\t")))
