"""Guards what is read: every kind of file, every kind of mistake in one, and that it is read once."""

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from itertools import chain, repeat
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Recipe
from gearbox.data import corpus, loss_mask, row_formats, sources, splits, tokenization
from gearbox.errors import UserError
from gearbox.reporting import plan

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hé €  \n"}]
BYE = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "bye"}]
GOOD = [{"messages": HI}, {"messages": BYE}, {"messages": HI + BYE}]
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "gearbox"


def recipe_of(path, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/tiny.yaml", [f"data.path={path}", "eval.fraction=0", *overrides])


def read(tokenizer, path, *overrides: str) -> corpus.MappedCorpus:
    return corpus.load_corpora(recipe_of(path, *overrides), tokenizer, tell=lambda _: None)[0]


def arranged(tokenizer, path, *overrides: str) -> tuple[corpus.MappedCorpus, splits.TrainingRows]:
    recipe = recipe_of(path, *overrides)
    documents, evaluated = corpus.load_corpora(recipe, tokenizer, tell=lambda _: None)
    return documents, splits.split_and_pack(recipe, documents, evaluated, tokenizer, recipe.data.packing)


def texts(tokenizer, found: corpus.MappedCorpus) -> list[str]:
    return [tokenizer.decode(found.tokens(i)) for i in range(len(found))]


def jsonl(path: Path, records: list) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


# --------------------------------------------------------------------------- sources


def write(folder: Path, kind: str) -> Path:
    """Two texts, 'one é' and 'two', in each of the ways."""
    folder.mkdir(exist_ok=True)
    path, records = folder / f"a.{kind}", [{"text": "one é", "id": 1}, {"text": "two", "id": 2}]
    if kind == "json":
        path.write_text("\n" + json.dumps(records, indent=1), encoding="utf-8")
    elif kind == "json of lines":
        path = jsonl(folder / "a.json", records)
    elif kind == "jsonl":
        path.write_text("\ufeff" + "\n\n".join(map(json.dumps, records)) + "\r\n", encoding="utf-8")
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([["id", "text"], ["1", "one é"], ["2", "two"]])
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif kind == "txt":
        path.write_text("\n\none é\n\n \n\ntwo\n", encoding="utf-8")
    elif kind == "txt of lines":
        path = folder / "a.txt"
        path.write_text("one é\r\ntwo", encoding="utf-8")
    elif kind == "saved":
        datasets.Dataset.from_list(records).save_to_disk(str(folder / "saved"))
        path = folder / "saved"
    elif kind == "saved with splits":
        both = {"train": datasets.Dataset.from_list(records), "test": datasets.Dataset.from_list(records[:1])}
        datasets.DatasetDict(both).save_to_disk(str(folder / "saved"))
        path = folder / "saved"
    return path


KINDS = ["jsonl", "json", "json of lines", "csv", "parquet", "txt", "txt of lines", "saved", "saved with splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source(tokenizer, tmp_path, kind):
    unit = "line" if "txt of" in kind else "paragraph"
    found = read(tokenizer, write(tmp_path / "in", kind), f"data.text_unit={unit}")
    assert texts(tokenizer, found) == ["one é<|end|>", "two<|end|>"]
    assert [summary.form for summary in found.summaries] == ["text"]
    assert found.summaries[0].unused == ([] if "txt" in kind else ["id"])


def test_places_are_lines_of_the_file(tokenizer, tmp_path):
    lines = {"jsonl": [1, 3], "json": [3, 7], "csv": [2, 3], "txt": [3, 7], "parquet": [1, 2]}
    for kind, numbers in lines.items():
        path = write(tmp_path / kind, kind)
        found = read(tokenizer, path)
        separator = ", row " if kind == "parquet" else ":"
        assert [found.location(i) for i in range(2)] == [f"{path}{separator}{number}" for number in numbers]


def test_a_text_file_as_one_document(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert texts(tokenizer, read(tokenizer, tmp_path / "a.txt", "data.text_unit=file")) == ["one\n\ntwo<|end|>"]


def test_folders_and_globs(tokenizer, tmp_path):
    for name in ("b/2.jsonl", "a/1.jsonl", "a/3.txt", "a/.hidden.jsonl", "a/README.md"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(json.dumps({"text": name}) if "jsonl" in name else name)
    assert texts(tokenizer, read(tokenizer, tmp_path / "in")) == [
        "a/1.jsonl<|end|>", "a/3.txt<|end|>", "b/2.jsonl<|end|>"
    ]  # fmt: skip
    assert texts(tokenizer, read(tokenizer, tmp_path / "in/**/*.jsonl")) == ["a/1.jsonl<|end|>", "b/2.jsonl<|end|>"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"holds no data; a file must end in one of \.jsonl \.json \.parquet \.csv \.txt"
    ):
        read(tokenizer, tmp_path / "empty")
    with pytest.raises(UserError, match=r"README\.md: the file must end in one of"):
        read(tokenizer, tmp_path / "in/a/README.md")


def test_what_a_folder_holds_is_read_once_and_nothing_in_it_passed_over_in_silence(tokenizer, tmp_path):
    inside = tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    (inside / ".checkpoints").mkdir()
    for name in ("a.jsonl", "sub/b.JSONL", ".checkpoints/a.jsonl"):
        jsonl(inside / name, [{"text": name}])
    for path in (inside, inside / "**", f"[{{path: {inside}}}]"):
        assert texts(tokenizer, read(tokenizer, path)) == ["a.jsonl<|end|>", "sub/b.JSONL<|end|>"]
    twice = f"[{{path: {inside}}}, {{path: {inside}}}]"
    assert len(read(tokenizer, twice)) == 4, "what is asked for twice is read twice"
    (inside / "c.jsonl.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"c\.jsonl\.gz cannot be read as it is; unpack it"):
        read(tokenizer, inside)
    (inside / "c.jsonl.gz").unlink()
    (inside / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="in/link is a link to a folder, which is not followed"):
        read(tokenizer, inside)
    (inside / "link").unlink()
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(inside / "saved"))
    with pytest.raises(UserError, match="in/saved is a saved dataset inside a folder of files"):
        read(tokenizer, inside)


def test_a_dataset_is_known_by_its_content_even_if_datasets_would_hold_it_in_memory(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 10**9)
    for text in ("alpha", "omega"):
        datasets.Dataset.from_list([{"text": text}]).save_to_disk(str(tmp_path / text))
        assert texts(tokenizer, read(tokenizer, tmp_path / text)) == [f"{text}<|end|>"]


def test_a_split_that_is_not_there(tokenizer, tmp_path):
    with pytest.raises(UserError, match="has no split 'validation'; it has train, test"):
        read(tokenizer, write(tmp_path, "saved with splits"), "data.split=validation")


def test_a_hub_dataset_out_of_reach(tokenizer):
    with pytest.raises(
        UserError, match="is no file or folder here, and as a dataset of the hub it cannot be read: "
    ) as caught:
        read(tokenizer, "nobody/nothing")
    assert "\n" not in str(caught.value)


def test_sources_with_weights_and_fields_of_their_own(tokenizer, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": "yes"} for i in range(40)])
    jsonl(tmp_path / "b.jsonl", [{"text": f"text {i}"} for i in range(40)])
    path = (
        f"[{{path: {tmp_path}/a.jsonl, weight: 3, fields: {{instruction: question, output: answer}}}},"
        f" {{path: {tmp_path}/b.jsonl, weight: 1}}]"
    )
    found, prepared = arranged(tokenizer, path, "batch.row_tokens=64")
    assert [summary.form for summary in found.summaries] == ["instruction", "text"]
    first = prepared.training.group_sizes[0]
    rows = [row for step in range(50) for row in prepared.sampler.step(step)]
    assert sum(row < first for row in rows) == 300 == 0.75 * len(rows)
    assert "75.0% of a step from" in plan.data_facts(recipe_of(path), found, prepared, tokenizer)["rows"]


@pytest.mark.parametrize(("length", "num_steps"), [("train.steps=7", 7), ("train.epochs=2.5", 32)])
def test_the_steps_of_a_run(tokenizer, tmp_path, length, num_steps):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 31}] * 50)
    lengths = ["train.steps=null", "train.epochs=null", "schedule.warmup_steps=0", length]
    _, prepared = arranged(tokenizer, path, "batch.row_tokens=32", "batch.rows=4", *lengths)
    assert len(prepared.training) == 50 and prepared.num_steps == num_steps
    assert sorted(row for step in range(25) for row in prepared.sampler.step(step)) == sorted([*range(50)] * 2)


def test_without_weights_sources_are_one_pool(tokenizer, tmp_path):
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(10)])
    found, prepared = arranged(tokenizer, f"[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl}}]")
    assert len(found) == 20 and prepared.training.group_sizes == [1]


# --------------------------------------------------------------------------- forms


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
        ({"talk": [{"by": "user", "says": "b"}, {"by": "bot", "says": "bye"}]}, "messages",
         ["data.fields={messages: talk, role: by, content: says}", "data.roles={bot: assistant}"]),
    ],
)  # fmt: skip
def test_forms_are_told_by_their_fields(tokenizer, tmp_path, record, form, overrides):
    found = read(tokenizer, jsonl(tmp_path / "a.jsonl", [record]), *overrides)
    assert [summary.form for summary in found.summaries] == [form]
    assert texts(tokenizer, found) == ["<|user|>b<|end|><|assistant|>bye<|end|>"]


def test_a_system_field_comes_first(tokenizer, tmp_path):
    record = {"system": "s", "instruction": "b", "output": "bye"}
    found = read(tokenizer, jsonl(tmp_path / "a.jsonl", [record]))
    assert texts(tokenizer, found)[0].startswith("<|system|>s<|end|><|user|>b")


def test_the_form_can_be_told(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": BYE, "text": "this"}])
    assert texts(tokenizer, read(tokenizer, path, "data.form=text")) == ["this<|end|>"]


# --------------------------------------------------------------------------- bad input


def said(*pairs: str) -> str:
    turns = [{"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True)]
    return json.dumps({"messages": turns})


# What the second line of a file holds after a good first one, and what is said of it.
BAD_LINES = {
    "not JSON": ('{"messages": ', "is not JSON: Expecting value at column 13"),
    "not an object": ("5", "must be an object with fields, found a number"),
    "missing": ('{"massages": []}', "messages: is missing; did you mean 'massages'?"),
    "null": ('{"messages": null}', "messages: is null"),
    "empty": ('{"messages": []}', "messages: is empty"),
    "text for a list": ('{"messages": "hello"}', "messages: must be a list of turns, found the text 'hello'"),
    "turn of text": ('{"messages": ["hello"]}', "messages[0]: must be an object, found the text 'hello'"),
    "content missing": ('{"messages": [{"role": "user"}]}', "messages[0].content: is missing"),
    "content null": ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content: is null"),
    "content empty": (said("user", "a", "assistant", " \n"), "messages[1].content: is empty"),
    "content a number": ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content: must be text, found"),
    "content parts": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
        "messages[0].content: must be text, found a list",
    ),
    "role missing": ('{"messages": [{"content": "a"}]}', "messages[0].role: is missing"),
    "role unknown": (said("usr", "a"), "messages[0].role: the text 'usr' is no known"),
    "no assistant": (said("user", "a"), "messages: has no turn of the assistant"),
    "assistant first": (said("assistant", "a"), "messages[0]: the first turn is the assistant's"),
    "another form": ('{"text": "a"}', "messages: is missing: this row has plain text, the first one of the"),
    "surrogate": ('{"messages": [{"role": "user", "content": "a\\ud800"}]}', "messages[0].content: is not UTF-8: a"),
    "a number of many digits": ('{"text": ' + "1" * 5000 + "}", "is not JSON: Exceeds the limit"),
    "nested": ("[" * 100_000, "is not JSON: it is nested too deeply"),
    "call without a name": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
        "messages[0].tool_calls[0]: must be a call with the text 'name'",
    ),
    "arguments not JSON": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
        "messages[0].tool_calls[0].arguments: must hold JSON",
    ),
    "tools not a list": (json.dumps({"messages": BYE, "tools": "{}"}), "tools: must be a list of tools, found an"),
    "weight": (json.dumps({"messages": [BYE[0], BYE[1] | {"weight": 2}]}), "messages[1].weight: must be 0 ("),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_by_file_line_and_field(tokenizer, tmp_path, cache, kind):
    line, said = BAD_LINES[kind]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(GOOD[0]), line, json.dumps(GOOD[1])]))
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    assert str(caught.value).startswith(f"{path}:2: {said}") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not list(cache.glob("*[!k]")), "nothing is kept of a run that stopped"

    found, prepared = arranged(tokenizer, path, "data.on_bad_row=skip")
    assert len(found) == 2 and prepared.num_read == 3
    assert [entry.location for entry in prepared.dropped] == [f"{path}:2"]
    assert prepared.dropped[0].reason.startswith(said)


def test_the_first_bad_line_is_named_whatever_the_process_that_finds_it(tokenizer, tmp_path):
    lines = [json.dumps({"text": "x" * 2000})] * 900
    lines[600] = lines[150] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl:151: is not JSON"):
        read(tokenizer, tmp_path / "a.jsonl")
    found = read(tokenizer, tmp_path / "a.jsonl", "data.on_bad_row=skip")
    assert [number for _, number, _ in found.bad] == [151, 601] and len(found) == 898
    assert found.number.tolist() == [n for n in range(1, 901) if n not in (151, 601)]


@pytest.mark.parametrize("kind", ["jsonl", "txt", "csv", "json"])
def test_bytes_that_are_not_utf8(tokenizer, tmp_path, kind):
    start, end = {
        "jsonl": ('{"text": "', '"}'),
        "txt": ("", ""),
        "csv": ("text\n", ""),
        "json": ('[{"text": "', '"}]'),
    }[kind]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(start.encode() + "né".encode("latin-1") + end.encode())
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    line = 2 if kind == "csv" else 1
    where = "" if kind in ("jsonl", "txt") else "text: "
    assert str(caught.value).startswith(f"{path}:{line}: {where}is not UTF-8")


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "csv"])
def test_a_document_of_50_mb(tokenizer, tmp_path, kind):
    text = "lorem " * (50 * 2**20 // 6)
    start, end = {
        "jsonl": ('{"text": "', '"}\n'),
        "txt": ("", "\n\n"),
        "csv": ("text\n", "\n"),
        "json": ('[{"text": "', '"},\n'),
    }[kind]
    small = {"jsonl": '{"text": "ok"}', "txt": "ok", "csv": "ok", "json": '{"text": "ok"}]'}[kind]
    path = tmp_path / f"a.{kind}"
    path.write_text(start + text + end + small)
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    line = 2 if kind == "csv" else 1
    assert str(caught.value).startswith(f"{path}:{line}: ")
    if kind == "csv":
        assert "field larger than field limit" in str(caught.value)
    else:
        assert "MiB, more than the 16 MiB that one may have; cut it into several" in str(caught.value)
    if kind in ("jsonl", "txt"):  # behind it, the next line begins where it ends
        assert texts(tokenizer, read(tokenizer, path, "data.on_bad_row=skip")) == ["ok<|end|>"]


def test_a_json_file_of_one_line_too_large(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_RECORD_BYTES", 1000)
    jsonl(tmp_path / "a.json", [{"text": "x" * 2000}])
    with pytest.raises(UserError, match=r"a\.json:1: the document has 0\.0 MiB, more than"):
        read(tokenizer, tmp_path / "a.json")


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt"])
def test_an_empty_file(tokenizer, tmp_path, kind, content):
    path = tmp_path / f"a.{kind}"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    assert str(caught.value) == f"{path}:1: the file is empty"


def test_one_empty_file_among_others_is_said_or_counted(tokenizer, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(UserError, match=r"b\.jsonl:1: the file is empty"):
        read(tokenizer, tmp_path)
    _, prepared = arranged(tokenizer, tmp_path, "data.on_bad_row=skip")
    assert [(entry.location, entry.reason) for entry in prepared.dropped] == [
        (f"{tmp_path}/b.jsonl:1", "the file is empty")
    ]


def test_a_file_that_changes_while_it_is_read(tokenizer, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(50)])
    usual = loss_mask.ChatTokenizer.encode

    def encode_slowly(self, documents):
        with path.open("a") as file:
            file.write('{"text": "late"}\n')
        return usual(self, documents)

    monkeypatch.setattr(loss_mask.ChatTokenizer, "encode", encode_slowly)
    with pytest.raises(UserError, match=r"a\.jsonl: has changed while it was read; run again when it is complete"):
        read(tokenizer, path)
    assert not list(cache.glob("*[!k]"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "what is it,a thing\nand that,another\n",
            ":1: the header: the fields 'what is it', 'a thing' are of no known form",
        ),
        ("text,text\na,b\n", ":1: the header names a column twice: text, text"),
        ("text,id\na,1\nb\n", ":3: has 1 cells, the header 2"),
        ('text\n"a\nb', ":3: is not CSV: unexpected end of data"),
        ("instruction,output\nq,\n", ":2: output: is empty"),
    ],
)
def test_csv_that_is_none(tokenizer, tmp_path, text, said):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError) as caught:
        read(tokenizer, tmp_path / "a.csv")
    assert str(caught.value).startswith(f"{tmp_path}/a.csv{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"text": "a"},\n{"text": }]', ":2: is not JSON: Expecting value"),
        ('[{"text": "a"},\n{"text": "b"}', ":2: is not JSON: expecting ',' or ']', found the end of the file"),
        ('[{"text": "a"}\n{"text": "b"}]', ":2: is not JSON: expecting ',' or ']'"),
        ('[{"text": "a"}]\n[]', ":2: is not JSON: there is more behind the list"),
        ("[1,", ":1: is not JSON: Expecting value"),
        ("[1]", ":1: must be an object with fields, found a number"),
        ('{"train": [{"text": "a"}]}', ":1: the fields 'train' are of no known form"),
        (
            '{\n "train": [{"text": "a"}]\n}',
            ":1: is an object over several lines; write a list of documents, or one a line",
        ),
        ('[{"text": ' + "1" * 5000 + "}]", ":1: is not JSON: Exceeds the limit"),
        ('"text"', ":1: must be an object with fields, found the text 'text'"),
    ],
)
def test_json_that_is_no_list(tokenizer, tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read(tokenizer, tmp_path / "a.json")
    assert str(caught.value).startswith(f"{tmp_path}/a.json{said}")


def test_a_json_list_is_read_through_a_window(tmp_path, monkeypatch):
    """Elements that lie across the edge of what is read at once, of every kind."""
    elements = [{"text": "é" * n, "n": 10**n % 9973} for n in range(40)] + [12345, -1.5e-7, 'a\\"b', None, [], {}]
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(elements, ensure_ascii=False).split(" ")), encoding="utf-8")
    for read_bytes in (1, 3, 7, 64):
        monkeypatch.setattr(sources, "READ_BYTES", read_bytes)
        (origin,) = sources.find(recipe_of(path).data.sources)
        records = list(origin.records("paragraph"))
        assert [record.value for record in records] == elements
        lines = path.read_text(encoding="utf-8").split("\n")
        assert all(lines[record.number - 1].lstrip("[")[:1] in '{1-"n]' for record in records)


def test_a_mistake_far_from_the_end_of_a_json_list_is_no_matter_of_size(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_RECORD_BYTES", 2000)
    monkeypatch.setattr(sources, "READ_BYTES", 100)
    rows = [json.dumps({"text": "x" * 300})] * 60
    rows[11] = '{"text": "a",}'
    (tmp_path / "a.json").write_text("[" + ",\n".join(rows) + "]")
    with pytest.raises(UserError, match=r"a\.json:12: is not JSON: (Illegal trailing comma|Expecting property name)"):
        read(tokenizer, tmp_path / "a.json")
    rows[11] = json.dumps({"text": "x" * 3000})
    (tmp_path / "a.json").write_text("[" + ",\n".join(rows) + "]")
    with pytest.raises(UserError, match=r"a\.json:12: the document has .* MiB, more than the"):
        read(tokenizer, tmp_path / "a.json")


def test_a_document_of_50_mb_in_parquet(tokenizer, tmp_path):
    pq.write_table(
        pa.Table.from_pylist([{"text": "a"}, {"text": "lorem " * (50 * 2**20 // 6)}]), tmp_path / "a.parquet"
    )
    with pytest.raises(UserError, match=r"a\.parquet, row 2: text: has 52,428,798 letters, more than the 16,777,216"):
        read(tokenizer, tmp_path / "a.parquet")


def test_files_that_cannot_be_opened(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match=r"data\.path: .*a\.jsonl: cannot be read: No such file or directory"):
        read(tokenizer, tmp_path / "*.jsonl")


def test_parquet_that_is_none(tokenizer, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet: ArrowInvalid"):
        read(tokenizer, tmp_path / "a.parquet")


def test_unknown_fields_name_the_known_forms(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError) as caught:
        read(tokenizer, path)
    assert str(caught.value) == (
        f"{path}:1: the fields 'question', 'answer' are of no known form (messages | conversations | "
        "instruction, output | prompt, completion | text); name them in data.fields"
    )


def test_a_line_of_jsonl_may_hold_any_unicode(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert texts(tokenizer, read(tokenizer, tmp_path / "a.jsonl")) == ["a\u2028b\x85c<|end|>"]


def test_nulls_that_parquet_adds_are_no_fields(tokenizer, tmp_path):
    calls = [
        {"role": "assistant", "content": "c", "tool_calls": None},
        {"role": "user", "content": "x", "tool_calls": None},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": BYE + calls[::-1], "tools": None}]), tmp_path / "a.parquet")
    assert texts(tokenizer, read(tokenizer, tmp_path / "a.parquet"))[0].endswith("<|assistant|>c<|end|>")


# --------------------------------------------------------------------------- what becomes of the documents


def add_up(prepared: splits.TrainingRows) -> None:
    held_out = prepared.held_out.num_documents if prepared.held_out.documents is prepared.training.documents else 0
    assert prepared.num_read == prepared.training.num_documents + held_out + len(prepared.dropped)


@pytest.mark.parametrize(
    ("long", "trained", "reason"),
    [("truncate", 3, "no supervised token before the cut"), ("drop", 2, "longer than a row"), ("split", 4, None)],
)
def test_long_documents(tokenizer, tmp_path, long, trained, reason):
    shapes = [("a", "b"), ("a", "b" * 40), ("a" * 40, "b"), ("c", "d")]
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": q, "output": a} for q, a in shapes])
    _, prepared = arranged(tokenizer, path, "batch.row_tokens=32", f"data.long={long}")
    add_up(prepared)
    assert prepared.training.num_documents == trained
    assert {entry.reason for entry in prepared.dropped} == ({reason} if reason else set())
    assert (prepared.num_truncated, prepared.num_split) == {"truncate": (1, 0), "split": (0, 2), "drop": (0, 0)}[long]
    total = prepared.training.targets.sum()
    assert total == {"truncate": 2 + 28 + 2, "drop": 2 + 2, "split": 2 + 2 + 41 + 2 - 1}[long], (
        "a piece begins untrained"
    )


def test_auto_cuts_chats_and_splits_text(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 100}])
    jsonl(tmp_path / "b.jsonl", [{"instruction": "q", "output": "x" * 100}])
    _, prepared = arranged(tokenizer, f"{tmp_path}/*.jsonl", "batch.row_tokens=32")
    assert (prepared.num_truncated, prepared.num_split) == (1, 1)
    assert int(prepared.training.num_tokens.sum()) == 101 + 32
    assert path.exists()


def test_nothing_to_train_on_says_why(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": "a" * 50, "output": "b"}] * 3)
    with pytest.raises(UserError) as caught:
        arranged(tokenizer, path, "batch.row_tokens=32")
    assert str(caught.value).endswith(
        "leaves nothing to train on within batch.row_tokens=32: 3 documents read, 0 held out, 3 dropped (3 no "
        "supervised token before the cut)"
    )
    (tmp_path / "b.jsonl").write_text("{\n{\n")
    with pytest.raises(UserError, match=r"none of the 2 rows of .*b\.jsonl can be used; .*b\.jsonl:1: is not JSON"):
        read(tokenizer, tmp_path / "b.jsonl", "data.on_bad_row=skip")


def test_no_copy_of_a_held_out_document_is_trained_on_in_whatever_order(tokenizer, tmp_path):
    records = [{"text": f"document {i % 60}"} for i in range(180)]
    splits = []
    for name, order in (("a", records), ("b", records[::-1])):
        path = jsonl(tmp_path / f"{name}.jsonl", order)
        found, prepared = arranged(tokenizer, path, "eval.fraction=0.3")
        sides = [
            [found.tokens(i).tobytes() for i in rows.chunks.document] for rows in (prepared.training, prepared.held_out)
        ]
        assert not {*sides[0]} & {*sides[1]} and min(map(len, sides)) > 20
        add_up(prepared)
        assert prepared.num_duplicates == 120
        splits.append([sorted(side) for side in sides])
    assert splits[0] == splits[1]


def test_documents_that_differ_behind_the_cut_alone_are_copies(tokenizer, tmp_path):
    records = [{"instruction": f"q{i // 10}", "output": "x" * 30 + str(i)} for i in range(400)]
    path = jsonl(tmp_path / "a.jsonl", records)
    for row_tokens, copies in ((32, 360), (64, 0)):
        found, prepared = arranged(tokenizer, path, f"batch.row_tokens={row_tokens}", "eval.fraction=0.3")
        sides = [
            {found.tokens(i)[:row_tokens].tobytes() for i in rows.chunks.document}
            for rows in (prepared.training, prepared.held_out)
        ]
        assert not sides[0] & sides[1] and all(sides)
        assert prepared.num_duplicates == copies


def test_evaluation_on_a_file_of_its_own(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": f"q{i}", "output": "a"} for i in range(20)])
    other = jsonl(tmp_path / "b.jsonl", [{"prompt": f"q{i}", "completion": "a"} for i in (3, 4, 99)])
    found, prepared = arranged(tokenizer, path, f"eval.path={other}")
    assert prepared.held_out.num_documents == 3 and prepared.training.num_documents == 18
    assert [(e.location, e.reason) for e in prepared.dropped] == [(f"{path}:{n}", "also in eval.path") for n in (4, 5)]
    add_up(prepared)
    assert {sample.question for sample in prepared.samples} <= {"q3", "q4", "q99"} and prepared.samples
    told = plan.data_facts(recipe_of(path), found, prepared, tokenizer)["documents"]
    assert told == "20 read = 18 trained + 0 held out + 2 dropped (2 also in eval.path); evaluated on 3 of eval.path"


def test_what_is_not_evaluated_on_is_told_too(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": f"q{i}", "output": "a"} for i in range(20)])
    rows = [
        {"instruction": "e1", "output": "a"},
        {"instruction": "e2", "output": ""},
        {"instruction": "e" * 99, "output": "a"},
    ]
    other = jsonl(tmp_path / "b.jsonl", rows)
    settings = (f"eval.path={other}", "data.on_bad_row=skip", "batch.row_tokens=32")
    found, prepared = arranged(tokenizer, path, *settings)
    assert [entry.location for entry in prepared.dropped_of_evaluation] == [f"{other}:2", f"{other}:3"]
    told = plan.data_facts(recipe_of(path), found, prepared, tokenizer)["documents"]
    assert told.endswith(
        "evaluated on 1 of eval.path, 2 dropped (1 output: is empty; 1 no supervised token before the cut)"
    )
    jsonl(other, rows[2:])
    with pytest.raises(UserError, match=r"eval.path: .* leaves nothing to evaluate on: 1 dropped"):
        arranged(tokenizer, path, *settings)


def test_documents_that_begin_alike_and_are_split_are_no_copies(tokenizer, tmp_path):
    rows = [{"instruction": "x" * 100, "output": f"answer {i}"} for i in range(20)]
    path = jsonl(tmp_path / "a.jsonl", rows[1:])
    other = jsonl(tmp_path / "b.jsonl", rows[:1])
    _, prepared = arranged(tokenizer, path, f"eval.path={other}", "data.long=split", "batch.row_tokens=64")
    assert (len(prepared.dropped), prepared.num_duplicates, prepared.training.num_documents) == (0, 0, 19)


def test_fields_that_are_not_read_are_named_wherever_they_are(tokenizer, tmp_path):
    turns = [BYE[0], BYE[1] | {"mood": "good", "reasoning": "it is late"}]
    path = jsonl(
        tmp_path / "a.jsonl", [{"messages": BYE}, {"messages": BYE, "context": "x"}, {"messages": turns[:1] + BYE[1:]}]
    )
    assert read(tokenizer, path).summaries[0].unused == ["context"]
    with pytest.raises(UserError, match="the chat template leaves out its reasoning_content"):
        read(tokenizer, jsonl(tmp_path / "b.jsonl", [{"messages": turns}]))
    turns[1].pop("reasoning")
    assert read(tokenizer, jsonl(tmp_path / "c.jsonl", [{"messages": turns}])).summaries[0].unused == [
        "messages[].mood"
    ]


def test_the_older_name_of_a_call_is_a_call(tokenizer, tmp_path):
    turn = {"role": "assistant", "content": "calling", "function_call": {"name": "f", "arguments": "{}"}}
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: messages: turn 2 \(assistant\): the chat template leaves out its call"
    ):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"messages": [BYE[0], turn]}]))


def test_blank_results_and_blank_words_beside_a_call_are_usual():
    call = {"name": "f", "arguments": {}}
    turns = [
        *BYE[:1], {"role": "assistant", "content": "\n\n", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "\n"}, *BYE[1:],
    ]  # fmt: skip
    found = row_formats.read({"messages": turns}, row_formats.FieldNames("messages", {}, {}))
    assert [turn["content"] for turn in found.turns] == ["b", "\n\n", "\n", "bye"]


@pytest.mark.parametrize(("supervise", "asked"), [("assistant", ("hi", "hé €  \n")), ("last", ("b", "bye"))])
def test_the_sample_of_a_long_chat_asks_for_what_is_trained(tokenizer, tmp_path, supervise, asked):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": HI + BYE}, {"messages": BYE}])
    other = jsonl(tmp_path / "b.jsonl", [{"messages": HI + BYE}])
    _, prepared = arranged(tokenizer, path, f"eval.path={other}", f"data.supervise={supervise}")
    (sample,) = prepared.samples
    assert (sample.question, sample.answer) == asked
    assert tokenizer.decode(sample.prompt).endswith(f"<|user|>{asked[0]}<|end|><|assistant|>")


def test_samples_are_held_out_questions_with_the_prompt_that_was_trained(tokenizer, tmp_path):
    records = [{"instruction": f"q{i}", "output": f"a{i}"} for i in range(60)]
    _, prepared = arranged(tokenizer, jsonl(tmp_path / "a.jsonl", records * 2), "eval.fraction=0.3", "eval.samples=5")
    assert len({sample.question for sample in prepared.samples}) == 5
    held = {int(i) % 60 for i in prepared.held_out.chunks.document}
    for sample in prepared.samples:
        assert int(sample.question[1:]) in held and sample.answer == sample.question.replace("q", "a")
        assert tokenizer.decode(sample.prompt) == f"<|user|>{sample.question}<|end|><|assistant|>"


def test_a_template_without_an_end_of_turn_gets_a_hint(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    for ending, hinted in (("<|end|>", False), ("</end>\n", True)):
        other = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
        other.chat_template = other.chat_template.replace("<|end|>", ending)
        found, prepared = arranged(other, path)
        assert ("hint" in plan.data_facts(recipe_of(path), found, prepared, other)) == hinted


# --------------------------------------------------------------------------- the cache


def count_encoded(monkeypatch) -> list[int]:
    counts: list[int] = []
    usual = loss_mask.ChatTokenizer.encode
    monkeypatch.setattr(loss_mask.ChatTokenizer, "encode", lambda self, d: counts.append(len(d)) or usual(self, d))
    return counts


def test_what_was_tokenized_is_not_tokenized_again(tokenizer, tmp_path, monkeypatch):
    counts = count_encoded(monkeypatch)
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    first = read(tokenizer, path)
    assert counts == [3]
    again = read(tokenizer, path, "batch.row_tokens=32", "data.packing=false", "data.long=drop", "eval.fraction=0.1")
    moved = tmp_path / "b.jsonl"
    path.rename(moved)
    renamed = read(tokenizer, moved)
    assert counts == [3], "rows, splits and names do not matter"
    assert texts(tokenizer, again) == texts(tokenizer, renamed) == texts(tokenizer, first)
    assert renamed.location(2) == f"{moved}:3"


@pytest.mark.parametrize("change", ["content", "supervise", "template", "special", *corpus.MODULES])
def test_whatever_the_tokens_depend_on_makes_them_anew(tokenizer, tmp_path, monkeypatch, change):
    counts = count_encoded(monkeypatch)
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    read(tokenizer, path)
    other = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    overrides = []
    if change == "content":
        jsonl(path, [*GOOD[:2], {"messages": BYE + HI}])
    elif change == "supervise":
        overrides = ["data.supervise=last"]
    elif change == "template":
        other.chat_template = other.chat_template.replace("<|end|>", "<|end|>\n")
    elif change == "special":
        other.add_special_tokens({"eos_token": "<|pad|>"})
    else:
        edit_source(monkeypatch, change, tmp_path)
    read(other, path, *overrides)
    assert counts == [3, 3]


def edit_source(monkeypatch, module, folder: Path) -> None:
    copy = folder / "edited.py"
    copy.write_text(Path(module.__file__).read_text() + "\n")
    monkeypatch.setattr(module, "__file__", str(copy))


def forget(cache: Path) -> None:
    """So that the next read tokenizes again."""
    shutil.rmtree(cache)


def test_the_digest_is_of_the_documents_however_they_are_batched(tokenizer, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": (HI + BYE) * (1 + i % 3)} for i in range(300)])
    digests = []
    for num_cores, batch_documents in [(2, 64), (2, 7), (1, 64), (1, 300)]:
        monkeypatch.setattr(tokenization, "BATCH_DOCUMENTS", batch_documents)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_cores: set(range(n)))
        digests.append(read(tokenizer, path).digest)
        forget(cache)
    assert len(digests) == 4 and len({*digests}) == 1


def test_the_digest_is_that_of_the_cached_file_and_not_of_the_code(tokenizer, tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    built, mapped = read(tokenizer, path), read(tokenizer, path)
    edit_source(monkeypatch, row_formats, tmp_path)
    rebuilt = read(tokenizer, path)
    assert built.key == mapped.key != rebuilt.key
    assert built.digest == mapped.digest == rebuilt.digest
    columns = [
        np.concatenate([built.tokens(i) for i in range(3)]),
        np.concatenate([built.loss_mask(i) for i in range(3)]),
        built.lengths,
    ]
    streams = b"".join(xxhash.xxh3_128_digest(column.tobytes()) for column in columns)
    assert built.digest == xxhash.xxh3_128_hexdigest(streams)


def test_the_digest_tells_tokens_masks_order_and_edges_of_documents_apart(tokenizer, tmp_path):
    swapped = [{"messages": [HI[0], HI[1] | {"content": HI[1]["content"].swapcase()}]}, *GOOD[1:]]
    untrained = [{"messages": [HI[0], HI[1] | {"weight": 0}, *BYE]}, *GOOD[1:]]
    trained = [{"messages": HI + BYE}, *GOOD[1:]]
    digests = [
        read(tokenizer, jsonl(tmp_path / "a.jsonl", records)).digest
        for records in (GOOD, swapped, untrained, trained, GOOD[::-1], GOOD[:2])
    ]
    # Two texts that split the same tokens, all of them trained, at another place.
    end = tokenizer.eos_token
    digests += [
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])).digest
        for texts in ([f"a{end}b", "c"], ["a", f"b{end}c"])
    ]
    assert len({*digests}) == len(digests)


def test_a_rank_that_does_not_build_waits_for_the_one_that_does(tokenizer, tmp_path, monkeypatch):
    counts = count_encoded(monkeypatch)
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(corpus.load_corpora(recipe, tokenizer, is_builder=False, tell=lambda _: None)[0])
    )
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and counts == []
    built = corpus.load_corpora(recipe, tokenizer, is_builder=True, tell=lambda _: None)[0]
    waiting.join(30)
    assert counts == [3] and texts(tokenizer, found[0]) == texts(tokenizer, built)


def test_a_tokenizer_whose_file_asks_for_a_cut_has_one_key_on_every_rank(tmp_path):
    """The builder switches the cut off; what the others look for must not depend on that."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 300}])
    other = jsonl(tmp_path / "b.jsonl", [{"text": "y" * 300}])
    keys = []
    for is_builder in (True, False):
        cutting = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
        cutting.backend_tokenizer.enable_truncation(max_length=8)
        both = corpus.load_corpora(recipe_of(path, f"eval.path={other}"), cutting, is_builder, tell=lambda _: None)
        keys.append([found.key for found in both])
        assert [int(found.lengths[0]) for found in both] == [301, 301]
    assert keys[0] == keys[1]


def test_a_rank_that_nobody_builds_for_builds_itself(tokenizer, tmp_path, monkeypatch):
    """It has read other data than the builder; that is told once all ranks can compare."""
    monkeypatch.setattr(corpus, "BUILDER_FIRST_SECONDS", 0.2)
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    assert len(corpus.load_corpora(recipe, tokenizer, is_builder=False, tell=lambda _: None)[0]) == 3


def test_a_module_run_as_a_script_does_not_hide_the_standard_library():
    """Its folder is the first of sys.path then: src/gearbox/data/builtin_tasks.py writes the tiny tokenizer so."""
    names = {path.stem for path in Path(corpus.__file__).parent.glob("*.py")}
    assert "builtin_tasks" in names and not names & sys.stdlib_module_names


def test_threads_of_the_tokenizer_do_not_meet_a_fork(tmp_path, cache):
    """Many set this variable to be rid of a warning; the processes of the pool then waited for ever."""
    jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 50} for i in range(300)])
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache.parent), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "src/preview.py", f"data.path={tmp_path}/a.jsonl"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_waiting_rank_ends_with_its_launcher(tokenizer, tmp_path, monkeypatch):
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    parents = chain([os.getppid(), os.getppid()], repeat(1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(RuntimeError, match="the launcher has ended"):
        corpus.load_corpora(recipe, tokenizer, is_builder=False)


def test_a_cache_that_cannot_be_written_is_named(tokenizer, tmp_path, cache):
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cache/gearbox: cannot be written .*; set HF_DATASETS_CACHE"):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", GOOD))


def start_on_a_large_file(tmp_path: Path, cache: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """src/preview.py while it tokenizes, and the processes that do it."""
    jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 5000} for i in range(400)])
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache.parent)}
    command = [sys.executable, "src/preview.py", f"data.path={tmp_path}/a.jsonl"]
    parent = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    workers: list[psutil.Process] = []
    while len(workers) < 2 and parent.poll() is None:
        time.sleep(0.05)
        workers = psutil.Process(parent.pid).children()
    assert len(workers) >= 2, parent.communicate()
    return parent, workers


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: tokenized by the process itself")
def test_no_process_survives_a_builder_that_is_killed_and_the_next_one_starts_anew(tokenizer, tmp_path, cache):
    parent, workers = start_on_a_large_file(tmp_path, cache)
    parent.kill()
    parent.wait()
    survivors = psutil.wait_procs(workers, timeout=20)[1]
    for survivor in survivors:
        survivor.kill()
    assert not survivors
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [".partial"]
    jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 5000} for i in range(400)])
    found = read(tokenizer, tmp_path / "a.jsonl")
    assert len(found) == 400
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [""]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: tokenized by the process itself")
def test_a_process_that_is_killed_for_memory_is_named(tmp_path, cache):
    parent, workers = start_on_a_large_file(tmp_path, cache)
    workers[0].kill()
    said = parent.communicate()[1]
    assert parent.returncode == 2
    assert said.strip() == "gearbox: data.path: a process that tokenizes was killed, most likely for want of memory"


# --------------------------------------------------------------------------- real files


@pytest.mark.parametrize(
    ("name", "form", "overrides"),
    [
        ("alpaca_en_demo.json", "instruction", []),
        ("c4_demo.jsonl", "text", []),
        ("wiki_demo.txt", "text", ["data.text_unit=line"]),
        ("glaive_toolcall_en_demo.json", "conversations",
         ["data.chat_template=recipes/chat_templates/chatml_tools.jinja", "batch.row_tokens=4096"]),
    ],
)  # fmt: skip
def test_a_real_file(tokenizer, name, form, overrides):
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"the sample {name} is not on this machine")
    if form == "conversations":
        tokenizer.chat_template = Path(overrides[0].partition("=")[2]).read_text()
    found, prepared = arranged(tokenizer, path, "eval.fraction=0.02", *(overrides or ["batch.row_tokens=2048"]))
    text = path.read_text()
    assert prepared.num_read == (len(json.loads(text)) if name.endswith(".json") else len(text.splitlines()))
    add_up(prepared)
    assert [summary.form for summary in found.summaries] == [form]
    assert prepared.training.filled > 0.9
    if form == "text":
        assert int(prepared.training.num_tokens.sum() + prepared.held_out.num_tokens.sum()) == found.lengths.sum()
    tokenizer.chat_template = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny").chat_template
