"""Follow the strings of a chat through its template, to know which turn each character of the rendering comes from.

The chat is rendered a second time with dyed strings: every character is replaced by a rare one that stands for its turn
and field. The template cannot tell the difference, so both renderings have the same length.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gearbox.data.row_formats import Turn

FIELDS = ("content", "reasoning_content", "tool_calls")
FIRST, LAST = 0x20000, 0x2A6D0
"""The dyes are rare ideographs. They have no case, and JSON and Python's repr() print them unchanged."""
MAX_TURNS = (LAST - FIRST) // len(FIELDS)
# Spaces, and characters that templates or their filters escape, are not dyed.
KEPT = r"\s\"'\\<>&\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ue000-\uf8ff\ufeff\ufff0-\uffff"
Shape = tuple[object, ...]


class DyedChat(NamedTuple):
    """The turns of a chat with dyed strings."""

    turns: list[Turn]
    plain: dict[tuple[int, str], str]
    """The characters that are dyed, by turn and field."""
    shapes: list[Shape | None]
    """Everything about each turn on which the template's own text can depend, or None if that is not known."""


class Run(NamedTuple):
    """Characters [first, end) of a rendering that come from one field of a turn. Undyed ones may lie between them."""

    turn: int
    field: str
    first: int
    end: int
    num_dyed: int


class Dyer:
    """Dyes chats for one template, except for the strings that the template itself contains and may search for."""

    def __init__(self, template: str) -> None:
        self.literals = _literals(template)

    def dye(self, turns: list[Turn]) -> DyedChat:
        """Return the turns with dyed contents, reasoning and call arguments. All else keeps its value."""
        plain: dict[tuple[int, str], str] = {}
        shapes: list[Shape | None] = []
        dyed = []
        for i, turn in enumerate(turns):
            copy, shape = dict(turn), [turn["role"]]
            for field in FIELDS[:2]:
                text = turn.get(field)
                if text:
                    copy[field], plain[i, field], found = self._dye_text(text, chr(FIRST + i * 3 + FIELDS.index(field)))
                    shape += [field, found, bool(plain[i, field])]
            if "tool_calls" in turn:
                code, texts = chr(FIRST + i * 3 + 2), [""]
                copy["tool_calls"] = self._dye_values(turn["tool_calls"], code, texts)
                plain[i, "tool_calls"] = "".join(texts)
            dyed.append(copy)
            # The text after a turn depends on its last characters if these are not dyed.
            is_simple = copy.keys() <= {"role", *FIELDS[:2]} and (copy["content"][-1:] >= chr(FIRST))
            shapes.append(tuple(shape) if is_simple else None)
        return DyedChat(dyed, plain, shapes)

    def _dye_text(self, text: str, dye: str) -> tuple[str, str, tuple[str, ...]]:
        """Return the text dyed, its characters that were dyed, and the template's strings that it contains."""
        found = tuple([literal for literal in self.literals if literal in text])
        pieces = _kept(found).split(text)
        plain = "".join(pieces[::2])
        if not plain and found:  # the text consists of such strings
            pieces = _kept(()).split(text)
            plain = "".join(pieces[::2])
        pieces[::2] = [dye * len(piece) for piece in pieces[::2]]
        return "".join(pieces), plain, found

    def _dye_values(self, value: Any, dye: str, texts: list[str], is_argument: bool = False) -> Any:
        """Return the value with dyed strings inside the arguments of calls. Append what is dyed to `texts`."""
        if isinstance(value, list):
            return [self._dye_values(item, dye, texts, is_argument) for item in value]
        if isinstance(value, dict):
            return {
                key: self._dye_values(item, dye, texts, is_argument or key == "arguments")
                for key, item in value.items()
            }
        if is_argument and isinstance(value, str):
            dyed, plain, _ = self._dye_text(value, dye)
            texts.append(plain)
            return dyed
        return value


def find_runs(text: str, dyed: str) -> list[Run] | None:
    """Return the runs of the dyed rendering in order, or None if it is not the true rendering with other characters."""
    if len(text) != len(dyed):
        return None
    codes = np.frombuffer(dyed.encode("utf-32-le"), "<u4")
    (places,) = np.nonzero(codes != np.frombuffer(text.encode("utf-32-le"), "<u4"))
    found = codes[places]
    if not len(found):
        return []
    if found.min() < FIRST or found.max() >= LAST:
        return None
    edges = [0, *(np.flatnonzero(found[1:] != found[:-1]) + 1).tolist(), len(found)]
    runs = []
    for a, b in pairwise(edges):
        turn, field = divmod(int(found[a]) - FIRST, len(FIELDS))
        runs.append(Run(turn, FIELDS[field], int(places[a]), int(places[b - 1]) + 1, b - a))
    return runs


@lru_cache
def _kept(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the characters and strings that are not dyed. It has one group, for split()."""
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile(f"((?:{'|'.join([*map(re.escape, longest_first), f'[{KEPT}]'])})+)")


def _literals(template: str) -> list[str]:
    """Return the string constants in the template's expressions, without the names of fields."""
    import jinja2

    without_tags = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag that jinja2 does not know
    tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_tags)
    names = {id(item.arg) for item in tree.find_all(jinja2.nodes.Getitem)}
    constants = [node for node in tree.find_all(jinja2.nodes.Const) if id(node) not in names]
    spaces = re.compile(f"[{KEPT}]*")
    found = {node.value for node in constants if isinstance(node.value, str)}
    return sorted(text for text in found if not spaces.fullmatch(text))
