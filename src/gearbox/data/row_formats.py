"""From a record to a chat or a text: which form a row has, and what is wrong with it.

Whatever the form, a chat comes out as transformers' templates take it: turns of role and content, tool calls as
{"type": "function", "function": {"name", "arguments"}}, tools as {"type": "function", "function": {...}}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gearbox.config.recipe import FORMS, MAX_RECORD_BYTES, TURN_FIELDS, Role
from gearbox.errors import UserError, nearest

Turn = dict[str, Any]
TITLES = {
    "messages": "chat messages",
    "conversations": "ShareGPT conversations",
    "instruction": "Alpaca instructions",
    "prompt": "prompts with completions",
    "text": "plain text",
}
CALL = "function_call"  # ShareGPT's role of a turn that calls tools
ROLES: dict[str, Role | str] = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
    "function_response": "tool", "ipython": "tool", CALL: CALL, "tool_call": CALL,
}  # fmt: skip
KEPT = ("name", "tool_call_id")  # of a turn, beside role, content, tool_calls and reasoning
REASONING = ("reasoning_content", "reasoning", "thinking")  # transformers gives a template all three names

READ_OF_TURN = {*KEPT, *REASONING, "tool_calls", "function_call", "weight"}


class BadRow(Exception):
    """Why a record cannot be used: the field, what was found, and what to change."""


@dataclass(frozen=True)
class Chat:
    turns: list[Turn]
    tools: list[dict[str, Any]] | None = None
    untrained: frozenset[int] = field(default_factory=frozenset)
    """Turns of the assistant that are context only: those of a prompt, and those with `weight: 0`."""


@dataclass(frozen=True)
class FieldNames:
    """What the file calls the fields and roles of its form."""

    form: str
    fields: dict[str, str | None]
    roles: dict[str, Role]

    def of(self, name: str) -> str:
        """Empty where the recipe passes over the field."""
        return self.fields.get(name, name) or ""


def recognise(record: Any, form: str, fields: dict[str, str | None]) -> str | None:
    """The form that the record's fields tell, or `form` where that is not auto; None if they tell none."""
    if form != "auto":
        return form
    for known, (required, _) in FORMS.items():
        if isinstance(record, dict) and all(fields.get(name, name) in record for name in required):
            return known
    return None


def of_field(reason: str, names: FieldNames) -> str:
    """What is wrong with a chat as a whole, said of the field that holds it."""
    return reason if reason.startswith("tools:") else f"{names.of(FORMS[names.form][0][0])}: {reason}"


def unused_fields(record: Any, names: FieldNames) -> set[str]:
    """The fields of a record and of its turns that nothing reads."""
    if not isinstance(record, dict):
        return set()
    required, optional = FORMS[names.form]
    unused = {*record} - {names.of(name) for name in required + optional}
    for name in required:
        said = record.get(names.of(name))
        if isinstance(said, list):
            keys = {key for turn in said if isinstance(turn, dict) for key in turn}
            unused |= {f"{names.of(name)}[].{key}" for key in keys - READ_OF_TURN - {names.of(f) for f in TURN_FIELDS}}
    return unused


def read(record: Any, names: FieldNames) -> Chat | str:
    """The chat of a record, or its text when it is plain text. Raises BadRow."""
    if not isinstance(record, dict):
        raise BadRow(f"must be an object with fields, found {_kind(record)}")
    for name in FORMS[names.form][0]:
        _required(record, name, names)
    if names.form == "text":
        return _text(record, names.of("text"))
    tools = _tools(record, names)
    untrained: frozenset[int] = frozenset()
    if names.form in ("messages", "conversations"):
        turns = _turns(record[names.of(names.form)], names.of(names.form), names)
    elif names.form == "instruction":
        parts = [_text(record, names.of("instruction")), _optional_text(record, names.of("input"))]
        turns = [_said("user", "\n\n".join(filter(None, parts))), _said("assistant", _text(record, names.of("output")))]
    elif isinstance(record[names.of("prompt")], str):
        turns = [_said("user", _text(record, names.of("prompt")))]
        turns.append(_said("assistant", _text(record, names.of("completion"))))
    else:
        turns = _turns(record[names.of("prompt")], names.of("prompt"), names)
        untrained = frozenset(range(len(turns)))
        turns += _turns(record[names.of("completion")], names.of("completion"), names)
    if names.form != "messages" and (system := _optional_text(record, names.of("system"))):
        turns.insert(0, _said("system", system))
        untrained = frozenset(i + 1 for i in untrained)
    main = names.of(FORMS[names.form][0][0])
    if not any(turn["role"] == "assistant" for turn in turns):
        raise BadRow(f"{main}: has no turn of the assistant")
    if turns[0]["role"] == "assistant":
        raise BadRow(f"{main}[0]: the first turn is the assistant's; there is nothing that it answers")
    weightless = {i for i, turn in enumerate(turns) if turn.pop("weight", 1) == 0}
    return Chat(turns, tools, untrained | weightless)


def _said(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _kind(value: Any) -> str:
    """What a value is, in JSON's words, short."""
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    if isinstance(value, str):
        return f"the text {value[:40]!r}" if value else "an empty text"
    return names.get(type(value), type(value).__name__)


def _required(record: dict[str, Any], name: str, names: FieldNames) -> None:
    called = names.of(name)
    if called not in record:
        other = recognise(record, "auto", names.fields)
        if other is not None:
            raise BadRow(
                f"{called}: is missing: this row has {TITLES[other]}, the first one of the file {TITLES[names.form]}; "
                "give each form a file of its own"
            )
        fields = ", ".join(sorted(map(str, record)))
        hint = nearest(called, [str(key) for key in record])
        raise BadRow(f"{called}: is missing{hint or f'; the fields are {fields}'}")
    if record[called] is None:
        raise BadRow(f"{called}: is null")
    if record[called] in ("", [], {}):
        raise BadRow(f"{called}: is empty")


def _text(record: dict[str, Any], name: str, within: str = "") -> str:
    value = record[name]
    if not isinstance(value, str):
        raise BadRow(f"{within}{name}: must be text, found {_kind(value)}")
    if not value.strip():
        raise BadRow(f"{within}{name}: is empty")
    return _encodable(value, f"{within}{name}")


def _optional_text(record: dict[str, Any], name: str) -> str:
    return _text(record, name) if record.get(name) else ""


def _encodable(value: str, where: str) -> str:
    if len(value) > MAX_RECORD_BYTES:
        raise BadRow(
            f"{where}: has {len(value):,} letters, more than the {MAX_RECORD_BYTES:,} that one may have; cut it"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{where}: is not UTF-8: a lone surrogate or a wrong byte at character {error.start + 1}"
        ) from None
    return value


def _turns(said: Any, where: str, names: FieldNames) -> list[Turn]:
    if not isinstance(said, list):
        raise BadRow(f"{where}: must be a list of turns, found {_kind(said)}")
    if not said:
        raise BadRow(f"{where}: is empty")
    return [_turn(turn, f"{where}[{i}]", names) for i, turn in enumerate(said)]


def _turn(turn: Any, where: str, names: FieldNames) -> Turn:
    if not isinstance(turn, dict):
        raise BadRow(f"{where}: must be an object, found {_kind(turn)}")
    pairs = [("role", "content"), ("from", "value")]
    if names.form == "conversations":
        pairs.reverse()
    # Some ShareGPT files write role and content; where neither is there, the form's own names are missed.
    role_name, content_name = next((p for p in pairs if names.of(p[0]) in turn), pairs[0])
    role_field, content_field = names.of(role_name), names.of(content_name)
    if turn.get(role_field) is None:
        raise BadRow(f"{where}.{role_field}: is {'null' if role_field in turn else 'missing'}")
    found = turn[role_field]
    role = names.roles.get(found) or ROLES.get(found) if isinstance(found, str) else None
    if role is None:
        known = ", ".join([*names.roles, *ROLES])
        raise BadRow(f"{where}.{role_field}: {_kind(found)} is no known role ({known}); name it in data.roles")
    content = turn.get(content_field)
    calls = turn.get("tool_calls") or turn.get("function_call")  # the latter is OpenAI's older name
    if role == CALL:
        called = _json(_text(turn, content_field, f"{where}.") if isinstance(content, str) else content, where)
        return _said("assistant", "") | {"tool_calls": _calls(called, f"{where}.{content_field}")}
    if calls and role != "assistant":
        raise BadRow(f"{where}.tool_calls: only the assistant calls tools, found the role {found!r}")
    if content_field not in turn and not calls:
        raise BadRow(f"{where}.{content_field}: is missing")
    if content is None and not calls:
        raise BadRow(f"{where}.{content_field}: is null")
    # A tool may return nothing, and a call need not say anything.
    may_be_empty = role == "tool" or bool(calls)
    is_blank = content is None or (isinstance(content, str) and not content.strip())
    text = content or "" if may_be_empty and is_blank else _text(turn, content_field, f"{where}.")
    read = _said(role, text) | {name: _text(turn, name, f"{where}.") for name in KEPT if turn.get(name)}
    for name in REASONING:
        if turn.get(name):
            read["reasoning_content"] = _text(turn, name, f"{where}.")
    if calls:
        read["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if role == "assistant" and turn.get("weight") is not None:
        if turn["weight"] not in (0, 1):
            raise BadRow(f"{where}.weight: must be 0 (not trained) or 1, found {turn['weight']!r}")
        read["weight"] = turn["weight"]
    return read


def _json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where}: must hold JSON: {error}, found {_kind(value)}") from None


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """One call or a list of them; arguments come as text in OpenAI's files, and templates want the object."""
    read = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        at = f"{where}[{number}]" if isinstance(calls, list) else where
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{at}: must be a call with the text 'name' and 'arguments', found {_kind(call)}")
        arguments = _json(function.get("arguments", {}), f"{at}.arguments")
        if not isinstance(arguments, dict):
            raise BadRow(f"{at}.arguments: must be an object, found {_kind(arguments)}")
        _encodable(json.dumps([function["name"], arguments], ensure_ascii=False), at)
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        read.append({**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def _tools(record: dict[str, Any], names: FieldNames) -> list[dict[str, Any]] | None:
    called = names.of("tools")
    if record.get(called) in (None, "", [], "[]"):
        return None
    tools = _json(record[called], called)
    if not isinstance(tools, list):
        raise BadRow(f"{called}: must be a list of tools, found {_kind(tools)}")
    read = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{called}[{number}]: must be an object with a 'name', found {_kind(tool)}")
        _encodable(json.dumps(function, ensure_ascii=False), f"{called}[{number}]")
        read.append({"type": "function", "function": function})
    return read


def unrecognised(record: dict[str, Any], where: str) -> UserError:
    """For a first record that is of no form."""
    wanted = " | ".join(", ".join(required) for required, _ in FORMS.values())
    found = ", ".join(map(repr, record))
    return UserError(f"{where}: the fields {found} are of no known form ({wanted}); name them in data.fields")
