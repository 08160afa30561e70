"""Guards the readers: every kind of file, and every kind of mistake in a file."""

import csv
import json
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.data import sources
from gearbox.errors import UserError
from support.corpora import add_up, arranged, jsonl, read, recipe_of, texts

SHARED = ROOT.parent / "shared" / "data"


def write(folder: Path, kind: str) -> Path:
    """Write two texts, 'one é' and 'two', as this kind of source."""
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


def test_locations_are_lines_of_the_file(tokenizer, tmp_path):
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
        UserError, match=r"contains no data; a file must end in one of \.jsonl \.json \.parquet \.csv \.txt"
    ):
        read(tokenizer, tmp_path / "empty")
    with pytest.raises(UserError, match=r"README\.md: the file must end in one of"):
        read(tokenizer, tmp_path / "in/a/README.md")


def test_a_folder_is_read_once_and_nothing_is_skipped_silently(tokenizer, tmp_path):
    inside = tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    (inside / ".checkpoints").mkdir()
    for name in ("a.jsonl", "sub/b.JSONL", ".checkpoints/a.jsonl"):
        jsonl(inside / name, [{"text": name}])
    for path in (inside, inside / "**", f"[{{path: {inside}}}]"):
        assert texts(tokenizer, read(tokenizer, path)) == ["a.jsonl<|end|>", "sub/b.JSONL<|end|>"]
    twice = f"[{{path: {inside}}}, {{path: {inside}}}]"
    assert len(read(tokenizer, twice)) == 4, "a source that is listed twice is read twice"
    (inside / "c.jsonl.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"c\.jsonl\.gz cannot be read directly; unpack it"):
        read(tokenizer, inside)
    (inside / "c.jsonl.gz").unlink()
    (inside / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="in/link is a symlink to a folder and is not followed"):
        read(tokenizer, inside)
    (inside / "link").unlink()
    os.mkfifo(inside / "pipe.jsonl")  # reading it would never end
    with pytest.raises(UserError, match=r"in/pipe\.jsonl is not a regular file; remove it"):
        read(tokenizer, inside)
    (inside / "pipe.jsonl").unlink()
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(inside / "saved"))
    with pytest.raises(UserError, match="in/saved is a saved dataset inside a folder of files"):
        read(tokenizer, inside)


def test_a_dataset_is_identified_by_content_even_if_it_would_be_loaded_into_memory(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 10**9)
    for text in ("alpha", "omega"):
        datasets.Dataset.from_list([{"text": text}]).save_to_disk(str(tmp_path / text))
        assert texts(tokenizer, read(tokenizer, tmp_path / text)) == [f"{text}<|end|>"]


def test_a_missing_split(tokenizer, tmp_path):
    with pytest.raises(UserError, match="has no split 'validation'; it has train, test"):
        read(tokenizer, write(tmp_path, "saved with splits"), "data.split=validation")


def test_a_hub_dataset_that_cannot_be_loaded(tokenizer):
    with pytest.raises(
        UserError, match="is not a local file or folder and could not be loaded from the Hub: "
    ) as caught:
        read(tokenizer, "nobody/nothing")
    assert "\n" not in str(caught.value)


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
        assert "MiB, more than the limit of 16 MiB; split it" in str(caught.value)
    if kind in ("jsonl", "txt"):  # reading continues at the next line
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


def test_one_empty_file_among_others_is_reported_or_counted(tokenizer, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(UserError, match=r"b\.jsonl:1: the file is empty"):
        read(tokenizer, tmp_path)
    _, prepared = arranged(tokenizer, tmp_path, "data.on_bad_row=skip")
    assert [(entry.location, entry.reason) for entry in prepared.dropped()] == [
        (f"{tmp_path}/b.jsonl:1", "the file is empty")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "what is it,a thing\nand that,another\n",
            ":1: the header: the fields 'what is it', 'a thing' match no known format",
        ),
        ("text,text\na,b\n", ":1: the header repeats a column: text, text"),
        ("text,id\na,1\nb\n", ":3: has 1 cells, but the header has 2"),
        ('text\n"a\nb', ":3: is not CSV: unexpected end of data"),
        ("instruction,output\nq,\n", ":2: output: is empty"),
    ],
)
def test_text_that_is_not_csv(tokenizer, tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError) as caught:
        read(tokenizer, tmp_path / "a.csv")
    assert str(caught.value).startswith(f"{tmp_path}/a.csv{message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"},\n{"text": }]', ":2: is not JSON: Expecting value"),
        ('[{"text": "a"},\n{"text": "b"}', ":2: is not JSON: expecting ',' or ']', found the end of the file"),
        ('[{"text": "a"}\n{"text": "b"}]', ":2: is not JSON: expecting ',' or ']'"),
        ('[{"text": "a"}]\n[]', ":2: is not JSON: there is more data after the list"),
        ("[1,", ":1: is not JSON: Expecting value"),
        ("[1]", ":1: must be an object with fields, found a number"),
        ('{"train": [{"text": "a"}]}', ":1: the fields 'train' match no known format"),
        (
            '{\n "train": [{"text": "a"}]\n}',
            ":1: is an object that spans several lines; write a list of documents, or one document per line",
        ),
        ('[{"text": ' + "1" * 5000 + "}]", ":1: is not JSON: Exceeds the limit"),
        ('"text"', ":1: must be an object with fields, found the string 'text'"),
    ],
)
def test_json_that_is_not_a_list(tokenizer, tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read(tokenizer, tmp_path / "a.json")
    assert str(caught.value).startswith(f"{tmp_path}/a.json{message}")


def test_a_json_list_is_read_through_a_window(tmp_path, monkeypatch):
    """Elements of every kind cross the edge of the window."""
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


def test_a_mistake_far_from_the_end_of_a_json_list_is_not_reported_as_size(tokenizer, tmp_path, monkeypatch):
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
    with pytest.raises(
        UserError, match=r"a\.parquet, row 2: text: has 52,428,798 characters, more than the limit of 16,777,216"
    ):
        read(tokenizer, tmp_path / "a.parquet")


def test_files_that_cannot_be_opened(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(
        UserError, match=r"data\.path: .*a\.jsonl is a link that leads nowhere; give a file or a folder"
    ):
        read(tokenizer, tmp_path / "*.jsonl")


def test_a_file_that_is_not_parquet(tokenizer, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet: ArrowInvalid"):
        read(tokenizer, tmp_path / "a.parquet")


def test_a_line_of_jsonl_may_contain_any_unicode(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert texts(tokenizer, read(tokenizer, tmp_path / "a.jsonl")) == ["a\u2028b\x85c<|end|>"]


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
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    found, prepared = arranged(tokenizer, path, "eval.fraction=0.02", *(overrides or ["batch.row_tokens=2048"]))
    text = path.read_text()
    assert prepared.facts.num_read == (len(json.loads(text)) if name.endswith(".json") else len(text.splitlines()))
    add_up(prepared)
    assert [summary.form for summary in found.summaries] == [form]
    assert prepared.training.filled > 0.9
    if form == "text":
        assert int(prepared.training.targets.sum() + prepared.held_out.targets.sum()) == found.targets.sum()
    tokenizer.chat_template = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny").chat_template
