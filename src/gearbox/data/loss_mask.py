"""Turn chats and texts into token ids and a loss mask, which marks the trained tokens.

The chat template defines the tokens of an assistant turn. If it has generation markers, these mark the turn. Otherwise
the turn is the difference between two renderings: the turns before it, and the turns up to it.
Only the rendering of the complete chat counts. A chat is rejected if that rendering omits part of a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gearbox.data.row_formats import Chat, InvalidRecord, JsonObject, Turn
from gearbox.data.sources import JSON
from gearbox.errors import UserError, one_line

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]  # characters [first, end) of a rendered chat
STAND_IN = "\ue000"  # from Unicode's private use area: no real content begins or ends with it
CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Templates that print the date get Llama 3.1's own default, so that tokens do not change overnight.
TODAY = date(2024, 7, 26)


class Encoded(NamedTuple):
    """A tokenized document."""

    tokens: NDArray[np.int32]
    """Token ids, [n]."""
    loss_mask: NDArray[np.int8]
    """1 for each token to predict, else 0, [n]."""


class ChatTokenizer:
    """A tokenizer with its chat template, for chats and texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, supervise: str) -> None:
        self.tokenizer, self.supervise = tokenizer, supervise
        specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self.special_tokens = tokenizer.special_tokens_map
        self.end_of_text = re.compile(rf"\s*{re.escape(tokenizer.eos_token)}" if tokenizer.eos_token else r"(?!)")
        # Use the backend directly, because the tokenizer configures it again in each call.
        # The tokenizer file may request truncation or padding: switch both off.
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        a, b = (self.backend.encode(letter, add_special_tokens=False).ids for letter in "ab")
        # SentencePiece tokenizers prepend a space to each text, so segments cannot be tokenized one by one.
        self.can_segment = self.backend.decode([*a, *b]) == "ab"
        self.templates: dict[bool, tuple[str, bool]] = {}
        """Template and whether it marks generations, with and without tools."""
        self.adds_head: bool | None = None
        """True if the template adds the head of an answer on request. None until this is known."""
        self.checked_shapes: set[tuple[object, ...]] = set()
        """Sequences of roles for which the template renders every turn."""

    def encode(self, documents: list[Chat | str]) -> list[Encoded | InvalidRecord]:
        """Return each document tokenized and not truncated, or an InvalidRecord if the template rejects it."""
        outcomes: dict[int, Encoded | InvalidRecord] = {}
        texts: dict[int, str] = {}
        rendered: dict[int, tuple[str, list[Span]]] = {}
        for i, document in enumerate(documents):
            if isinstance(document, str):
                texts[i] = document
                continue
            try:
                rendered[i] = self.render(document)
            except InvalidRecord as error:
                outcomes[i] = error
        outcomes |= zip(texts, self._encode_texts(list(texts.values())), strict=True)
        outcomes |= zip(rendered, self._encode_rendered(list(rendered.values())), strict=True)
        return [outcomes[i] for i in range(len(documents))]

    def _encode_texts(self, texts: list[str]) -> Iterator[Encoded]:
        """Yield each text tokenized, with the tokenizer's start tokens before it and end-of-text after it."""
        end = self.tokenizer.eos_token_id
        if texts and end is None:
            raise UserError("model.name: the tokenizer has no end-of-text token to separate documents")
        for encoding in self.backend.encode_batch(texts):
            ids = encoding.ids
            tokens = np.array(ids if ids[-1:] == [end] else [*ids, end], np.int32)
            yield Encoded(tokens, np.ones(len(tokens), np.int8))

    def _encode_rendered(self, rendered: list[tuple[str, list[Span]]]) -> Iterator[Encoded]:
        encodings = self.backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (text, spans), encoding in zip(rendered, encodings, strict=True):
            token_spans = [_tokens_of(encoding, span, text) for span in spans]
            if None in token_spans and self.can_segment:
                # A token crosses the edge of a turn. Generation never produces one, so divide the text there.
                yield self._encode_segments(text, spans)
                continue
            loss_mask = np.zeros(len(encoding.ids), np.int8)
            for token_span, (first, end) in zip(token_spans, spans, strict=True):
                if token_span is not None:
                    loss_mask[slice(*token_span)] = 1
                else:  # the token joins a word and the space before it: train it
                    loss_mask |= np.array([start < end and stop > first for start, stop in encoding.offsets], np.int8)
            yield Encoded(np.array(encoding.ids, np.int32), loss_mask)

    def _encode_segments(self, text: str, spans: list[Span]) -> Encoded:
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        segments = [text[first:end] for first, end in pairwise(edges)]
        tokens = [encoding.ids for encoding in self.backend.encode_batch(segments, add_special_tokens=False)]
        loss_masks = [np.full(len(ids), number % 2, np.int8) for number, ids in enumerate(tokens)]
        return Encoded(np.concatenate([np.array(ids, np.int32) for ids in tokens]), np.concatenate(loss_masks))

    def render(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the rendered chat and its trained spans. Raise InvalidRecord if the template omits a part."""
        turns = chat.turns
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        text, marked = self._apply(turns, chat.tools)
        if marked is None:
            spans: dict[int, Span] = {}
            for i in answers:
                spans[i] = self._answer_span(chat, i, text, at_least=max((end for _, end in spans.values()), default=0))
        else:
            spans = self._marked_spans(chat, answers, text, marked)
        self._check_nothing_missing(chat, text, spans)
        trained = [spans[i] for i in answers if i not in chat.untrained]
        if self.supervise == "last":
            trained = [spans[answers[-1]]] if answers[-1] not in chat.untrained else []
        elif self.supervise == "all":
            excluded = [self._content_span(chat, i, text) for i, turn in enumerate(turns) if turn["role"] == "tool"]
            excluded += [spans[i] for i in chat.untrained if i in spans]
            edges = [0, *(edge for span in sorted(excluded) for edge in span), len(text)]
            trained = list(zip(edges[::2], edges[1::2], strict=True))
        return text, trained

    def _apply(
        self, turns: list[Turn], tools: list[JsonObject] | None, ask: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the rendered text, and the marked spans or None. `ask` adds the head of an answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template, has_markers = self._template(bool(tools))
        options = {"add_generation_prompt": ask, "return_assistant_tokens_mask": has_markers}
        try:
            texts, marked = render_jinja_template(
                [turns], tools=tools, chat_template=template, **options, **self.special_tokens
            )
        except Exception as error:  # a template is third-party code that can raise anything
            message = one_line(error)
            raise InvalidRecord(f"the chat template rejects this chat: {message or type(error).__name__}") from None
        return texts[0], list(map(tuple, marked[0])) if has_markers else None

    def _template(self, with_tools: bool) -> tuple[str, bool]:
        """Return the template with a fixed date, and whether it marks generations."""
        if with_tools not in self.templates:
            try:
                template = self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            except ValueError:
                raise UserError(
                    "model.name: the data has chats, but the tokenizer has no chat template; use an "
                    "instruction-tuned model, or set data.chat_template to a template file"
                ) from None
            template = CLOCK.sub(lambda call: json.dumps(TODAY.strftime(call[2])), template)
            if re.search(r"strftime_now\s*\(", template):
                raise UserError(
                    "data.chat_template: the template computes the format of its date, so tokens would change "
                    "overnight; pass strftime_now a literal format"
                )
            self.templates[with_tools] = template, re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        return self.templates[with_tools]

    def _answer_span(self, chat: Chat, turn: int, text: str, at_least: int) -> Span:
        """Return the span of an answer in the complete text: from the end of its head to the end of its turn."""
        head = self._apply(chat.turns[:turn], chat.tools, ask=True)[0]
        is_last = turn == len(chat.turns) - 1
        through = text if is_last else self._apply(chat.turns[: turn + 1], chat.tools)[0]
        if text.startswith(through) and through.startswith(head):
            first = len(head)
            if self.adds_head is None:
                self.adds_head = head != self._apply(chat.turns[:turn], chat.tools)[0]
            content = first if self.adds_head else self._content_span(chat, turn, text)[0]
            if text[first:content].strip():
                first = content  # the template adds no head on request; the head in the turn is not part of the answer
            # The text after this belongs to the next turn. The exception is an end-of-text between turns.
            return first, self._end_of_turn(text, len(through.rstrip()), closing=self.end_of_text)
        # The template renders this turn, or an earlier one, differently when more turns follow: Qwen3 removes old
        # reasoning. Replace the content to find the part that is left.
        first, end = self._content_span(chat, turn, text)
        before = self._apply(chat.turns[:turn], chat.tools)[0]
        ask = head.removeprefix(before) if head.startswith(before) else ""
        head_start = text.rfind(ask, at_least, first) if ask else -1
        return (first if head_start < 0 else head_start + len(ask)), self._end_of_turn(text, end)

    def _marked_spans(self, chat: Chat, answers: list[int], text: str, marked: list[Span]) -> dict[int, Span]:
        """Return the marked span of each answer, including its end of turn."""
        if len(marked) != len(answers):
            raise InvalidRecord(
                f"the chat template marks {len(marked)} generations, but the chat has {len(answers)} assistant turns; "
                "fix its {% generation %} blocks"
            )
        return {i: (first, self._end_of_turn(text, end)) for i, (first, end) in zip(answers, marked, strict=True)}

    def _end_of_turn(self, text: str, end: int, closing: re.Pattern[str] | None = None) -> int:
        """Return the end of the special token at `end`, or the end of the text before it if that ends with one.

        Spaces after the token are excluded. After spaces, only the end-of-text token counts, because another special
        token may start the next turn.
        """
        kept = len(text[:end].rstrip())
        if any(token.end() == kept for token in self.special.finditer(text, max(0, kept - 64), kept)):
            return kept
        token = (closing or self.special).match(text, end) or self.end_of_text.match(text, end)
        return token.end() if token else end

    def _content_span(self, chat: Chat, turn: int, text: str) -> Span:
        """Return the span of a turn's content in the complete text: the part that changes with the content."""
        turns = [*chat.turns]
        turns[turn] = {k: v for k, v in turns[turn].items() if k != "tool_calls"} | {"content": STAND_IN}
        changed = self._apply(turns, chat.tools)[0]
        if STAND_IN not in changed:
            raise InvalidRecord(f"turn {turn + 1} ({chat.turns[turn]['role']}): {_LEFT_OUT} its content")
        first = _common_prefix(text, changed)
        suffix = min(_common_prefix(text[::-1], changed[::-1]), len(text) - first, len(changed) - first)
        return first, len(text) - suffix

    def _check_nothing_missing(self, chat: Chat, text: str, spans: dict[int, Span]) -> None:
        """Raise InvalidRecord if the text lacks a turn, part of a turn, or the tools."""
        # A template omits turns by their roles, so each sequence of roles is checked once.
        shape = (bool(chat.tools), *((turn["role"], bool(turn.get("tool_calls"))) for turn in chat.turns))
        if shape not in self.checked_shapes:
            for i in range(len(chat.turns)):
                self._content_span(chat, i, text)
            stand_in: JsonObject = {"name": STAND_IN, "description": "", "parameters": {}}
            if chat.tools:
                with_stand_in = self._apply(chat.turns, [{"type": "function", "function": stand_in}])[0]
                if STAND_IN not in with_stand_in:
                    hint = "set data.chat_template to one that renders them, or set data.fields={tools: null}"
                    raise InvalidRecord(f"tools: {_LEFT_OUT} the tools; {hint}")
            self.checked_shapes.add(shape)
        for i in range(len(chat.turns)):
            self._check_turn(chat, i, text, spans)

    def _check_turn(self, chat: Chat, i: int, text: str, spans: dict[int, Span]) -> None:
        """Raise InvalidRecord if the text lacks the content of a turn, a call, or the last reasoning."""
        turn, last_answer = chat.turns[i], max(spans)
        name = f"turn {i + 1} ({turn['role']})"
        within = text[slice(*spans[i])] if i in spans else text
        if not _shows(within, turn["content"]):
            # The template may remove the beginning of an earlier answer: reasoning that later turns do not need.
            rest = _without_spaces(self.special.sub("", within)) if i in spans and i < last_answer else ""
            if not rest or not _without_spaces(turn["content"]).endswith(rest):
                raise InvalidRecord(f"{name}: {_LEFT_OUT} its content or a part of it; {_OTHER_TEMPLATE}")
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            if not all(_shows(within, part) for part in [function["name"], *_texts(function["arguments"])]):
                raise InvalidRecord(f"{name}: {_LEFT_OUT} its call of {function['name']!r}; {_OTHER_TEMPLATE}")
        if i == last_answer and not _shows(within, turn.get("reasoning_content", "")):
            raise InvalidRecord(f"{name}: {_LEFT_OUT} its reasoning_content; {_OTHER_TEMPLATE}")


_LEFT_OUT = "the chat template omits"
_OTHER_TEMPLATE = "set data.chat_template to one that renders it"


def _tokens_of(encoding: Encoding, span: Span, text: str) -> tuple[int, int] | None:
    """Return the tokens [first, end) that make up a span of the text, or None if its edges are not token edges.

    Also return None if the span begins or ends with a space and the tokenizer's offsets exclude spaces.
    """
    first, end = span
    if first == end:
        return 0, 0
    edges = []
    for edge in (first, end):
        if edge == len(text):
            edges.append(len(encoding.ids))
            continue
        token = encoding.char_to_token(edge)
        chars = encoding.token_to_chars(token) if token is not None else None
        if token is None or chars is None or chars[0] < edge:
            return None
        edges.append(token)
    return edges[0], edges[1]


def _common_prefix(a: str, b: str) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _shows(text: str, content: str) -> bool:
    """Return True if the text contains the content: stripped, escaped as JSON, or with different spaces."""
    return (
        content.strip() in text
        or json.dumps(content, ensure_ascii=False)[1:-1] in text
        or _without_spaces(content) in _without_spaces(text)
    )


def _texts(value: JSON) -> Iterator[str]:
    """Yield the strings inside a call's arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
