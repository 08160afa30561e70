"""From a chat to tokens and which of them are trained.

The template says what an assistant's turn is: by its generation markers, else by what it renders for the turns before
it and up to it. What the rendering of the whole chat contains is what counts; nothing of a turn may be missing from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gearbox.data.row_formats import BadRow, Chat, Turn
from gearbox.errors import UserError

Span = tuple[int, int]  # characters [first, end) of a rendered chat
STAND_IN = "\ue000"  # of Unicode's private use: a content that no real one begins or ends with
CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# For templates that print the date: Llama 3.1's own default. Tokens must not change overnight.
TODAY = date(2024, 7, 26)


class Encoded(NamedTuple):
    tokens: np.ndarray
    """Token ids, [n] int32."""
    loss_mask: np.ndarray
    """1 where the token is one to predict, else 0, [n] int8."""


class ChatTokenizer:
    """A tokenizer with its chat template, applied to documents of either kind."""

    def __init__(self, tokenizer: Any, supervise: str) -> None:
        self.tokenizer, self.supervise = tokenizer, supervise
        specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self.special_tokens = tokenizer.special_tokens_map
        self.end_of_text = re.compile(rf"\s*{re.escape(tokenizer.eos_token)}" if tokenizer.eos_token else r"(?!)")
        # Asked directly: a call of the tokenizer sets it up anew each time. Its file may ask for a cut or for padding.
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        a, b = (self.backend.encode(letter, add_special_tokens=False).ids for letter in "ab")
        self.pieces_join = self.backend.decode([*a, *b]) == "ab"  # SentencePiece's begin each text with a blank
        self.templates: dict[bool, tuple[str, bool]] = {}
        # Whether the template adds the head of an answer when asked to; None: not seen yet.
        self.asks: bool | None = None
        self.shapes: set[tuple[Any, ...]] = set()

    def encode(self, documents: list[Chat | str]) -> list[Encoded | BadRow]:
        """Tokens of each document, uncut; a BadRow where the template does not take it."""
        outcomes: list[Encoded | BadRow | None] = [None] * len(documents)
        texts = [i for i, document in enumerate(documents) if isinstance(document, str)]
        rendered: dict[int, tuple[str, list[Span]]] = {}
        for i, document in enumerate(documents):
            if isinstance(document, Chat):
                try:
                    rendered[i] = self.render(document)
                except BadRow as error:
                    outcomes[i] = error
        for i, encoded in zip(texts, self._encode_texts([documents[i] for i in texts]), strict=True):
            outcomes[i] = encoded
        for i, encoded in zip(rendered, self._encode_rendered(list(rendered.values())), strict=True):
            outcomes[i] = encoded
        return outcomes  # type: ignore[return-value]  # all are filled by now

    def _encode_texts(self, texts: list[Any]) -> Iterator[Encoded]:
        """As the tokenizer begins a text, and with end-of-text behind each."""
        end = self.tokenizer.eos_token_id
        if texts and end is None:
            raise UserError("model.name: the tokenizer has no end-of-text token to part documents with")
        for encoding in self.backend.encode_batch(texts):
            tokens = encoding.ids
            whole = np.array(tokens if tokens[-1:] == [end] else [*tokens, end], np.int32)
            yield Encoded(whole, np.ones(len(whole), np.int8))

    def _encode_rendered(self, rendered: list[tuple[str, list[Span]]]) -> Iterator[Encoded]:
        encodings = self.backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (text, spans), encoding in zip(rendered, encodings, strict=True):
            places = [_tokens_of(encoding, span, text) for span in spans]
            if None in places and self.pieces_join:
                # A token reaches over the edge of a turn, which generation could never produce: cut the text there.
                yield self._encode_pieces(text, spans)
                continue
            supervised = np.zeros(len(encoding.ids), np.int8)
            for place, (first, end) in zip(places, spans, strict=True):
                if place is not None:
                    supervised[slice(*place)] = 1
                else:  # the blank before a word is part of it
                    supervised |= np.array([start < end and stop > first for start, stop in encoding.offsets], np.int8)
            yield Encoded(np.array(encoding.ids, np.int32), supervised)

    def _encode_pieces(self, text: str, spans: list[Span]) -> Encoded:
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        pieces = [text[first:end] for first, end in pairwise(edges)]
        tokens = [encoding.ids for encoding in self.backend.encode_batch(pieces, add_special_tokens=False)]
        flags = [np.full(len(ids), number % 2, np.int8) for number, ids in enumerate(tokens)]
        return Encoded(np.concatenate([np.array(ids, np.int32) for ids in tokens]), np.concatenate(flags))

    def render(self, chat: Chat) -> tuple[str, list[Span]]:
        """The chat as the model sees it, and the spans that are trained. Raises BadRow."""
        turns = chat.turns
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        text, marked = self._apply(turns, chat.tools)
        if marked is None:
            spans: dict[int, Span] = {}
            for i in answers:
                spans[i] = self._span(chat, i, text, at_least=max((end for _, end in spans.values()), default=0))
        else:
            spans = self._of_marked(chat, answers, text, marked)
        self._hold_nothing_missing(chat, text, spans)
        trained = [spans[i] for i in answers if i not in chat.untrained]
        if self.supervise == "last":
            trained = [spans[answers[-1]]] if answers[-1] not in chat.untrained else []
        elif self.supervise == "all":
            left_out = [self._content(chat, i, text) for i, turn in enumerate(turns) if turn["role"] == "tool"]
            left_out += [spans[i] for i in chat.untrained if i in spans]
            edges = [0, *(edge for span in sorted(left_out) for edge in span), len(text)]
            trained = list(zip(edges[::2], edges[1::2], strict=True))
        return text, trained

    def _apply(self, turns: list[Turn], tools: Any, ask: bool = False) -> tuple[str, list[Span] | None]:
        """The template's text and its generation markers, if it has any; `ask` adds the head of an answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template, marks = self._template(bool(tools))
        try:
            texts, marked = render_jinja_template(
                [turns], tools=tools, chat_template=template, add_generation_prompt=ask,
                return_assistant_tokens_mask=marks, **self.special_tokens,
            )  # fmt: skip
        except Exception as error:  # the template is a program of somebody else's
            said = " ".join(str(error).split())[:300]
            raise BadRow(f"the chat template refuses this chat: {said or type(error).__name__}") from None
        return texts[0], list(map(tuple, marked[0])) if marks else None

    def _template(self, with_tools: bool) -> tuple[str, bool]:
        """The template, with its clock stopped, and whether it marks generations."""
        if with_tools not in self.templates:
            try:
                template = self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            except ValueError:
                raise UserError(
                    "model.name: these are chats, but the tokenizer has no chat template: name an instruction-tuned "
                    "model, or a template file in data.chat_template"
                ) from None
            template = CLOCK.sub(lambda found: json.dumps(TODAY.strftime(found[2])), template)
            if re.search(r"strftime_now\s*\(", template):
                raise UserError(
                    "data.chat_template: the template reads the clock with a format that it computes, so that tokens "
                    "would change overnight; write the format into the call"
                )
            self.templates[with_tools] = template, re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        return self.templates[with_tools]

    def _span(self, chat: Chat, turn: int, text: str, at_least: int) -> Span:
        """From behind the head of an answer to the end of the turn, in the rendering of the whole chat."""
        head = self._apply(chat.turns[:turn], chat.tools, ask=True)[0]
        is_last = turn == len(chat.turns) - 1
        through = text if is_last else self._apply(chat.turns[: turn + 1], chat.tools)[0]
        if text.startswith(through) and through.startswith(head):
            first = len(head)
            if self.asks is None:
                self.asks = head != self._apply(chat.turns[:turn], chat.tools)[0]
            content = first if self.asks else self._content(chat, turn, text)[0]
            if text[first:content].strip():
                first = content  # it cannot ask; the head of the turn is not the answer's
            # What follows in the whole text is the next turn's, but for the end of text that some write between turns.
            return first, self._end_of_turn(text, len(through.rstrip()), closing=self.end_of_text)
        # The template renders this turn, or one before it, otherwise when more turns follow (Qwen3 takes out old
        # reasoning): find what is left of it by putting something else in its place.
        first, end = self._content(chat, turn, text)
        before = self._apply(chat.turns[:turn], chat.tools)[0]
        ask = head.removeprefix(before) if head.startswith(before) else ""
        found = text.rfind(ask, at_least, first) if ask else -1
        return (first if found < 0 else found + len(ask)), self._end_of_turn(text, end)

    def _of_marked(self, chat: Chat, answers: list[int], text: str, marked: list[Span]) -> dict[int, Span]:
        """The marked span of each answer, its end of turn included."""
        if len(marked) != len(answers):
            raise BadRow(
                f"the chat template marks {len(marked)} generations, but the chat has {len(answers)} turns of the "
                "assistant; mend its {% generation %} blocks"
            )
        return {i: (first, self._end_of_turn(text, end)) for i, (first, end) in zip(answers, marked, strict=True)}

    def _end_of_turn(self, text: str, end: int, closing: re.Pattern[str] | None = None) -> int:
        """Behind the special token at `end`, unless what ends there has one already; spaces behind it are left out.

        Behind spaces only the end-of-text token counts: another may be the head of the next turn.
        """
        kept = len(text[:end].rstrip())
        if any(found.end() == kept for found in self.special.finditer(text, max(0, kept - 64), kept)):
            return kept
        found = (closing or self.special).match(text, end) or self.end_of_text.match(text, end)
        return found.end() if found else end

    def _content(self, chat: Chat, turn: int, text: str) -> Span:
        """Where the content of a turn stands in the whole text: where the text changes if the content does."""
        turns = [*chat.turns]
        turns[turn] = {k: v for k, v in turns[turn].items() if k != "tool_calls"} | {"content": STAND_IN}
        other = self._apply(turns, chat.tools)[0]
        if STAND_IN not in other:
            raise BadRow(f"turn {turn + 1} ({chat.turns[turn]['role']}): {_LEFT_OUT} its content")
        first = _common(text, other)
        end = len(text) - min(_common(text[::-1], other[::-1]), len(text) - first, len(other) - first)
        return first, end

    def _hold_nothing_missing(self, chat: Chat, text: str, spans: dict[int, Span]) -> None:
        # Whether a template shows a turn at all is a matter of the roles: looked at once for each order of them.
        shape = (bool(chat.tools), *((turn["role"], bool(turn.get("tool_calls"))) for turn in chat.turns))
        if shape not in self.shapes:
            for i in range(len(chat.turns)):
                self._content(chat, i, text)
            stand_in = {"type": "function", "function": {"name": STAND_IN, "description": "", "parameters": {}}}
            if chat.tools and STAND_IN not in self._apply(chat.turns, [stand_in])[0]:
                raise BadRow(f"tools: {_LEFT_OUT} the tools; {_OTHER_TEMPLATE}, or set data.fields={{tools: null}}")
            self.shapes.add(shape)
        for i, turn in enumerate(chat.turns):
            at = f"turn {i + 1} ({turn['role']})"
            within = text[slice(*spans[i])] if i in spans else text
            if not _shows(within, turn["content"]):
                # Of an answer before the last, the template may take out the beginning: reasoning, not for later turns.
                left = _squeezed(self.special.sub("", within)) if i in spans and i < max(spans) else ""
                if not left or not _squeezed(turn["content"]).endswith(left):
                    raise BadRow(f"{at}: {_LEFT_OUT} its content or a part of it; {_OTHER_TEMPLATE}")
            for call in turn.get("tool_calls", ()):
                function = call["function"]
                if not all(_shows(within, said) for said in [function["name"], *_texts(function["arguments"])]):
                    raise BadRow(f"{at}: {_LEFT_OUT} its call of {function['name']!r}; {_OTHER_TEMPLATE}")
            if i == max(spans) and not _shows(within, turn.get("reasoning_content", "")):
                raise BadRow(f"{at}: {_LEFT_OUT} its reasoning_content; {_OTHER_TEMPLATE}")


_LEFT_OUT = "the chat template leaves out"
_OTHER_TEMPLATE = "name one that shows it in data.chat_template"


def _tokens_of(encoding: Any, span: Span, text: str) -> tuple[int, int] | None:
    """The tokens [first, end) that make up a span of the text; None if its edges are not edges of tokens.

    A tokenizer that leaves blanks out of its offsets cannot say it of a span that begins or ends with one: None too.
    """
    first, end = span
    if first == end:
        return 0, 0
    edges = []
    for edge in (first, end):
        token = encoding.char_to_token(edge) if edge < len(text) else len(encoding.ids)
        if token is None or (edge < len(text) and encoding.token_to_chars(token)[0] < edge):
            return None
        edges.append(token)
    return edges[0], edges[1]


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _shows(text: str, content: str) -> bool:
    """As it is but for spaces around it, or as JSON, or with other spaces and line breaks."""
    return (
        content.strip() in text
        or json.dumps(content, ensure_ascii=False)[1:-1] in text
        or _squeezed(content) in _squeezed(text)
    )


def _texts(value: Any) -> Iterator[str]:
    """The texts inside a call's arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
