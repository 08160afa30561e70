"""Guards row formats: fields determine the format, and errors name the file, line and field of a bad row."""

import json

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
    "content parts": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
        "messages[0].content: must be a string, found a list",
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
    assert len(found) == 2 and prepared.num_read == 3
    assert [entry.location for entry in prepared.dropped] == [f"{path}:2"]
    assert prepared.dropped[0].reason.startswith(message)


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


def test_blank_results_and_blank_content_next_to_a_call_are_accepted():
    call = {"name": "f", "arguments": {}}
    turns = [
        *BYE[:1], {"role": "assistant", "content": "\n\n", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "\n"}, *BYE[1:],
    ]  # fmt: skip
    found = row_formats.read({"messages": turns}, row_formats.FieldNames("messages", {}, {}))
    assert [turn["content"] for turn in found.turns] == ["b", "\n\n", "\n", "bye"]
