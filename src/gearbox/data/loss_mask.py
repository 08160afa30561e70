"""Turn chats and texts into token ids and a loss mask, which marks the trained tokens.

An answer begins where the prompt that asks for it ends, and ends with the token at which generation stops. Its span may
contain only its own text and the marks around it: `chat_rendering` tells where each character comes from.
Only the rendering of the complete chat counts. A chat is rejected if that rendering omits part of a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gearbox.data.chat_rendering import (
    DYED,
    FIELDS,
    FIRST,
    LEFT_OUT,
    OTHER_TEMPLATE,
    STAND_IN,
    UNKNOWN,
    ChatTemplate,
    Rendering,
    Span,
    check_nothing_missing,
    check_tools,
    common_prefix,
)
from gearbox.data.records import NO_END
from gearbox.data.row_formats import Chat, InvalidRecord, Turn
from gearbox.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

MARK = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]")
ROLE = re.compile(r"assistant|model|bot|gpt|\bai\b", re.IGNORECASE)
THOUGHT = re.compile(r"<[^<>\s]*(?:think|thought|reason)[^<>\s]*>|\[THINK\]|<\|channel>", re.IGNORECASE)
OPENING = r"<[^<>\s]*(?i:start|begin)[^<>\s]*>"


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
        self.template = ChatTemplate(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        special, any_added = _any_of(str(token) for token in added if token.special), _any_of(map(str, added))
        self.special, self.added = re.compile(special), re.compile(any_added)
        self.next_special = re.compile(rf"\s*(?:{special})")
        self.at_end = re.compile(rf"(?:{special})\Z"), re.compile(rf"(?:{any_added})\Z")
        self.next_head = re.compile(rf"\s*(?={OPENING})(?:{special})(?:\s|{special})*\Z")
        # Use the backend directly, because the tokenizer configures it again in each call.
        # The tokenizer file may request truncation or padding: switch both off.
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        a, b = (self.backend.encode(letter, add_special_tokens=False).ids for letter in "ab")
        # SentencePiece tokenizers prepend a space to each text, so segments cannot be tokenized one by one.
        self.can_segment = self.backend.decode([*a, *b]) == "ab"
        self.gaps: dict[tuple[object, ...], str] = {}
        """The template's text after the last string of some turns, by everything it depends on."""
        self.asks: dict[tuple[bool, str], bool] = {}
        """True if the template writes the head of an answer on request, with and without tools, by the role before."""

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
            raise UserError(NO_END)
        for encoding in self.backend.encode_batch(texts):
            ids = encoding.ids
            tokens = np.array(ids if ids[-1:] == [end] else [*ids, end], np.int32)
            yield Encoded(tokens, np.ones(len(tokens), np.int8))

    def _encode_rendered(self, rendered: list[tuple[str, list[Span]]]) -> Iterator[Encoded | InvalidRecord]:
        encodings = self.backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (text, spans), encoding in zip(rendered, encodings, strict=True):
            token_spans = [_tokens_of(encoding, span, text) for span in spans]
            if None in token_spans and self.can_segment:
                # A token crosses the edge of a turn. Generation never produces one, so divide the text there.
                yield self._encode_segments(text, spans)
                continue
            loss_mask = np.zeros(len(encoding.ids), np.int8)
            outside = ""
            for token_span, (first, end) in zip(token_spans, spans, strict=True):
                if token_span is not None:
                    loss_mask[slice(*token_span)] = 1
                    continue
                for token, (start, stop) in enumerate(encoding.offsets):
                    if start < end and stop > first:  # the token may join a word and the space before it: train it
                        loss_mask[token] = 1
                        outside += text[start:first] + text[end:stop]
            if outside.strip():
                yield InvalidRecord(f"a token joins {outside.strip()[:40]!r} and a trained answer; {OTHER_TEMPLATE}")
            else:
                yield Encoded(np.array(encoding.ids, np.int32), loss_mask)

    def _encode_segments(self, text: str, spans: list[Span]) -> Encoded:
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        segments = [text[first:end] for first, end in pairwise(edges)]
        tokens = [encoding.ids for encoding in self.backend.encode_batch(segments, add_special_tokens=False)]
        loss_masks = [np.full(len(ids), number % 2, np.int8) for number, ids in enumerate(tokens)]
        return Encoded(np.concatenate([np.array(ids, np.int32) for ids in tokens]), np.concatenate(loss_masks))

    def render(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the rendered chat and its trained spans. Raise InvalidRecord if a span cannot be known exactly."""
        rendering = self.template.render(chat)
        check_tools(rendering)
        check_nothing_missing(rendering)
        answers = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
        trained = [i for i in answers if i not in chat.untrained]
        if self.supervise == "last":
            trained = [i for i in answers[-1:] if i in trained]
        spans = {i: self._span(rendering, i) for i in (answers if self.supervise == "all" else trained)}
        if self.supervise != "all":
            return rendering.text, [spans[i] for i in trained]
        excluded = [spans[i] for i in chat.untrained if i in spans]
        excluded += [rendering.content(i) for i, turn in enumerate(chat.turns) if turn["role"] == "tool"]
        edges = [0, *(edge for span in sorted(excluded) for edge in span), len(rendering.text)]
        return rendering.text, list(zip(edges[::2], edges[1::2], strict=True))

    def _span(self, rendering: Rendering, turn: int) -> Span:
        """Return the span of an answer, from the end of its head to the end of its turn. It contains nothing else."""
        _check_alone(rendering, turn, rendering.edges.get(turn, (0, 0)))
        first = self._start(rendering, turn)
        marked = rendering.marked[turn] if rendering.marked is not None else None
        if marked is not None:
            first = marked[0] if self.supplied else max(first, marked[0])
        end = self._end(rendering, turn, first)
        if marked is not None:
            end = max(end, len(rendering.text[: marked[1]].rstrip()))
        _check_alone(rendering, turn, (first, end))
        for call in rendering.chat.turns[turn].get("tool_calls", ()):
            # Some templates print the name only in the head of the result, which is another turn.
            own = rendering.dyed[first:end]
            if turn not in rendering.edges:
                own = own.partition(self.tokenizer.eos_token or STAND_IN)[0]
            if (name := call["function"]["name"]) not in own:
                raise InvalidRecord(f"turn {turn + 1} (assistant): {LEFT_OUT} its call of {name!r}; {OTHER_TEMPLATE}")
        return first, end

    def _start(self, rendering: Rendering, turn: int) -> int:
        """Return the end of an answer's head: the end of the prompt that asks for this answer."""
        asked, owner = self._gap(rendering, "asked", turn)
        at = rendering.edges[owner][1] if owner >= 0 else 0
        rest = rendering.dyed[at : rendering.edges[turn][0] if turn in rendering.edges else None]
        about = bool(rendering.chat.tools), rendering.chat.turns[turn - 1]["role"]
        if about not in self.asks:
            self.asks[about] = asked != self._gap(rendering, "quiet", turn)[0]
        if not self.asks[about]:
            plain, _ = self._gap(rendering, "plain", turn)
            if ROLE.search(plain[self._common_prefix(asked, plain) :]) or not self._common_prefix(asked, rest):
                return at + self._common_prefix(plain, rest)
            return at + max(self._common_prefix(asked, rest), _after(asked, rest))
        if not self.supplied and rest.startswith(asked.rstrip()):
            return at + self._common_prefix(asked, rest)
        if not self.supplied and (length := _after(asked, rest)):
            return at + length
        head = self._role_head(rendering, turn, asked)
        found = (rest.rfind if turn in rendering.edges else rest.find)(head) if head else -1
        length = found + len(head) if found >= 0 else self._common_prefix(asked, rest)
        if turn in rendering.edges and ROLE.search(rest[length:]):
            length = self._common_prefix(self._gap(rendering, "plain", turn)[0], rest)
        return at + length

    def _role_head(self, rendering: Rendering, turn: int, asked: str) -> str:
        """Return the part of a generation prompt that every answer has. It contains no reasoning."""
        request = asked[self._common_prefix(asked, self._gap(rendering, "quiet", turn)[0]) :]
        plain, _ = self._gap(rendering, "plain", turn)
        if thought := THOUGHT.search(request):
            request = request[: thought.start()]
        length = next((n for n in range(len(request), 0, -1) if request[:n] in plain), 0)
        return request[: self._common_prefix(request[:length] + STAND_IN, request)]

    def _gap(self, rendering: Rendering, kind: str, turn: int) -> tuple[str, int]:
        """Return what the template writes after the turns before this one, and the last of these that it writes.

        `asked` adds the head of an answer, `quiet` nothing, and `plain` an answer without reasoning and calls.
        """
        tools, shapes = rendering.chat.tools, rendering.dyed_turns.shapes[:turn]
        key = (kind, bool(tools), *shapes)
        if None not in shapes and key in self.gaps:
            return self.gaps[key], turn - 1
        before = rendering.dyed_turns.turns[:turn]
        if kind == "plain":
            before = [*before, {"role": "assistant", "content": STAND_IN}]
        dyed = self.template.apply_dyed(before, tools, ask=kind == "asked")
        stop = dyed.find(STAND_IN) if kind == "plain" else len(dyed)
        begin = _last_dyed(dyed, stop)
        owner = (ord(dyed[begin - 1]) - rendering.dyed_turns.base) // len(FIELDS) if begin else -1
        if None not in shapes and owner == turn - 1:
            self.gaps[key] = dyed[begin:stop]
        return dyed[begin:stop], owner

    def _end(self, rendering: Rendering, turn: int, first: int) -> int:
        """Return the end of an answer: its own text, what closes it, and the token at which generation stops.

        The template may write that token only if another turn follows. It is then appended to the rendering.
        """
        place, tail = _tail(rendering, turn, rendering.dyed, first)
        own = rendering.content(turn)[1] - place if turn in rendering.edges else 0
        eos = self.tokenizer.eos_token or STAND_IN
        if (special := self.special.search(tail, own)) and special[0] == eos:
            return place + special.end()
        is_last = turn == len(rendering.chat.turns) - 1
        other = self._other_tail(rendering, turn, is_last)
        length = own + len(self.next_head.sub("", tail[own : self._common_prefix(tail, other)]).rstrip())
        if eos in tail[own:length]:
            length = tail.index(eos, own) + len(eos)
        calls = bool(rendering.chat.turns[turn].get("tool_calls"))
        if (written := self._written_end(tail, own, length, calls)) is not None:
            return place + written
        closing, rest = tail[own:length], tail[length:].rstrip()
        if is_last and (missing := self._missing_end(other, length, rest, calls)):
            rendering.append(place + length + len(rest), missing)
            return len(rendering.text)
        if self.at_end[1].search(closing):
            return place + length
        if is_last and not rest:
            rendering.append(len(rendering.text), self._stop())
            return len(rendering.text)
        raise InvalidRecord(
            f"turn {turn + 1} (assistant): the chat template ends it with {closing[-40:]!r}, which is no token; use "
            "model.add_tokens or data.supervise=last"
        )

    def _written_end(self, tail: str, own: int, length: int, calls: bool) -> int | None:
        """Return the end of the token in the tail that ends an answer, or None. What closes it is tail[own:length]."""
        if self.at_end[0].search(tail[own:length]):
            return length
        if found := self.special.search(tail, own, length):
            return found.end()
        found = self.next_special.match(tail, length) or (self.special.search(tail, length) if calls else None)
        return found.end() if found and _may_end(found[0], calls) else None

    def _missing_end(self, other: str, length: int, rest: str, calls: bool) -> str:
        """Return the end that the template writes only if another turn follows, or "". `other` is that tail."""
        found = self.next_special.match(other, length) or (self.special.search(other, length) if rest else None)
        if not found or not _may_end(found[0], calls) or (rest and not calls):
            return ""
        begin = len(other[: found.end()].removesuffix(found[0].strip()).rstrip())
        return other[begin : found.end()]

    def _other_tail(self, rendering: Rendering, turn: int, is_last: bool) -> str:
        """Return what the template writes after an answer if it is the last turn, or if it is not the last."""
        turns, shapes = rendering.dyed_turns.turns[: turn + 1], rendering.dyed_turns.shapes[: turn + 1]
        tools = rendering.chat.tools
        key = ("next" if is_last else "last", bool(tools), *shapes)
        if None not in shapes and key in self.gaps:
            return self.gaps[key]
        if is_last:
            results: list[Turn] = [
                {"role": "tool", "name": call["function"]["name"], "content": STAND_IN}
                | ({"tool_call_id": call["id"]} if "id" in call else {})
                for call in turns[-1].get("tool_calls", ())
            ]
            turns = [*turns, *(results or [{"role": "user", "content": STAND_IN}])]
        try:
            dyed = self.template.apply_dyed(turns, tools)
        except InvalidRecord:
            return ""
        tail = _tail(rendering, turn, dyed, 0)[1]
        if None not in shapes:
            self.gaps[key] = tail
        return tail

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
            raise InvalidRecord(f"neither the chat template nor the tokenizer ends an answer; {OTHER_TEMPLATE}")
        return str(token)

    def _common_prefix(self, a: str, b: str) -> int:
        """Return the length of the longest common prefix that does not end inside a mark."""
        length = common_prefix(a, b)
        if length == len(a):
            return length
        for text in (a, b):
            for pattern in (self.added, MARK):
                for mark in pattern.finditer(text, max(0, length - 64), length + 64):
                    if mark.start() < length < mark.end():
                        length = mark.start()
        return length


def _may_end(token: str, calls: bool) -> bool:
    """Return False for a token that opens the turn after a call: generation does not stop there."""
    return not calls or not re.match(OPENING, token.strip())


def _after(prompt: str, text: str) -> int:
    """Return where the text continues after a prompt that it begins with, except for spaces, or 0."""
    found = re.match(r"\s*".join(map(re.escape, "".join(prompt.split()))), text.lstrip())
    return found.end() + len(text) - len(text.lstrip()) if found else 0


def _last_dyed(dyed: str, stop: int) -> int:
    """Return the end of the last dyed character before `stop`, or 0."""
    return next((k for k in range(stop, 0, -1) if dyed[k - 1] >= chr(FIRST) and DYED.match(dyed[k - 1])), 0)


def _tail(rendering: Rendering, turn: int, dyed: str, first: int) -> tuple[int, str]:
    """Return where the strings of an answer end in a dyed text, and the text from there to the next string."""
    own = [chr(rendering.dyed_turns.base + turn * len(FIELDS) + field) for field in range(len(FIELDS))]
    place = max(dyed.rfind(dye, first) for dye in own) + 1
    if not place:  # its calls have no strings
        stand_in = dyed.find(STAND_IN)
        place = first or _last_dyed(dyed, len(dyed) if stand_in < 0 else stand_in)
        for call in rendering.chat.turns[turn].get("tool_calls", ()):
            name = call["function"]["name"]
            place = max(place, dyed.find(name, place) + len(name))
    following = DYED.search(dyed, place)
    return place, dyed[place : following.start() if following else len(dyed)]


def _check_alone(rendering: Rendering, turn: int, span: Span) -> None:
    """Raise InvalidRecord if the span of an answer contains another turn, or lacks a part of this one."""
    first, end = span
    for run in rendering.runs:
        is_inside = first <= run.first and run.end <= end
        if run.turn == turn and not is_inside and (rendering.marked is None or run.field != "reasoning_content"):
            problem = "a part of it elsewhere"
        elif run.turn != turn and run.first < end and run.end > first:
            problem = f"turn {run.turn + 1} inside it"
        else:
            continue
        raise InvalidRecord(
            f"turn {turn + 1} (assistant): the chat template renders {problem}, so {UNKNOWN}; {OTHER_TEMPLATE}"
        )


def _any_of(tokens: Iterable[str]) -> str:
    """Return a pattern of any of these strings."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"


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
