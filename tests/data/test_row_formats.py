"""Guards row formats: fields determine the format, and errors name the file, line and field of a bad row."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gearbox.data import row_formats
from gearbox.errors import UserError
from support.corpora import BYE, GOOD, arranged, jsonl, read, texts


@pytest.mark.parametrize(
    ("record", "form", "overrides"),
    [
        ({"messages": BYE}, "messages", []),
        ({"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "bye"}]}, "conversations", []),
        ({"conversations": BYE}, "conversations", []),
        ({"instruction": "b", "input": "", "output": "bye"}, "instruction", []),
        ({"instruction": "b", "input": None, "output": "bye"}, "instruction", []),
        ({"prompt": "b", "completion": "bye"}, "prompt", []),
        ({"messages": BYE, "text": "not this", "prompt": "nor this"}, "messages", []),
        ({"q": "b", "a": "bye"}, "instruction", ["data.fields={instruction: q, output: a}"]),
        ({"talk": [{"by": "user", "words": "b"}, {"by": "bot", "words": "bye"}]}, "messages",
         ["data.fields={messages: talk, role: by, content: words}", "data.roles={bot: assistant}"]),
    ],
)  # fmt: skip
def test_fields_determine_the_format(tokenizer, tmp_path, record, form, overrides):
    found = read(tokenizer, jsonl(tmp_path / "a.jsonl", [record]), *overrides)
    assert [summary.form for summary in found.summaries] == [form]
    assert texts(tokenizer, found) == ["<|user|>b<|end|><|assistant|>bye<|end|>"]


def test_a_system_field_comes_first(tokenizer, tmp_path):
    record = {"system": "s", "instruction": "b", "output": "bye"}
    found = read(tokenizer, jsonl(tmp_path / "a.jsonl", [record]))
    assert texts(tokenizer, found)[0].startswith("<|system|>s<|end|><|user|>b")


CHOSEN = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "bye"}]


@pytest.mark.parametrize(
    ("record", "given"),
    [
        ({"prompt": "b", "chosen": "bye", "rejected": "no"}, "{completion: chosen}"),
        ({"prompt": CHOSEN[:1], "chosen": CHOSEN[1:], "rejected": CHOSEN[1:]}, "{completion: chosen}"),
        ({"prompt": "b", "chosen": CHOSEN, "rejected": CHOSEN, "score_chosen": 1.0}, "{messages: chosen}"),
        ({"instruction": "b", "input": "", "chosen": "bye", "rejected": "no"}, "{output: chosen}"),
        ({"chosen": "<|user|>b<|end|><|assistant|>bye", "rejected": "no"}, "{text: chosen}"),
    ],
)
def test_pairs_of_answers_are_named_and_the_good_ones_can_be_trained(tokenizer, tmp_path, record, given):
    path = jsonl(tmp_path / "pairs.jsonl", [record])
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    assert str(caught.value) == (
        f"{path}:1: has pairs of answers (chosen, rejected); set train.objective=dpo to train on pairs, or "
        f"data.fields='{given}' to train on good answers"
    )
    assert texts(tokenizer, read(tokenizer, path, f"data.fields={given}")) == [
        "<|user|>b<|end|><|assistant|>bye<|end|>"
    ]


@pytest.mark.parametrize(
    ("record", "form", "what"),
    [
        ({"prompt": "b", "completion": "bye", "label": False}, "auto", "answers with a label (true, false); set train"),
        ({"messages": BYE, "label": True}, "auto", "answers with a label (true, false); set train.objective=kto"),
        ({"conversations": BYE[:1], "chosen": BYE[1], "rejected": BYE[1]}, "auto", "pairs of answers"),
        ({"prompt": "b", "chosen": "bye", "rejected": "no"}, "prompt", "pairs of answers"),
        ({"prompt": "b", "chosen": "bye", "rejected": "no"}, "messages", "pairs of answers"),
    ],
)
def test_a_judgement_is_never_lost_under_sft(tokenizer, tmp_path, record, form, what):
    with pytest.raises(UserError, match=f":1: has {re.escape(what)}"):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [record]), f"data.form={form}")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": BYE, "prompt": "b", "chosen": BYE, "rejected": BYE},
        {"prompt": "b", "completion": "bye", "label": 1},
    ],
)
def test_a_chat_with_other_fields_is_no_preference(tokenizer, tmp_path, record):
    assert texts(tokenizer, read(tokenizer, jsonl(tmp_path / "a.jsonl", [record])))


def test_the_format_can_be_set(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": BYE, "text": "this"}])
    assert texts(tokenizer, read(tokenizer, path, "data.form=text")) == ["this<|end|>"]


def turns_of(*pairs: str) -> str:
    turns = [{"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True)]
    return json.dumps({"messages": turns})


# The second line of a file, after a good first line, and the error it causes.
BAD_LINES = {
    "not JSON": ('{"messages": ', "is not JSON: Expecting value at column 13"),
    "not an object": ("5", "must be an object with fields, found a number"),
    "missing": ('{"massages": []}', "messages: is missing; did you mean 'massages'?"),
    "null": ('{"messages": null}', "messages: is null"),
    "empty": ('{"messages": []}', "messages: is empty"),
    "text for a list": ('{"messages": "hello"}', "messages: must be a list of turns, found the string 'hello'"),
    "turn of text": ('{"messages": ["hello"]}', "messages[0]: must be an object, found the string 'hello'"),
    "content missing": ('{"messages": [{"role": "user"}]}', "messages[0].content: is missing"),
    "content null": ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content: is null"),
    "content empty": (turns_of("user", "a", "assistant", " \n"), "messages[1].content: is empty"),
    "content a number": ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content: must be a string"),
    "a list of numbers": (
        '{"messages": [{"role": "tool", "content": [1, 2]}]}',
        "messages[0].content[0]: must be an object with a type, found a number",
    ),
    "a part without a type": (
        '{"messages": [{"role": "user", "content": [{"text": "a"}]}]}',
        "messages[0].content[0].type: must be 'text', found null",
    ),
    "a part of text without text": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}',
        "messages[0].content[0].text: must be a string, found a number",
    ),
    "parts without text": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}',
        "messages[0].content: is empty",
    ),
    "role missing": ('{"messages": [{"content": "a"}]}', "messages[0].role: is missing"),
    "role unknown": (turns_of("usr", "a"), "messages[0].role: unknown role 'usr'; use one of"),
    "no assistant": (turns_of("user", "a"), "messages: contains no assistant turn"),
    "assistant first": (turns_of("assistant", "a"), "messages[0]: the first turn is an assistant turn"),
    "another form": ('{"text": "a"}', "messages: is missing: this row has plain text, but the first row"),
    "surrogate": ('{"messages": [{"role": "user", "content": "a\\ud800"}]}', "messages[0].content: is not UTF-8: lone"),
    "a number of many digits": ('{"text": ' + "1" * 5000 + "}", "is not JSON: Exceeds the limit"),
    "nested": ("[" * 100_000, "is not JSON: it is nested too deeply"),
    "call without a name": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
        "messages[0].tool_calls[0]: must be a call with a string 'name'",
    ),
    "arguments not JSON": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
        "messages[0].tool_calls[0].arguments: must be JSON",
    ),
    "a number as the id of a call": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": "f"}}]}]}',
        "messages[0].tool_calls[0].id: must be a string, found a number",
    ),
    "zero as the id of a result": (
        '{"messages": [{"role": "tool", "content": "a", "tool_call_id": 0}]}',
        "messages[0].tool_call_id: must be a string, found a number",
    ),
    "an object as the name of a result": (
        '{"messages": [{"role": "tool", "content": "a", "name": {"b": 1}}]}',
        "messages[0].name: must be a string, found an object",
    ),
    "an object as a result": (
        '{"messages": [{"role": "tool", "content": {"b": 1}}]}',
        "messages[0].content: must be a string, found an object",
    ),
    "a list as arguments": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]}',
        "messages[0].tool_calls[0].arguments: must be an object, found a list",
    ),
    "arguments that are JSON twice": (
        json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '"{}"'}]}]}),
        "messages[0].tool_calls[0].arguments: must be an object, found the string '{}'",
    ),
    "an object as a tool's description": (
        json.dumps({"messages": BYE, "tools": [{"name": "f", "description": {"en": "a"}}]}),
        "tools[0].description: must be a string, found an object",
    ),
    "a list as a tool's parameters": (
        json.dumps({"messages": BYE, "tools": [{"name": "f", "parameters": ["a"]}]}),
        "tools[0].parameters: must be an object, found a list",
    ),
    "tools not a list": (json.dumps({"messages": BYE, "tools": "{}"}), "tools: must be a list of tools, found an"),
    "weight": (json.dumps({"messages": [BYE[0], BYE[1] | {"weight": 2}]}), "messages[1].weight: must be 0 ("),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_LINES)
def test_an_error_names_file_line_and_field_of_a_bad_row(tokenizer, tmp_path, cache, kind):
    line, message = BAD_LINES[kind]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(GOOD[0]), line, json.dumps(GOOD[1])]))
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    assert str(caught.value).startswith(f"{path}:2: {message}") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not list(cache.glob("*[!k]")), "a run that stopped leaves nothing in the cache"

    found, prepared = arranged(tokenizer, path, "data.on_bad_row=skip")
    assert len(found) == 2 and prepared.facts.num_read == 3
    assert [entry.location for entry in prepared.dropped()] == [f"{path}:2"]
    assert next(prepared.dropped()).reason.startswith(message)


def test_an_error_for_unknown_fields_lists_the_formats(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    assert str(caught.value) == (
        f"{path}:1: the fields 'question', 'answer' match no known format (messages | conversations | "
        "instruction, output | prompt, completion | text); map them in data.fields"
    )


def test_nulls_that_parquet_adds_do_not_count_as_fields(tokenizer, tmp_path):
    calls = [
        {"role": "assistant", "content": "c", "tool_calls": None},
        {"role": "user", "content": "x", "tool_calls": None},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": BYE + calls[::-1], "tools": None}]), tmp_path / "a.parquet")
    assert texts(tokenizer, read(tokenizer, tmp_path / "a.parquet"))[0].endswith("<|assistant|>c<|end|>")


def test_unused_fields_of_any_row_are_listed(tokenizer, tmp_path):
    turns = [BYE[0], BYE[1] | {"mood": "good", "reasoning": "it is late"}]
    path = jsonl(
        tmp_path / "a.jsonl", [{"messages": BYE}, {"messages": BYE, "context": "x"}, {"messages": turns[:1] + BYE[1:]}]
    )
    assert read(tokenizer, path).summaries[0].unused == ["context"]
    with pytest.raises(UserError, match="the chat template omits its reasoning_content"):
        read(tokenizer, jsonl(tmp_path / "b.jsonl", [{"messages": turns}]))
    turns[1].pop("reasoning")
    assert read(tokenizer, jsonl(tmp_path / "c.jsonl", [{"messages": turns}])).summaries[0].unused == [
        "messages[].mood"
    ]


def test_the_older_name_of_tool_calls_is_read(tokenizer, tmp_path):
    turn = {"role": "assistant", "content": "calling", "function_call": {"name": "f", "arguments": "{}"}}
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: messages: turn 2 \(assistant\): the chat template omits its call"
    ):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"messages": [BYE[0], turn]}]))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("image", "an image"), ("image_url", "an image"), ("input_image", "an image"), ("video", "a video"),
     ("video_url", "a video"), ("audio", "audio"), ("input_audio", "audio"), ("audio_url", "audio")],
)  # fmt: skip
@pytest.mark.parametrize("form", ["messages", "conversations", "prompt"])
def test_a_part_that_is_not_text_is_refused_by_name(tokenizer, tmp_path, kind, name, form):
    content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "a"}}]
    record, field = {
        "messages": ({"messages": [{"role": "user", "content": content}]}, "messages[0].content"),
        "conversations": ({"conversations": [{"from": "human", "value": content}]}, "conversations[0].value"),
        "prompt": ({"prompt": [{"role": "user", "content": content}], "completion": "a"}, "prompt[0].content"),
    }[form]
    with pytest.raises(UserError) as caught:
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [record]))
    assert str(caught.value) == (
        f"{tmp_path}/a.jsonl:1: {field}[1]: is {name}; Gearbox trains text only; remove it, or drop the row with "
        "data.on_bad_row=skip"
    )


@pytest.mark.parametrize("field", ["image", "images", "video", "videos", "audio", "audios"])
@pytest.mark.parametrize("record", [{"messages": BYE}, {"instruction": "b", "output": "bye"}, {"text": "b"}])
def test_media_next_to_the_text_are_refused_by_name(tokenizer, tmp_path, field, record):
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {field}: is (an image|a video|audio); Gearbox trains text only"):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [record, record | {field: ["a.png"]}]))


@pytest.mark.parametrize("value", [None, [], ""])
def test_an_empty_field_of_media_is_no_image(tokenizer, tmp_path, value):
    assert texts(tokenizer, read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"messages": BYE, "images": value}])))


def test_a_field_of_another_name_may_hold_the_chat(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"video": BYE}])
    assert texts(tokenizer, read(tokenizer, path, "data.fields={messages: video}"))


def test_parts_of_text_are_joined(tokenizer, tmp_path):
    parts = [{"type": "text", "text": "by", "image_url": None}, {"type": "text", "text": "e"}]
    turns = [{"role": "user", "content": [{"type": "text", "text": "b"}]}, {"role": "assistant", "content": parts}]
    found = read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"messages": turns}]))
    assert texts(tokenizer, found) == ["<|user|>b<|end|><|assistant|>bye<|end|>"]


NEEDS_IDS = """{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id|length != 9 %}
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}
{% if m.role == 'tool' %}{{ m.tool_call_id + m.name }}{% endif %}{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("number", "result", "message"),
    [
        (None, {}, "turn 2 (assistant): tool_calls[0].id is missing"),
        ("call_12345", {}, "turn 2 (assistant): tool_calls[0].id has 10 characters, not 9"),
        ("abcdefghi", {}, "turn 3 (tool): tool_call_id is missing"),
        ("abcdefghi", {"tool_call_id": "abcdefghi"}, "turn 3 (tool): name is missing"),
    ],
)
def test_a_field_that_the_template_misses_is_named(tokenizer, tmp_path, monkeypatch, number, result, message):
    monkeypatch.setattr(tokenizer, "chat_template", NEEDS_IDS)
    call = {"id": number, "function": {"name": "f", "arguments": {}}}
    turns = [BYE[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "a"} | result, BYE[1]]
    with pytest.raises(UserError) as caught:
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"messages": turns}]))
    start = f"{tmp_path}/a.jsonl:1: messages: {message}; the chat template rejects this chat: "
    assert str(caught.value).startswith(start) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "name"), [({"a": 1}, "an object"), ([1], "a list"), (2, "a number"), (0.5, "a number")]
)
def test_an_argument_that_the_template_takes_for_text_is_named(tokenizer, tmp_path, monkeypatch, value, name):
    calls = "{% for c in m.tool_calls or [] %}{% for v in c.function.arguments.values() %}{{ '' + v }}"
    template = f"{{% for m in messages %}}{calls}{{% endfor %}}{{% endfor %}}{{{{ m.content }}}}{{% endfor %}}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    call = {"function": {"name": "f", "arguments": {"city": "Bern", "days": value}}}
    turns = [BYE[0], {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(
        UserError, match=rf"messages: turn 2 \(assistant\): tool_calls\[0\].arguments.days is {name}; the "
    ):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"messages": turns}]))


def test_parameters_in_json_are_read():
    tool = {"name": "f", "description": None, "parameters": '{"type": "object"}'}
    found = row_formats.read({"messages": BYE, "tools": [tool]}, row_formats.FieldNames("messages", {}, {}))
    assert found.tools[0]["function"]["parameters"] == {"type": "object"}


def test_blank_results_and_blank_content_next_to_a_call_are_accepted():
    call = {"name": "f", "arguments": {}}
    turns = [
        *BYE[:1], {"role": "assistant", "content": "\n\n", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "\n"}, *BYE[1:],
    ]  # fmt: skip
    found = row_formats.read({"messages": turns}, row_formats.FieldNames("messages", {}, {}))
    assert [turn["content"] for turn in found.turns] == ["b", "\n\n", "\n", "bye"]
