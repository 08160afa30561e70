"""Chats of every kind that data holds, with a unique marker at both ends of every part."""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from gearbox import ROOT
from gearbox.data import row_formats
from gearbox.data.row_formats import Chat, FieldNames

Record = dict[str, Any]
TOOLS = -1  # the owner of markers in tool definitions; other owners are numbers of turns
THOUGHT = re.compile(r"\s*<think>(.*)</think>(.*)", re.S)
QUOTE = "{marks}"  # stands for the marks of the template itself


@dataclass
class Part:
    """A part of a chat that a rendering should show, from `first` to `last`."""

    owner: int
    what: str
    first: str
    last: str


@dataclass
class MarkedChat:
    """A chat whose parts have markers."""

    chat: Chat
    supervise: str
    parts: list[Part] = field(default_factory=list)

    def of(self, owner: int) -> list[Part]:
        return [part for part in self.parts if part.owner == owner]


def turn(role: str, content: str | None = "", **more: Any) -> Record:
    return {"role": role, "content": content, **more}


def call(name: str = "weather", number: str | None = "abcdefgh1", **arguments: Any) -> Record:
    """Return a call. `number` is its id."""
    identity = {"id": number} if number else {}
    return identity | {"type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str = "grey and wet", name: str = "weather", number: str | None = "abcdefgh1") -> Record:
    identity = {"tool_call_id": number} if number else {}
    return turn("tool", content, name=name) | identity


def tool(name: str, **properties: str) -> Record:
    described = {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": f"Look up {name}", "parameters": parameters}}


ASK = turn("user", "Is it (really) £3 or 4 €?")
ANSWER = turn("assistant", "No: it's «5».\n\n- naïve")
AGAIN, MORE = turn("user", "And then?"), turn("assistant", "Then nothing.")
SYSTEM = turn("system", "Answer in one line.")
WEATHER = [tool("weather", city="string", days="integer"), tool("clock", zone="string")]
PING = [tool("ping")]
NESTED = {
    "place": {"name": 'Zürich "Altstadt"\n\\', "at": [47.37, 8.54]},
    "days": 3, "exact": True, "none": None, "tags": ["föhn", "雪", "a<b>&c"],
}  # fmt: skip


def asks(*calls: Record, content: str | None = "", **more: Any) -> Record:
    return turn("assistant", content, tool_calls=[*calls], **more)


def tools(*turns: Record, definitions: list[Record] = WEATHER, supervise: str = "assistant") -> Record:
    return {"messages": [*turns], "tools": definitions, "supervise": supervise}


def plain(*turns: Record, supervise: str = "assistant") -> Record:
    return {"messages": [*turns], "supervise": supervise}


ROUND = (asks(call(city="Bern", days=2)), result())
LONG_ID = "call_7f3b2c9d81e64a5f9e0a6b1c2d3e4f50"
KINDS: dict[str, Record] = {
    "one turn": plain(ASK, ANSWER),
    "several turns": plain(ASK, ANSWER, AGAIN, MORE, ASK, ANSWER),
    "system": plain(SYSTEM, ASK, ANSWER, AGAIN, MORE),
    "tools unused": tools(ASK, ANSWER),
    "call": tools(ASK, *ROUND, ANSWER),
    "call with system": tools(SYSTEM, ASK, *ROUND, ANSWER, AGAIN, MORE),
    "calls in turn": tools(
        ASK, *ROUND, asks(call("clock", "abcdefgh2", zone="CET")), result("12:30", "clock", "abcdefgh2"), ANSWER,
        AGAIN, *ROUND, MORE,
    ),
    "parallel calls": tools(
        ASK, asks(call(city="Bern"), call("clock", "abcdefgh2", zone="CET")),
        result(), result("12:30", "clock", "abcdefgh2"), ANSWER,
    ),
    "call with text": tools(ASK, asks(call(city="Bern"), content="Let me look."), result(), ANSWER),
    "call with null": tools(ASK, asks(call(city="Bern"), content=None), result(), ANSWER),
    "call at the end": tools(ASK, asks(call(city="Bern", days=2))),
    "call without arguments": tools(
        ASK, asks(call("ping")), result("pong", "ping"), ANSWER, definitions=PING,
    ),
    "nested arguments": tools(ASK, asks(call(**NESTED)), result(), ANSWER),
    "long ids": tools(ASK, asks(call(number=LONG_ID, city="Bern")), result(number=LONG_ID), ANSWER),
    "ids with names": tools(
        ASK, asks(call(number="functions.weather:0", city="Bern")), result(number="functions.weather:0"), ANSWER,
    ),
    "no ids": tools(ASK, asks(call(number=None, city="Bern")), result(number=None), ANSWER),
    "call without definitions": plain(SYSTEM, ASK, *ROUND, ANSWER),
    "result in JSON": tools(ASK, ROUND[0], result('{"sky": "grey", "rain": [1.5, "mm"]}'), ANSWER),
    "empty result": tools(ASK, ROUND[0], result(""), ANSWER),
    "reasoning": plain(ASK, ANSWER | {"reasoning_content": "Four is more."}),
    "reasoning in turns": plain(
        ASK, ANSWER | {"reasoning_content": "Four is more."}, AGAIN, MORE | {"reasoning_content": "Nothing else."}
    ),
    "reasoning and call": tools(
        ASK, ROUND[0] | {"reasoning_content": "I have to look."}, ROUND[1],
        ANSWER | {"reasoning_content": "Now I know."},
    ),
    "<think> in content": plain(
        ASK, turn("assistant", "<think>\nFour is more.\n</think>\n\nNo."),
        AGAIN, turn("assistant", "<think>\nNothing.\n</think>\n\nThen nothing."),
    ),
    "consecutive users": plain(ASK, AGAIN, ANSWER),
    "space at the end": plain(ASK, turn("assistant", "No. \n\n"), AGAIN, turn("assistant", " Then \n")),
    "marks in question": plain(turn("user", f"What are {QUOTE}?"), ANSWER, AGAIN, MORE),
    "marks in answer": plain(ASK, turn("assistant", f"They are {QUOTE}."), AGAIN, MORE),
    "marks in result": tools(ASK, ROUND[0], result(f"They are {QUOTE}."), ANSWER),
    "weight 0": plain(ASK, ANSWER | {"weight": 0}, AGAIN, MORE),
    "last only": tools(ASK, *ROUND, ANSWER, AGAIN, MORE, supervise="last"),
    "everything": tools(SYSTEM, ASK, *ROUND, ANSWER, AGAIN, MORE, supervise="all"),
}  # fmt: skip


class Marker:
    """Put unique markers around texts, and record what they belong to."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def text(self, text: str, owner: int, what: str) -> str:
        """Return the text between two new markers, and its outer spaces outside of them."""
        kept = text.strip()
        if not kept:
            return text
        number = len(self.parts)
        part = Part(owner, what, f"mk{number}a", f"mk{number}b")
        self.parts.append(part)
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return f"{before}{part.first} {kept} {part.last}{after}"

    def leaves(self, value: Any, owner: int, what: str) -> Any:
        """Return the value with markers around its strings."""
        if isinstance(value, str):
            return self.text(value, owner, what)
        if isinstance(value, dict):
            return {key: self.leaves(one, owner, what) for key, one in value.items()}
        return [self.leaves(one, owner, what) for one in value] if isinstance(value, list) else value

    def content(self, text: str, owner: int, role: str) -> str:
        if thought := THOUGHT.fullmatch(text):
            inner = self.text(thought[1], owner, "reasoning")
            return f"<think>{inner}</think>{self.text(thought[2], owner, role)}"
        if role == "tool":
            try:
                parsed = json.loads(text)
            except ValueError:
                parsed = None
            if isinstance(parsed, dict | list):
                return json.dumps(self.leaves(parsed, owner, role), ensure_ascii=False)
        return self.text(text, owner, role)


def real_chats() -> list[Record]:
    """Return the real chats of shared/data, if this machine has them, with ids where calls and results lack them."""
    path = ROOT.parent / "shared" / "data" / "glaive_toolcall_en_demo.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def mark(record: Record, marks: str = "") -> MarkedChat:
    """Return the record's chat with markers. `marks` replaces QUOTE in contents."""
    names = FieldNames("messages" if "messages" in record else "conversations", {}, {})
    read = row_formats.read({key: value for key, value in record.items() if key != "supervise"}, names)
    assert isinstance(read, Chat)
    marker = Marker()
    given = read.turns if names.form == "messages" else [_with_ids(one) for one in read.turns]
    turns = [_marked_turn(marker, one, number, marks) for number, one in enumerate(given)]
    definitions = [_marked_tool(marker, one) for one in read.tools or ()] or None
    return MarkedChat(Chat(turns, definitions, read.untrained), record.get("supervise", "assistant"), marker.parts)


def _with_ids(one: Record) -> Record:
    """Return a turn with ids of nine characters. Real files often lack ids, which some templates need."""
    if one["role"] == "tool":
        return {"tool_call_id": "abcdefgh1", "name": "function"} | one
    calls = [{"id": f"abcdefgh{number}"} | each for number, each in enumerate(one.get("tool_calls", ()), 1)]
    return one | ({"tool_calls": calls} if calls else {})


def _marked_turn(marker: Marker, one: Record, number: int, marks: str) -> Record:
    given = dict(one)
    if given.get("reasoning_content"):
        given["reasoning_content"] = marker.text(given["reasoning_content"], number, "reasoning")
    given["content"] = marker.content(given["content"].replace(QUOTE, marks), number, given["role"])
    calls = []
    for each in given.get("tool_calls", ()):
        function = each["function"]
        arguments = marker.leaves(function["arguments"], number, "call")
        marker.parts.append(Part(number, "name", function["name"], function["name"]))
        calls.append(each | {"function": function | {"arguments": arguments}})
    return given | ({"tool_calls": calls} if calls else {})


def with_arguments_as_text(chat: Chat) -> Chat:
    turns = []
    for one in chat.turns:
        calls = []
        for each in one.get("tool_calls", ()):
            arguments = json.dumps(each["function"]["arguments"], ensure_ascii=False)
            calls.append(each | {"function": each["function"] | {"arguments": arguments}})
        turns.append(one | ({"tool_calls": calls} if calls else {}))
    return replace(chat, turns=turns)


def _marked_tool(marker: Marker, one: Record) -> Record:
    function = one["function"]
    described = marker.text(function.get("description") or "a tool", TOOLS, "tool")
    return one | {"function": function | {"description": described}}
