"""Recognise the row format (`form`) of a record, and read the record as a chat or a text.

Every format gives a chat in the structure that transformers' templates expect. Turns have a role and content.
Calls are {"type": "function", "function": {"name", "arguments"}}, and tools {"type": "function", "function": {...}}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gearbox.config.recipe import MAX_RECORD_BYTES, Role
from gearbox.config.recipe_values import ANSWERS, FORMS, TITLES
from gearbox.data.sources import JSON
from gearbox.errors import nearest

JsonObject = dict[str, JSON]
Turn = dict[str, Any]  # role, content, and the other fields of a turn that a template reads
CALL = "function_call"  # ShareGPT's role for a turn that calls tools
ROLES: dict[str, Role | str] = {
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["user", "human"], "user"),
    **dict.fromkeys(["assistant", "gpt", "model"], "assistant"),
    **dict.fromkeys(["tool", "function", "observation", "function_response", "ipython"], "tool"),
    **dict.fromkeys([CALL, "tool_call"], CALL),
}
KEPT = ("name", "tool_call_id")  # fields of a turn, in addition to role, content, tool_calls and reasoning
REASONING = ("reasoning_content", "reasoning", "thinking")  # transformers passes all three names to a template
# The names of media: types of content parts, and fields beside the text.
MEDIA = {"image": "an image", "audio": "audio", "video": "a video"}
MEDIA_TYPE = re.compile(rf"(?:input_)?({'|'.join(MEDIA)})(?:_url|_file)?")
MEDIA_FIELD = re.compile(rf"({'|'.join(MEDIA)})s?")
TEXT_ONLY = "Gearbox trains text only; remove it, or drop the row with data.on_bad_row=skip"


class InvalidRecord(Exception):
    """A record cannot be used. The message names the field, the value found and what to change."""


@dataclass(frozen=True)
class Chat:
    """The turns of a conversation, and the tools that its assistant may call."""

    turns: list[Turn]
    tools: list[JsonObject] | None = None
    untrained: frozenset[int] = field(default_factory=frozenset)
    """Turns that are context only: turns of a prompt, and turns with `weight: 0`."""


@dataclass(frozen=True)
class FieldNames:
    """The names that a file uses for the fields and roles of its format."""

    form: str
    fields: dict[str, str | None]
    roles: dict[str, Role]

    def of(self, name: str) -> str:
        """Return the file's name for a field, or "" if the recipe ignores the field."""
        return self.fields.get(name, name) or ""

    @property
    def main(self) -> str:
        """The file's name for the first required field of the format."""
        return self.of(FORMS[self.form][0][0])


def recognise(record: JSON, form: str, fields: dict[str, str | None], forms: tuple[str, ...] = ANSWERS) -> str | None:
    """Return the first of the formats whose required fields the record has, or None; `form` itself if not auto."""
    if form != "auto":
        return form
    for known in forms:
        required = FORMS[known][0]
        if isinstance(record, dict) and all(fields.get(name, name) in record for name in required):
            return known
    return None


def of_field(reason: str, field: str, chat: Chat | str) -> str:
    """Return the reason why a chat cannot be used, prefixed with the field that contains the chat.

    If a template rejects the chat with its own words, also name the field that these words are about.
    """
    if reason.startswith("tools:") or isinstance(chat, str):
        return reason
    found = re.fullmatch(r"the chat template rejects this chat: (.*)", reason, re.S)
    suspect = next(_suspects(chat, found[1]), "") if found else ""
    return f"{field}: {suspect and suspect + '; '}{reason}"


def _suspects(chat: Chat, message: str) -> Iterator[str]:
    """Yield the fields of calls and results that a template's message is about, and what is wrong with each."""
    about_ids = re.search(r"\bids?\b|_id\b", message, re.I)
    wanted = re.search(r"length (\d+)|(\d+) characters", message)
    kind = re.search(r"concatenate str \(not \"(\w+)\"\)", message)  # Python's words
    for number, turn in enumerate(chat.turns):
        at, calls = f"turn {number + 1} ({turn['role']})", turn.get("tool_calls", [])
        ids = [(f"tool_calls[{i}].id", call.get("id")) for i, call in enumerate(calls)]
        ids += [("tool_call_id", turn.get("tool_call_id"))] if turn["role"] == "tool" else []
        for name, value in ids if about_ids else ():
            if value is None:
                yield f"{at}: {name} is missing"
            elif wanted and len(value) != int(wanted[1] or wanted[2]):
                yield f"{at}: {name} has {len(value)} characters, not {wanted[1] or wanted[2]}"
        if turn["role"] == "tool" and "name" not in turn and re.search(r"\bname\b", message):
            yield f"{at}: name is missing"
        for i, call in enumerate(calls):
            for name, value in call["function"]["arguments"].items():
                if kind and type(value).__name__ == kind[1]:
                    yield f"{at}: tool_calls[{i}].arguments.{name} is {kind_of(value)}"


def read(record: JSON, names: FieldNames) -> Chat | str:
    """Return the chat of a record, or its text if it is plain text. Raise InvalidRecord if it cannot be used."""
    fields = with_required(record, names)
    if names.form == "text":
        return read_text(fields, names.of("text"))
    tools = read_tools(fields, names)
    turns, num_context = _turns_of_form(fields, names)
    if names.form != "messages" and (system := optional_text(fields, names.of("system"))):
        turns.insert(0, make_turn("system", system))
        num_context += 1
    return chat_of(turns, tools, num_context, names.main)


def chat_of(turns: list[Turn], tools: list[JsonObject] | None, num_context: int, field: str) -> Chat:
    """Return a chat whose first turns are context. Raise InvalidRecord if nobody asks or nobody answers in it."""
    if not any(turn["role"] == "assistant" for turn in turns):
        raise InvalidRecord(f"{field}: contains no assistant turn")
    if turns[0]["role"] == "assistant":
        raise InvalidRecord(f"{field}[0]: the first turn is an assistant turn, which answers nothing")
    weightless = {i for i, turn in enumerate(turns) if turn.get("weight", 1) == 0}
    kept = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
    return Chat(kept, tools, frozenset(range(num_context)) | weightless)


def with_required(record: JSON, names: FieldNames) -> JsonObject:
    """Return a record that is an object with the required fields of its format. Raise InvalidRecord for another."""
    if not isinstance(record, dict):
        raise InvalidRecord(f"must be an object with fields, found {kind_of(record)}")
    for name in FORMS[names.form][0]:
        _require(record, name, names)
    _refuse_media(record, names)
    return record


def _turns_of_form(record: JsonObject, names: FieldNames) -> tuple[list[Turn], int]:
    """Return the turns of a chat record, and the number of leading turns that are context and never trained."""
    if names.form == "instruction":
        question = [read_text(record, names.of("instruction")), optional_text(record, names.of("input"))]
        answer = read_text(record, names.of("output"))
        return [make_turn("user", "\n\n".join(filter(None, question))), make_turn("assistant", answer)], 0
    if names.form != "prompt":  # messages or conversations
        return read_turns(record[names.of(names.form)], names.of(names.form), names), 0
    prompt, completion = names.of("prompt"), names.of("completion")
    if isinstance(record[prompt], str):
        return [make_turn("user", read_text(record, prompt)), make_turn("assistant", read_text(record, completion))], 0
    context = read_turns(record[prompt], prompt, names)
    return [*context, *read_turns(record[completion], completion, names)], len(context)


def make_turn(role: str, content: str) -> Turn:
    """Return a turn of text."""
    return {"role": role, "content": content}


def kind_of(value: JSON) -> str:
    """Return a short description of a value in JSON terms."""
    names: dict[type, str] = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}
    if isinstance(value, str):
        return f"the string {value[:40]!r}" if value else "an empty string"
    return names.get(type(value), "a number")


def _require(record: JsonObject, name: str, names: FieldNames) -> None:
    key = names.of(name)
    if key not in record:
        other = recognise(record, "auto", names.fields, tuple(FORMS))
        if other is not None:
            raise InvalidRecord(
                f"{key}: is missing: this row has {TITLES[other]}, but the first row of the file has "
                f"{TITLES[names.form]}; use one file per format"
            )
        fields = ", ".join(sorted(map(str, record)))
        hint = nearest(key, [str(key) for key in record])
        raise InvalidRecord(f"{key}: is missing{hint or f'; the fields are {fields}'}")
    if record[key] is None:
        raise InvalidRecord(f"{key}: is null")
    if record[key] in ("", [], {}):
        raise InvalidRecord(f"{key}: is empty")


def read_text(record: JsonObject, name: str, within: str = "") -> str:
    """Return a field's text. Raise InvalidRecord unless it is one that can be encoded."""
    value = record[name]
    if not isinstance(value, str):
        raise InvalidRecord(f"{within}{name}: must be a string, found {kind_of(value)}")
    if not value.strip():
        raise InvalidRecord(f"{within}{name}: is empty")
    return _encodable(value, f"{within}{name}")


def optional_text(record: JsonObject, name: str) -> str:
    """Return a field's text, or "" if the field is missing or empty."""
    return read_text(record, name) if record.get(name) else ""


def _encodable(value: str, where: str) -> str:
    if len(value) > MAX_RECORD_BYTES:
        raise InvalidRecord(
            f"{where}: has {len(value):,} characters, more than the limit of {MAX_RECORD_BYTES:,}; shorten it"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRecord(
            f"{where}: is not UTF-8: lone surrogate or invalid byte at character {error.start + 1}"
        ) from None
    return value


def _refuse_media(record: JsonObject, names: FieldNames) -> None:
    """Raise InvalidRecord if the record has images, videos or audio in fields of their own."""
    read = {names.of(name) for group in FORMS[names.form] for name in group}
    for key, value in record.items():
        found = MEDIA_FIELD.fullmatch(key)
        if found and value and key not in read:
            raise InvalidRecord(f"{key}: is {MEDIA[found[1]]}; {TEXT_ONLY}")


def read_turns(turns: JSON, where: str, names: FieldNames) -> list[Turn]:
    """Return the turns of a list, which is at `where` in the record. Raise InvalidRecord for anything else."""
    if not isinstance(turns, list):
        raise InvalidRecord(f"{where}: must be a list of turns, found {kind_of(turns)}")
    if not turns:
        raise InvalidRecord(f"{where}: is empty")
    return [read_turn(turn, f"{where}[{i}]", names) for i, turn in enumerate(turns)]


def read_turn(turn: JSON, where: str, names: FieldNames) -> Turn:
    """Return one turn in the structure that templates expect. See read_turns."""
    if not isinstance(turn, dict):
        raise InvalidRecord(f"{where}: must be an object, found {kind_of(turn)}")
    role_field, content_field = _turn_fields(turn, names)
    role = _role(turn, role_field, where, names)
    if role == CALL:
        return _call_turn(turn, content_field, where)
    calls = turn.get("tool_calls") or turn.get("function_call")  # the latter is OpenAI's older name
    if calls and role != "assistant":
        raise InvalidRecord(f"{where}.tool_calls: only the assistant may call tools, found role {turn[role_field]!r}")
    content = _content(turn, content_field, where, is_tool=role == "tool", has_calls=bool(calls))
    result = make_turn(role, content)
    result |= {name: read_text(turn, name, f"{where}.") for name in KEPT if turn.get(name) not in (None, "")}
    for name in REASONING:
        if turn.get(name):
            result["reasoning_content"] = read_text(turn, name, f"{where}.")
    if calls:
        result["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if role == "assistant" and turn.get("weight") is not None:
        if turn["weight"] not in (0, 1):
            raise InvalidRecord(f"{where}.weight: must be 0 (not trained) or 1, found {turn['weight']!r}")
        result["weight"] = turn["weight"]
    return result


def _turn_fields(turn: JsonObject, names: FieldNames) -> tuple[str, str]:
    """Return the names of the role and content fields of a turn."""
    pairs = [("role", "content"), ("from", "value")]
    if names.form == "conversations":
        pairs.reverse()
    # Some ShareGPT files use role and content. If a turn has neither pair, errors name the format's own fields.
    role_name, content_name = next((pair for pair in pairs if names.of(pair[0]) in turn), pairs[0])
    return names.of(role_name), names.of(content_name)


def _role(turn: JsonObject, role_field: str, where: str, names: FieldNames) -> str:
    """Return the role of a turn: a role of chat templates, or CALL."""
    value = turn.get(role_field)
    if value is None:
        raise InvalidRecord(f"{where}.{role_field}: is {'null' if role_field in turn else 'missing'}")
    role = names.roles.get(value) or ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        known = ", ".join([*names.roles, *ROLES])
        shown = repr(value[:40]) if isinstance(value, str) else f"({kind_of(value)})"
        raise InvalidRecord(f"{where}.{role_field}: unknown role {shown}; use one of {known}, or map it in data.roles")
    return role


def _call_turn(turn: JsonObject, content_field: str, where: str) -> Turn:
    """Return a turn with ShareGPT's role for calls, whose content is the JSON of the calls."""
    content = turn.get(content_field)
    calls = _parse(read_text(turn, content_field, f"{where}.") if isinstance(content, str) else content, where)
    return make_turn("assistant", "") | {"tool_calls": _calls(calls, f"{where}.{content_field}")}


def _content(turn: JsonObject, field: str, where: str, is_tool: bool, has_calls: bool) -> str:
    """Return the content of a turn. A tool may return nothing, and a turn with calls may have no text."""
    content = turn.get(field)
    if isinstance(content, list):
        content = _joined(content, f"{where}.{field}")
    if content is None and not has_calls:
        raise InvalidRecord(f"{where}.{field}: is {'null' if field in turn else 'missing'}")
    is_blank = content is None or (isinstance(content, str) and not content.strip())
    if is_blank and (is_tool or has_calls):
        return str(content or "")
    return read_text({field: content}, field, f"{where}.")


def _joined(parts: list[JSON], where: str) -> str:
    """Return the text of a content that is a list of parts. Templates join parts without a space."""
    texts: list[str] = []
    for number, part in enumerate(parts):
        at = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise InvalidRecord(f"{at}: must be an object with a type, found {kind_of(part)}")
        kind = part.get("type")
        if media := MEDIA_TYPE.fullmatch(kind) if isinstance(kind, str) else None:
            raise InvalidRecord(f"{at}: is {MEDIA[media[1]]}; {TEXT_ONLY}")
        if kind != "text":
            raise InvalidRecord(f"{at}.type: must be 'text', found {kind_of(kind)}")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRecord(f"{at}.text: must be a string, found {kind_of(text)}")
        texts.append(text)
    return "".join(texts)


def _parse(value: JSON, where: str) -> JSON:
    """Return a string parsed as JSON, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed: JSON = json.loads(value)
        return parsed
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"{where}: must be JSON: {error}, found {kind_of(value)}") from None


def _calls(calls: JSON, where: str) -> list[JsonObject]:
    """Return the calls in one form, with arguments as objects for templates. OpenAI files have them as strings."""
    result: list[JsonObject] = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        at = f"{where}[{number}]" if isinstance(calls, list) else where
        function = _named_function(call)
        if not isinstance(call, dict) or function is None:
            raise InvalidRecord(f"{at}: must be a call with a string 'name' and 'arguments', found {kind_of(call)}")
        arguments = _parse(function.get("arguments", {}), f"{at}.arguments")
        if not isinstance(arguments, dict):
            raise InvalidRecord(f"{at}.arguments: must be an object, found {kind_of(arguments)}")
        _encodable(json.dumps([function["name"], arguments], ensure_ascii=False), at)
        identity = {"id": read_text(call, "id", f"{at}.")} if call.get("id") not in (None, "") else {}
        result.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return result


def _named_function(item: JSON) -> JsonObject | None:
    """Return the function of a call or a tool, which may be the item itself, or None if it has no name."""
    function = item.get("function", item) if isinstance(item, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def read_tools(record: JsonObject, names: FieldNames) -> list[JsonObject] | None:
    """Return the tools of a record, each wrapped as a function, or None without tools."""
    key = names.of("tools")
    if record.get(key) in (None, "", [], "[]"):
        return None
    tools = _parse(record[key], key)
    if not isinstance(tools, list):
        raise InvalidRecord(f"{key}: must be a list of tools, found {kind_of(tools)}")
    result: list[JsonObject] = []
    for number, tool in enumerate(tools):
        function = _named_function(tool)
        if function is None:
            raise InvalidRecord(f"{key}[{number}]: must be an object with a 'name', found {kind_of(tool)}")
        at = f"{key}[{number}]"
        _encodable(json.dumps(function, ensure_ascii=False), at)
        if function.get("description") is not None and not isinstance(function["description"], str):
            raise InvalidRecord(f"{at}.description: must be a string, found {kind_of(function['description'])}")
        if function.get("parameters") is not None:
            parameters = _parse(function["parameters"], f"{at}.parameters")
            if not isinstance(parameters, dict):
                raise InvalidRecord(f"{at}.parameters: must be an object, found {kind_of(parameters)}")
            function = function | {"parameters": parameters}
        result.append({"type": "function", "function": function})
    return result
