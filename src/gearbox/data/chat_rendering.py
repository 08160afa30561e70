"""Render chats with a template, and follow their strings through it to know where each character comes from.

A chat is rendered a second time with dyed strings. In these, a rare character replaces every character, and stands for
its turn and field. The template cannot tell the difference, so both renderings have the same length.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import escape

from gearbox.data.records import NO_TEMPLATE
from gearbox.data.row_formats import Chat, InvalidRecord, JsonObject, Turn
from gearbox.data.sources import JSON
from gearbox.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]  # characters [first, end) of a rendered chat
Shape = tuple[object, ...]
FIELDS = ("content", "reasoning_content", "tool_calls")
# The dyes are rare ideographs. They have no case, and neither JSON nor Python's repr() escapes them.
FIRST, LAST = 0x20000, 0x2A6D0
MAX_TURNS = (LAST - FIRST) // len(FIELDS)
STAND_IN = chr(LAST) * 4  # content of turns that are added to see what the template writes between turns
DYED = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")
ESCAPED_DYE = re.compile(r"\\u(d8[0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")
ESCAPED = re.compile(r"(?:\\u[0-9a-f]{4})+")
# Spaces, and characters that templates or their filters escape, are not dyed.
KEPT = r"\s\"'\\<>&\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ue000-\uf8ff\ufeff\ufff0-\uffff"
CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Templates that print the date get Llama 3.1's own default, so that tokens do not change overnight.
TODAY = date(2024, 7, 26)
LEFT_OUT = "the chat template omits"
OTHER_TEMPLATE = "set data.chat_template to one that renders it"
UNKNOWN = "its trained tokens cannot be known"


class DyedTurns(NamedTuple):
    """Turns with dyed strings."""

    turns: list[Turn]
    plain: dict[tuple[int, str], str]
    """The characters that are dyed, by turn and field."""
    base: int
    """The first of the dyes."""
    shapes: list[Shape | None]
    """Everything about each turn on which the template's own text can depend, or None if that is not known."""


class Run(NamedTuple):
    """Characters [first, end) of a rendering that come from one field of a turn. Undyed ones may lie between them."""

    turn: int
    field: str
    first: int
    end: int
    num_dyed: int


@dataclass
class Rendering:
    """A rendered chat, and the same with dyed strings."""

    chat: Chat
    text: str
    dyed: str
    dyed_turns: DyedTurns
    runs: list[Run]
    marked: dict[int, Span] | None
    """What the template marks as generated, by turn. None if it has no markers."""

    def __post_init__(self) -> None:
        self.edges: dict[int, Span] = {}
        """The first dyed character of each turn, and the end of its last one."""
        for run in self.runs:
            self.edges[run.turn] = (self.edges[run.turn][0] if run.turn in self.edges else run.first, run.end)

    def printed(self, turn: int, field: str) -> str:
        """Return the characters of a field that the template printed, without those that are not dyed."""
        spans = [slice(run.first, run.end) for run in self.runs if (run.turn, run.field) == (turn, field)]
        return "".join(a for span in spans for a, b in zip(self.text[span], self.dyed[span], strict=True) if a != b)

    def content(self, turn: int) -> Span:
        """Return the span of a turn's strings in the text, with the undyed characters around them."""
        if turn not in self.edges:
            return 0, 0
        first, end = self.edges[turn]
        content, dyed = self.chat.turns[turn]["content"], self.dyed_turns.turns[turn]["content"]
        if content[:1] != dyed[:1] and content[-1:] != dyed[-1:]:
            return first, end
        places = [k for k, (a, b) in enumerate(zip(content, dyed, strict=True)) if a != b]
        if places:
            before, after = content[: places[0]], content[places[-1] + 1 :]
            first -= max((len(s) for s in _forms(before) if self.text.endswith(s, 0, first)), default=0)
            end += max((len(s) for s in _forms(after) if self.text.startswith(s, end)), default=0)
        return first, end

    def append(self, place: int, end: str) -> None:
        """Replace the spaces from `place` on by the end of the last turn."""
        self.text, self.dyed = self.text[:place] + end, self.dyed[:place] + end


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.special_tokens = tokenizer, tokenizer.special_tokens_map
        self._templates: dict[bool, tuple[str, bool]] = {}
        """Template and whether it marks generations, with and without tools."""
        self._literals: dict[bool, list[str]] = {}

    def apply(
        self, chats: list[list[Turn]], tools: list[JsonObject] | None, ask: bool = False
    ) -> tuple[list[str], list[Span] | None]:
        """Return the rendered texts, and the marked spans of the first or None. `ask` adds the head of an answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template, has_markers = self._template(bool(tools))
        options: dict[str, Any] = {"add_generation_prompt": ask, "return_assistant_tokens_mask": has_markers}
        options |= {"tools": tools, "chat_template": template, **self.special_tokens}
        try:
            texts, marked = render_jinja_template(chats, **options)
        except Exception as error:  # a template is third-party code that can raise anything
            try:
                if not isinstance(error, TypeError):
                    raise
                # DeepSeek's templates join the arguments of a call to a text.
                texts, marked = render_jinja_template([_with_arguments_as_text(turns) for turns in chats], **options)
            except Exception:
                message = one_line(error) or type(error).__name__
                raise InvalidRecord(f"the chat template rejects this chat: {message}") from None
        return texts, list(map(tuple, marked[0])) if has_markers else None

    def apply_dyed(self, turns: list[Turn], tools: list[JsonObject] | None, ask: bool = False) -> str:
        """Return the rendered text of dyed turns."""
        return _unescape_dyes(self.apply([turns], tools, ask)[0][0])

    def render(self, chat: Chat) -> Rendering:
        """Return a rendered chat. Raise InvalidRecord if it is not known where its characters come from."""
        if len(chat.turns) > MAX_TURNS:
            raise InvalidRecord(f"the chat has {len(chat.turns):,} turns, more than {MAX_TURNS:,}; divide it")
        self._template(bool(chat.tools))
        dyed_turns = self._dye(chat, FIRST)
        (text, dyed), marked = self.apply([chat.turns, dyed_turns.turns], chat.tools)
        if not text.isascii() and (own := {ord(character) for character in DYED.findall(text)}):
            # The chat has such ideographs: take other ones.
            count = len(chat.turns) * len(FIELDS)
            free = (first for first in range(FIRST, LAST - count, count) if own.isdisjoint(range(first, first + count)))
            dyed_turns = self._dye(chat, next(free, FIRST))
            (text, dyed), marked = self.apply([chat.turns, dyed_turns.turns], chat.tools)
        dyed = _unescape_dyes(dyed)
        if len(text) != len(dyed):
            dyed = _align(text, dyed)
        runs = find_runs(text, dyed, dyed_turns.base)
        if runs is None:
            raise InvalidRecord(f"the chat template changes the text of the turns, so {UNKNOWN}; {OTHER_TEMPLATE}")
        answers = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
        by_turn = None if marked is None else _marks_of(marked, runs, answers)
        return Rendering(chat, text, dyed, dyed_turns, runs, by_turn)

    def _template(self, with_tools: bool) -> tuple[str, bool]:
        """Return the template with a fixed date, and whether it marks generations."""
        if with_tools not in self._templates:
            try:
                template = self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            except ValueError:
                raise UserError(NO_TEMPLATE) from None
            template = CLOCK.sub(lambda call: json.dumps(TODAY.strftime(call[2])), template)
            if re.search(r"strftime_now\s*\(", template):
                raise UserError(
                    "data.chat_template: the template computes the format of its date, so tokens would change "
                    "overnight; pass strftime_now a literal format"
                )
            self._templates[with_tools] = template, re.search(r"{%-?\s*generation\s*-?%}", template) is not None
            self._literals[with_tools] = _literals(template)
        return self._templates[with_tools]

    def _dye(self, chat: Chat, base: int) -> DyedTurns:
        """Return the turns with dyed contents, reasoning and call arguments. All else keeps its value."""
        literals = self._literals[bool(chat.tools)]
        plain: dict[tuple[int, str], str] = {}
        shapes: list[Shape | None] = []
        dyed = []
        for i, turn in enumerate(chat.turns):
            copy, shape = dict(turn), [turn["role"]]
            for number, field in enumerate(FIELDS[:2]):
                if text := turn.get(field):
                    dye = chr(base + i * len(FIELDS) + number)
                    copy[field], plain[i, field], found = _dye_text(text, dye, literals)
                    shape += [field, *found, bool(plain[i, field])]
            if "tool_calls" in turn:
                texts = [""]
                dye = chr(base + i * len(FIELDS) + 2)
                copy["tool_calls"] = [_dye_call(call, dye, literals, texts) for call in turn["tool_calls"]]
                plain[i, "tool_calls"] = "".join(texts)
            dyed.append(copy)
            # The text after a turn depends on its last characters if these are not dyed.
            is_simple = copy.keys() <= {"role", *FIELDS[:2]} and DYED.match(copy["content"][-1:])
            shapes.append(tuple(shape) if is_simple else None)
        return DyedTurns(dyed, plain, base, shapes)


def _with_arguments_as_text(turns: list[Turn]) -> list[Turn]:
    """Return the turns with the arguments of their calls as JSON text, as OpenAI writes them."""

    def changed(call: Turn) -> Turn:
        function = call["function"]
        return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        turn | {"tool_calls": [changed(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else turn
        for turn in turns
    ]


def _dye_text(text: str, dye: str, literals: list[str]) -> tuple[str, str, tuple[str, ...]]:
    """Return the text dyed, its characters that were dyed, and the template's strings in it, which are not dyed."""
    found = tuple([literal for literal in literals if literal in text])
    pieces = _undyed(found).split(text)
    plain = "".join(pieces[::2])
    if not plain and found:  # the text consists of such strings
        pieces = _undyed(()).split(text)
        plain = "".join(pieces[::2])
    pieces[::2] = [dye * len(piece) for piece in pieces[::2]]
    return "".join(pieces), plain, found


def _dye_call(call: JsonObject, dye: str, literals: list[str], texts: list[str]) -> JsonObject:
    """Return a call with dyed strings in its arguments. Append the characters that are dyed to `texts`."""

    def dyed(value: JSON) -> JSON:
        if isinstance(value, dict):
            return {key: dyed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [dyed(item) for item in value]
        if not isinstance(value, str):
            return value
        text, plain, _ = _dye_text(value, dye, literals)
        texts.append(plain)
        return text

    function = call["function"]
    assert isinstance(function, dict)
    return call | {"function": function | {"arguments": dyed(function["arguments"])}}


def find_runs(text: str, dyed: str, base: int = FIRST) -> list[Run] | None:
    """Return the runs of the dyed rendering in order, or None if it is not the true rendering with other characters."""
    if len(text) != len(dyed):
        return None
    codes = np.frombuffer(dyed.encode("utf-32-le"), "<u4")
    (places,) = (codes != np.frombuffer(text.encode("utf-32-le"), "<u4")).nonzero()
    found = codes[places]
    if not len(found):
        return []
    edges = [0, *((found[1:] != found[:-1]).nonzero()[0] + 1).tolist(), len(found)]
    runs = []
    for a, b in pairwise(edges):
        if not base <= (code := int(found[a])) < LAST:
            return None
        turn, field = divmod(code - base, len(FIELDS))
        runs.append(Run(turn, FIELDS[field], int(places[a]), int(places[b - 1]) + 1, b - a))
    return runs


def _unescape_dyes(text: str) -> str:
    """Return the text with the dyes that the template wrote as JSON escapes as characters again."""
    return ESCAPED_DYE.sub(lambda pair: _unescape(pair[0]), text) if "\\ud8" in text else text


def _align(text: str, dyed: str) -> str:
    """Return the dyed text with each dye as often as the text needs characters for it, where that has JSON escapes."""
    dyed = ESCAPED.sub(lambda escaped: _unescape(escaped[0]), dyed)
    pieces, place, end = [], 0, 0
    for escaped in ESCAPED.finditer(text):
        gap = escaped.start() - end
        pieces.append(dyed[place : place + gap])
        place, end = place + gap, escaped.end()
        first = escaped.start()
        for character in _unescape(escaped[0]):
            length = 12 if character > "\uffff" else 6
            dye = dyed[place : place + 1]
            pieces.append(dye * length if DYED.match(dye) else text[first : first + length])
            place, first = place + 1, first + length
    return "".join([*pieces, dyed[place:]])


def _unescape(escapes: str) -> str:
    """Return the characters of some JSON escapes such as \\u00e9."""
    return escapes.encode().decode("unicode-escape").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _marks_of(marked: list[Span], runs: list[Run], answers: list[int]) -> dict[int, Span]:
    """Return what the template marks of each answer. Raise InvalidRecord if it marks nothing of one."""
    if len(marked) == len(answers):
        return dict(zip(answers, marked, strict=True))
    by_turn: dict[int, Span] = {}
    for first, end in marked:
        for turn in {run.turn for run in runs if first <= run.first < end}:
            by_turn[turn] = by_turn.get(turn, (first, end))[0], end
    if by_turn.keys() != {*answers}:
        raise InvalidRecord(
            f"the chat template marks {len(marked)} generations, but the chat has {len(answers)} assistant turns; "
            "fix its {% generation %} blocks"
        )
    return by_turn


@lru_cache
def _undyed(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the characters and strings that are not dyed. It has one group, for split()."""
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile(f"((?:{'|'.join([*map(re.escape, longest_first), f'[{KEPT}]'])})+)")


def _literals(template: str) -> list[str]:
    """Return the string constants in the template's expressions, without the names of fields."""
    import jinja2

    without_tags = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag that jinja2 does not know
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_tags)
    except jinja2.TemplateError:
        return []  # rendering reports it
    names = {id(item.arg) for item in tree.find_all(jinja2.nodes.Getitem)}
    constants = [node for node in tree.find_all(jinja2.nodes.Const) if id(node) not in names]
    spaces = re.compile(f"[{KEPT}]*")
    found = {node.value for node in constants if isinstance(node.value, str)}
    return sorted(text for text in found if not spaces.fullmatch(text))


def _forms(text: str) -> set[str]:
    """Return the forms in which templates print a text: as it is, stripped, or escaped for JSON, Python or HTML."""
    quoted = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
    return {text, text.strip(), *quoted, str(escape(text))}


def shows(text: str, content: str) -> bool:
    """Return True if the text contains the content: stripped, escaped or with different spaces."""
    if content.strip() in text:
        return True
    return any(form.strip() in text for form in _forms(content)) or "".join(content.split()) in "".join(text.split())


def check_tools(rendering: Rendering) -> None:
    """Raise InvalidRecord if the text lacks the name or the description of a tool."""
    for tool in rendering.chat.tools or ():
        function = tool["function"]
        assert isinstance(function, dict)
        if not all(shows(rendering.dyed, str(function.get(part) or "")) for part in ("name", "description")):
            hint = "set data.chat_template to one that renders them, or set data.fields={tools: null}"
            raise InvalidRecord(f"tools: {LEFT_OUT} the tools; {hint}")


def check_nothing_missing(rendering: Rendering) -> None:
    """Raise InvalidRecord if the text lacks a turn or part of a turn."""
    chat, num_printed = rendering.chat, Counter[tuple[int, str]]()
    for run in rendering.runs:
        num_printed[run.turn, run.field] += run.num_dyed
    last_answer = max(i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant")
    for (i, field), plain in rendering.dyed_turns.plain.items():
        turn = chat.turns[i]
        if plain and num_printed[i, field] >= len(plain):
            continue
        if not plain and (field != "content" or shows(rendering.text, turn[field])):
            continue
        # The template may remove the reasoning of an earlier answer, which later turns do not need.
        if i < last_answer and turn["role"] == "assistant" and field != "tool_calls":
            kept = rendering.printed(i, field)
            if field == "reasoning_content" or (kept and plain.endswith(kept)):
                continue
        part = {"content": "its content or a part of it", "reasoning_content": "its reasoning_content"}.get(field)
        part = part or f"its call of {turn['tool_calls'][0]['function']['name']!r}"
        raise InvalidRecord(f"turn {i + 1} ({turn['role']}): {LEFT_OUT} {part}; {OTHER_TEMPLATE}")


def common_prefix(a: str, b: str) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
