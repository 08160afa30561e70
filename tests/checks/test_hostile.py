"""Files that no run can use lead to short findings, and hide nothing about the other files."""

import json
import os
import shutil
from itertools import pairwise

import pytest
import yaml

from gearbox import ROOT
from gearbox.checks import agreement
from gearbox.checks.marks import Marks
from gearbox.config.gear import gear_path, read_gear

TINY = ROOT / "recipes/tiny.yaml"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")
)
CONTENTS = {
    "binary": os.urandom(4096),
    "50 MB": b"a: b\n" * 10_000_000,
    "bomb": BOMB.encode(),
    "empty": b"",
    "deep": b"[" * 100_000,
    "no mapping": b"- a\n- b\n",
    "tabs": b"model:\n\tname: x\n",
    "zero byte": b'model: {name: "a\\0b"}\n',
    "self": b"model: &a [*a]\n",
    "comments": b'// a\n{"bf16": 1}\n',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("place", ["recipe", "gear", "zero"])
def test_a_hostile_file_is_a_finding_and_hides_no_other(tmp_path, content, place):
    recipe, gear, zero = tmp_path / "mine.yaml", tmp_path / "gear.yaml", tmp_path / "zero.json"
    recipe.write_text(TINY.read_text().replace("micro_rows: 8", "micro_rows: x"))
    settings = yaml.safe_load(gear_path("zero2").read_text())
    settings["deepspeed_config"] |= {"deepspeed_config_file": str(zero), "wrong": 1}
    gear.write_text(yaml.safe_dump(settings))
    zero.write_text((ROOT / "ds_configs/zero2.json").read_text().replace('"stage": 2', '"stage": 9'))
    {"recipe": recipe, "gear": gear, "zero": zero}[place].write_bytes(content)

    findings = agreement.examine(recipe, [], read_gear(gear, {})).problems
    assert all(len(one.text) < 600 and "\n" not in one.text for one in findings)
    with_findings = {one.file for one in findings}
    expected = {str(recipe), str(gear), str(zero)} if place != "gear" else {str(recipe), str(gear)}
    assert with_findings == expected, "without the gear's file, its ZeRO JSON is not known"


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_file_is_a_finding(tmp_path, kind):
    path = tmp_path / "mine.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    (of_recipe,) = agreement.examine(path, [], read_gear(gear_path("single"), {})).findings
    (of_gear,) = agreement.examine(TINY, [], read_gear(path, {})).findings
    assert of_recipe.message == of_gear.message
    assert of_recipe.file == of_gear.file == str(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"vocab_size": "x", "num_attention_heads": [], "model_type": 3}',
        '{"model": 3, "added_tokens": {"a": 1}, "eos_token_id": {}, "chat_template": [1]}',
        '{"model_type": "../llama"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
    ],
)
def test_a_hostile_file_of_a_model_ends_no_check(tmp_path, name, content):
    model, path = tmp_path / "model", tmp_path / "mine.yaml"
    shutil.copytree(ROOT / "recipes/tiny", model)
    (model / name).write_text(content)
    path.write_text(TINY.read_text().replace("recipes/tiny ", f"{model} "))
    for gear in ("single", "tp", "pp", "ulysses"):
        found = agreement.examine(path, [], read_gear(gear_path(gear), {})).findings
        assert all(len(one.text) < 600 for one in found)
        is_object = content.startswith("{") and content.endswith("}")
        assert is_object or any(str(model / name) in one.text for one in found) or name == "generation_config.json"


def test_the_places_of_keys(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"a": {"b": [1, {"c": 2}],\n  "d": "x: {"},\n\t"a\\u0062": "e",\n"f": {"d": 1}}')
    marks = Marks(path)
    assert [marks.of(key) for key in ("a", "a.b.1.c", "a.d", "ab", "f.d")] == [(1, 2), (1, 18), (2, 3), (3, 2), (4, 7)]
    assert marks.of("a.none") == (1, 2) and marks.of("none") is None and marks.last("d") == (4, 7)
    assert json.loads(path.read_text())["ab"] == "e"
    path = tmp_path / "mine.yaml"
    path.write_text("a:\n  - b: 1\n    c: 2\n  - {d: 3}\n")
    assert [Marks(path).of(key) for key in ("a", "a.0.c", "a.1.d", "a.1.e")] == [(1, 1), (3, 5), (4, 6), (4, 5)]
