"""Files that no run can use lead to short findings, and hide nothing about the other files."""

import json
import os
import shutil
from itertools import pairwise

import pytest
import yaml
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from gearbox import ROOT
from gearbox.checks import agreement, tokenizer
from gearbox.checks.family import is_language_model
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


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize("body", ["x", "{% set x = 1 %}"])
def test_a_template_that_never_ends_does_not_hold_up_a_check(tmp_path, monkeypatch, body):
    rounds = []
    monkeypatch.setattr(tokenizer, "range", lambda *numbers: rounds.append(1) or range(*numbers), raising=False)
    model = tmp_path / "model"
    shutil.copytree(ROOT / "recipes/tiny", model)
    (model / "chat_template.jinja").write_text(ENDLESS.replace("BODY", body) + "{{ eos_token }}")
    overrides = [f"model.name={model}", "data.path=recipes/chats.jsonl"]
    assert agreement.examine(TINY, overrides, read_gear(gear_path("single"), {})).findings == []
    assert len(rounds) <= 2, "the second loop has too many rounds"


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text((ROOT / "recipes/chats.jsonl").read_text())
    (tmp_path / "b.jsonl").symlink_to("none.jsonl")
    for path in ("b.jsonl", "*.jsonl"):
        examined = agreement.examine(TINY, [f"data.path={tmp_path}/{path}"], read_gear(gear_path("single"), {}))
        assert [f"{one.key}: {one.message}" for one in examined.findings] == [
            f"data.path: {tmp_path}/b.jsonl is a link that leads nowhere; give a file or a folder"
        ]


def test_a_file_in_another_encoding_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(TINY.read_text().encode("utf-16"))
    (one,) = agreement.examine(path, [], read_gear(gear_path("single"), {})).findings
    assert one.message.startswith("cannot be read: 'utf-8' codec") and one.message.endswith("; save it as UTF-8")


def test_every_family_with_a_language_model_is_known():
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert len(names) > 200
    assert [name for name in sorted(names) if not is_language_model(name)] == []
    assert [name for name in ("t5", "vit", "clip", "") if is_language_model(name)] == []
