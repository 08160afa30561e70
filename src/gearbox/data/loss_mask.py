"""Turn chats and texts into token ids and a loss mask, which marks the trained tokens.

The chat template defines the tokens of an assistant turn. If it has generation markers, these mark the turn. Otherwise
the turn is the difference between two renderings: the turns before it, and the turns up to it.
Only the rendering of the complete chat counts. A chat is rejected if that rendering omits part of a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gearbox.data.dye import FIELDS, FIRST, LAST, MAX_TURNS, DyedChat, Dyer, Run, find_runs
from gearbox.data.row_formats import Chat, InvalidRecord, JsonObject, Turn
from gearbox.errors import UserError, one_line

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]  # characters [first, end) of a rendered chat
STAND_IN = chr(LAST) * 4  # content of turns that are added to see what the template writes between turns
MARK = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]")
ROLE = re.compile(r"assistant|model|bot|gpt|\bai\b", re.IGNORECASE)
THOUGHT = re.compile(r"<[^<>\s]*(?:think|thought|reason)[^<>\s]*>|\[THINK\]|<\|channel>", re.IGNORECASE)
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

    def __init__(self, tokenizer: PreTrainedTokenizerFast, supervise: str, supplied: bool = False) -> None:
        self.tokenizer, self.supervise, self.supplied = tokenizer, supervise, supplied
        added = tokenizer.added_tokens_decoder.values()
        self.special = _any_of(str(token) for token in added if token.special)
        self.added = _any_of(map(str, added))
        self.special_tokens = tokenizer.special_tokens_map
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
        self.dyers: dict[str, Dyer] = {}
        self.gaps: dict[tuple[object, ...], str] = {}
        """The template's text between two turns, by everything it depends on."""
        self.asks: dict[tuple[bool, str], bool] = {}
        """True if the template writes the head of an answer on request, by the role before it and if there are tools."""

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
        """Return the rendered chat and its trained spans. Raise InvalidRecord if a span cannot be known exactly."""
        rendering = self._render_dyed(chat)
        self._check_nothing_missing(rendering)
        answers = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
        trained = [i for i in answers if i not in chat.untrained]
        if self.supervise == "last":
            trained = [i for i in answers[-1:] if i in trained]
        marked = dict(zip(answers, rendering.marked or (), strict=False))
        spans = {i: self._span(rendering, i, marked.get(i)) for i in (answers if self.supervise == "all" else trained)}
        if self.supervise != "all":
            return rendering.text, [spans[i] for i in trained]
        excluded = [spans[i] for i in chat.untrained if i in spans]
        excluded += [rendering.own(i) for i, turn in enumerate(chat.turns) if turn["role"] == "tool"]
        edges = [0, *(edge for span in sorted(excluded) for edge in span), len(rendering.text)]
        return rendering.text, list(zip(edges[::2], edges[1::2], strict=True))

    def _render_dyed(self, chat: Chat) -> _Rendering:
        """Render a chat, and once more with dyed strings."""
        if len(chat.turns) > MAX_TURNS:
            raise InvalidRecord(f"the chat has {len(chat.turns):,} turns, more than {MAX_TURNS:,}; divide it")
        template, _ = self._template(bool(chat.tools))
        if template not in self.dyers:
            self.dyers[template] = Dyer(template)
        text, marked = self._apply(chat.turns, chat.tools)
        dyed_chat = self.dyers[template].dye(chat.turns)
        dyed = self._apply(dyed_chat.turns, chat.tools)[0]
        runs = find_runs(text, dyed)
        if runs is None:
            raise InvalidRecord(f"the chat template changes the text of the turns, so {_UNKNOWN}; {_OTHER_TEMPLATE}")
        answers = sum(turn["role"] == "assistant" for turn in chat.turns)
        if marked is not None and len(marked) != answers:
            raise InvalidRecord(
                f"the chat template marks {len(marked)} generations, but the chat has {answers} assistant turns; "
                "fix its {% generation %} blocks"
            )
        return _Rendering(chat, text, dyed, dyed_chat, runs, marked)

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

    def _span(self, rendering: _Rendering, turn: int, marked: Span | None) -> Span:
        """Return the span of an answer, from the end of its head to the end of its turn. It contains nothing else."""
        first = self._start(rendering, turn)
        if marked is not None:
            first = marked[0] if self.supplied else max(first, marked[0])
        end = self._end(rendering, turn, first)
        if marked is not None:
            end = max(end, len(rendering.text[: marked[1]].rstrip()))
        name = f"turn {turn + 1} (assistant)"
        for run in rendering.runs:
            if run.turn == turn and not first <= run.first <= run.end <= end:
                raise InvalidRecord(f"{name}: the chat template renders a part of it elsewhere, so {_UNKNOWN}")
            if run.turn != turn and run.first < end and run.end > first:
                raise InvalidRecord(
                    f"{name}: the chat template renders turn {run.turn + 1} inside it, so {_UNKNOWN}; {_OTHER_TEMPLATE}"
                )
        for call in rendering.chat.turns[turn].get("tool_calls", ()):
            if call["function"]["name"] not in rendering.dyed[first:end]:
                raise InvalidRecord(f"{name}: {_LEFT_OUT} its call of {call['function']['name']!r}; {_OTHER_TEMPLATE}")
        return first, end

    def _start(self, rendering: _Rendering, turn: int) -> int:
        """Return the end of an answer's head: the end of the prompt that asks for this answer."""
        before = rendering.dyed_chat.turns[:turn]
        asked, at = self._gap(rendering, "asked", before)
        rest = rendering.dyed[at : rendering.first(turn)]
        about = bool(rendering.chat.tools), rendering.chat.turns[turn - 1]["role"]
        if about not in self.asks:
            self.asks[about] = asked != self._gap(rendering, "quiet", before)[0]
        if not self.asks[about]:
            plain, _ = self._gap(rendering, "plain", before, answer=True)
            head = plain if ROLE.search(plain[self._common_prefix(asked, plain) :]) else asked
            return at + self._common_prefix(head, rest)
        if not self.supplied and rest.startswith(asked.rstrip()):
            return at + self._common_prefix(asked, rest)
        head = self._role_head(rendering, before, asked)
        found = rest.find(head) if head else -1
        return at + (found + len(head) if found >= 0 else self._common_prefix(asked, rest))

    def _role_head(self, rendering: _Rendering, before: list[Turn], asked: str) -> str:
        """Return the part of a generation prompt that every answer has: all but reasoning that the template supplies."""
        request = asked[self._common_prefix(asked, self._gap(rendering, "quiet", before)[0]) :]
        plain, _ = self._gap(rendering, "plain", before, answer=True)
        if thought := THOUGHT.search(request):
            request = request[: thought.start()]
        lengths = (n for n in range(len(request), 0, -1) if request[:n] in plain)
        length = next(lengths, 0)
        return request[: self._common_prefix(request[:length] + STAND_IN, request)]

    def _gap(self, rendering: _Rendering, kind: str, turns: list[Turn], answer: bool = False) -> tuple[str, int]:
        """Return the template's text after the last string of some turns, and the place of that string's end."""
        tools = rendering.chat.tools
        shapes = rendering.dyed_chat.shapes[: len(turns)]
        key = (kind, bool(tools), *shapes)
        last = len(turns) - 1
        if None not in shapes and key in self.gaps:
            return self.gaps[key], rendering.end(last)
        turns = [*turns, {"role": "assistant", "content": STAND_IN}] if answer else turns
        dyed = self._apply(turns, tools, ask=kind == "asked")[0]
        stop = dyed.find(STAND_IN) if answer else len(dyed)
        begin = next((k for k in range(stop, 0, -1) if FIRST <= ord(dyed[k - 1]) < LAST), 0)
        gap = dyed[begin:stop]
        owner = (ord(dyed[begin - 1]) - FIRST) // len(FIELDS) if begin else -1
        if None not in shapes and owner == last:
            self.gaps[key] = gap
        return gap, rendering.end(owner)

    def _end(self, rendering: _Rendering, turn: int, first: int) -> int:
        """Return the end of an answer: its own text, what closes it, and the token at which generation stops.

        The template may write that token only if another turn follows. It is then appended to the rendering.
        """
        chat = rendering.chat
        place = max(first, rendering.own(turn)[1])
        tail = rendering.dyed[place : rendering.next_dyed(place)]
        eos = self.tokenizer.eos_token or "\0"
        special = self.special.search(tail)
        if special and special[0] == eos:
            return place + special.end()
        is_last = turn == len(chat.turns) - 1
        other = self._closing(rendering, turn, place, is_last)
        closing = tail[: self._common_prefix(tail, other)].rstrip()
        if eos in closing:
            closing = closing[: closing.index(eos) + len(eos)]
        if re.search(rf"(?:{self.special.pattern})\Z", closing):
            return place + len(closing)
        next_special = re.compile(rf"\s*(?:{self.special.pattern})")
        if found := next_special.match(tail, len(closing)):
            return place + found.end()
        if is_last and not tail[len(closing) :].strip():
            found = next_special.match(other, len(closing))
            rendering.append(place + len(closing), other[len(closing) : found.end()] if found else self._stop())
            return len(rendering.text)
        if not chat.turns[turn].get("tool_calls") and re.search(rf"(?:{self.added.pattern})\Z", closing):
            return place + len(closing)
        raise InvalidRecord(
            f"turn {turn + 1} (assistant): the chat template ends it with {closing[-40:]!r}, which is no token of the "
            "tokenizer, so generation would not stop there; add it to model.add_tokens or set data.supervise=last"
        )

    def _closing(self, rendering: _Rendering, turn: int, place: int, is_last: bool) -> str:
        """Return what the template writes after an answer if it is the last turn, or if it is not the last."""
        turns = rendering.dyed_chat.turns[: turn + 1]
        if not is_last:
            gap, at = self._gap(rendering, "quiet", turns)
            return gap[place - at :]
        calls = turns[-1].get("tool_calls", ())
        results: list[Turn] = [
            {"role": "tool", "name": call["function"]["name"], "content": STAND_IN}
            | ({"tool_call_id": call["id"]} if "id" in call else {})
            for call in calls
        ]
        try:
            dyed = self._apply([*turns, *(results or [{"role": "user", "content": STAND_IN}])], rendering.chat.tools)[0]
        except InvalidRecord:
            return ""
        begin = dyed.rfind(chr(ord(rendering.dyed[rendering.end(turn) - 1])), 0, dyed.find(STAND_IN)) + 1
        end = next((k for k in range(begin, len(dyed)) if ord(dyed[k]) >= FIRST and ord(dyed[k]) <= LAST), len(dyed))
        return dyed[begin + place - rendering.end(turn) : end]

    def _stop(self) -> str:
        """Return the token at which generation stops, for a template that ends no turn."""
        from transformers import GenerationConfig

        try:
            stops = GenerationConfig.from_pretrained(self.tokenizer.name_or_path).eos_token_id
        except OSError:
            stops = None
        stop = stops[0] if isinstance(stops, list) else stops
        token = self.tokenizer.eos_token if stop is None else self.tokenizer.convert_ids_to_tokens(stop)
        if token is None:
            raise InvalidRecord(f"neither the chat template nor the tokenizer ends an answer; {_OTHER_TEMPLATE}")
        return str(token)

    def _common_prefix(self, a: str, b: str) -> int:
        """Return the length of the longest common prefix that does not end inside a mark."""
        length = _common_prefix(a, b)
        for text in (a, b):
            for pattern in (self.added, MARK):
                for mark in pattern.finditer(text, max(0, length - 64), length + 64):
                    if mark.start() < length < mark.end():
                        length = mark.start()
        return length

    def _check_nothing_missing(self, rendering: _Rendering) -> None:
        """Raise InvalidRecord if the text lacks a turn, part of a turn, or the tools."""
        chat, found = rendering.chat, rendering.found
        for tool in chat.tools or ():
            for part in (tool["function"]["name"], tool["function"].get("description", "")):
                if not _shows(rendering.dyed, part):
                    hint = "set data.chat_template to one that renders them, or set data.fields={tools: null}"
                    raise InvalidRecord(f"tools: {_LEFT_OUT} the tools; {hint}")
        last_answer = max(i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant")
        for (i, field), plain in rendering.dyed_chat.plain.items():
            turn = chat.turns[i]
            kept = found.get((i, field), "")
            if len(kept) >= len(plain) and (plain or field != "content" or _shows(rendering.dyed, turn[field])):
                continue
            # The template may remove the reasoning of an earlier answer, which later turns do not need.
            if turn["role"] == "assistant" and i < last_answer:
                if field == "reasoning_content" or (field == "content" and kept and plain.endswith(kept)):
                    continue
            part = {"content": "its content or a part of it", "tool_calls": "a part of its call"}.get(
                field, f"its {field}"
            )
            if field == "tool_calls":
                part = f"its call of {turn['tool_calls'][0]['function']['name']!r}"
            raise InvalidRecord(f"turn {i + 1} ({turn['role']}): {_LEFT_OUT} {part}; {_OTHER_TEMPLATE}")


@dataclass
class _Rendering:
    """A rendered chat, and the same with dyed strings."""

    chat: Chat
    text: str
    dyed: str
    dyed_chat: DyedChat
    runs: list[Run]
    marked: list[Span] | None

    @cached_property
    def edges(self) -> dict[int, Span]:
        """The first and the last dyed character of each turn."""
        edges: dict[int, Span] = {}
        for run in self.runs:
            edges[run.turn] = (edges.get(run.turn, (run.first, 0))[0], run.end)
        return edges

    @cached_property
    def found(self) -> dict[tuple[int, str], str]:
        """The dyed characters that the template printed, by turn and field."""
        found: dict[tuple[int, str], str] = {}
        for run in self.runs:
            text = self.text[run.first : run.end]
            if run.num_dyed != len(text):
                text = "".join(c for c, d in zip(text, self.dyed[run.first : run.end], strict=True) if c != d)
            found[run.turn, run.field] = found.get((run.turn, run.field), "") + text
        return found

    def first(self, turn: int) -> int:
        """Return the place of the first dyed character of a turn, or else the end of the text."""
        return self.edges[turn][0] if turn in self.edges else len(self.text)

    def end(self, turn: int) -> int:
        """Return the place after the last dyed character of a turn, or else 0."""
        return self.edges[turn][1] if turn in self.edges else 0

    def next_dyed(self, place: int) -> int:
        """Return the place of the next dyed character, or else the end of the text."""
        return min((run.first for run in self.runs if run.first >= place), default=len(self.text))

    def own(self, turn: int) -> Span:
        """Return the span of a turn's content in the text, with the undyed characters around it."""
        if turn not in self.edges:
            return 0, 0
        first, end = self.edges[turn]
        content, dyed = self.chat.turns[turn]["content"], self.dyed_chat.turns[turn]["content"]
        places = [k for k, (a, b) in enumerate(zip(content, dyed, strict=True)) if a != b]
        if places:
            before, after = content[: places[0]], content[places[-1] + 1 :]
            first -= max((len(s) for s in _forms(before) if self.text.endswith(s, 0, first)), default=0)
            end += max((len(s) for s in _forms(after) if self.text.startswith(s, end)), default=0)
        return first, end

    def append(self, place: int, end: str) -> None:
        """Replace the spaces from `place` on by the end of the last turn."""
        self.text, self.dyed = self.text[:place] + end, self.dyed[:place] + end


_UNKNOWN = "its trained tokens cannot be known"
_LEFT_OUT = "the chat template omits"
_OTHER_TEMPLATE = "set data.chat_template to one that renders it"


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of these strings."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _forms(text: str) -> set[str]:
    """Return the forms in which templates print a text: as it is, stripped, or escaped for JSON, Python or HTML."""
    quoted = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
    return {text, text.strip(), *quoted, escape(text), escape(text, quote=False)}


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
