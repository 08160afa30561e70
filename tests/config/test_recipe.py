"""Test that every mistake in a recipe is reported at once, by file and key, before torch is imported."""

import os
import re
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from gearbox import ROOT
from gearbox.config.loader import load_recipe, recipe_keys
from gearbox.config.recipe import Recipe
from gearbox.config.recipe_values import Source
from gearbox.errors import UserError

TINY = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
# Keys that recipes/tiny.yaml sets. Its other keys show the schema's defaults.
CHOSEN = {
    "model.name", "model.init", "data.path", "batch.rows", "batch.row_tokens", "batch.micro_rows", "optim.lr",
    "schedule.warmup", "train.steps", "eval.every", "eval.fraction",
}  # fmt: skip


def read(tmp_path: Path, *overrides: str, **changes) -> Recipe:
    """Return the tiny recipe with changed groups, written to a file and read back."""
    content = deepcopy(TINY)
    for group, values in changes.items():
        both_mappings = isinstance(values, dict) and isinstance(content.get(group), dict)
        content[group] = content[group] | values if both_mappings else values
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_recipe(path, list(overrides))


def refusal(tmp_path: Path, *overrides: str, **changes) -> list[str]:
    """Return the lines of the error, each without the recipe's path at its start, or with the command line there."""
    with pytest.raises(UserError) as caught:
        read(tmp_path, *overrides, **changes)
    start = f"{tmp_path / 'recipe.yaml'}: "
    lines = str(caught.value).splitlines()
    assert all(line.startswith((start, "command line: ")) for line in lines)
    return [line.removeprefix(start) for line in lines]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optim": {"weight_decy": 1}}, "optim.weight_decy: unknown key; did you mean 'weight_decay'?"),
        ({"batch": {"row_token": 9}}, "batch.row_token: unknown key; did you mean 'row_tokens'?"),
        ({"optm": {}}, "optm: unknown key; did you mean 'optim'?"),
        ({"data": {"rows": 9}}, "data.rows: unknown key; did you mean 'batch.rows'?"),
        (
            {"train": {"warmup_steps": 1}},
            "train.warmup_steps: unknown key; did you mean 'schedule.warmup'?",
        ),
        ({"model": {"rehearse": True}}, "model.rehearse: unknown key; did you mean 'run.rehearse'?"),
        ({"batch": {"rows": "many"}}, "unable to parse string as an integer, found 'many'"),
        ({"batch": {"rows": 1.5}}, "found 1.5"),
        ({"batch": {"rows": 0}}, "batch.rows: input should be greater than or equal to 1, found 0"),
        ({"data": {"packing": "perhaps"}}, "data.packing: input should be a valid boolean"),
        ({"optim": {"lr": "2e-5x"}}, "parse string as a number, found '2e-5x'"),
        ({"optim": {"betas": [0.9]}}, "optim.betas.1: is required"),
        ({"model": {"init": "rnadom"}}, "model.init: input should be 'pretrained' or 'random', found 'rnadom'"),
        ({"optim": [1]}, "found [1]"),
        ({"optim": None}, "found None"),
        ({"run": {"name": "../up"}}, "run.name: "),
        ({"train": {"epochs": 1}}, "train: give exactly one of steps and epochs"),
        ({"train": {"steps": None}}, "train: give exactly one of steps and epochs"),
        (
            {"schedule": {"warmup": 7}, "train": {"steps": 7}},
            "schedule.warmup: must be below the 7 steps of the run, found 7; give fewer steps, or a share",
        ),
        (
            {"model": {"quantize": "nf4"}},
            "model.quantize: freezes the weights and needs an adapter; set adapter.method: lora",
        ),
        ({"model": {"name": "./nowhere"}}, "model.name: no such folder './nowhere'"),
        ({"model": {"name": "models/smollm2-135m-x"}}, "model.name: no such folder 'models/smollm2-135m-x'"),
        ({"model": {"name": "accelerate_configs"}}, "model.name: the folder 'accelerate_configs' has no config.json"),
        ({"data": {"path": "no/such.jsonl"}}, "data.path: no such file 'no/such.jsonl'"),
        (
            {"data": {"path": "builtin:task"}},
            "unknown built-in data 'builtin:task'; the built-in data are builtin:tasks, builtin:forms, "
            "builtin:preferences",
        ),
    ],
)
def test_each_mistake_is_named(tmp_path, changes, expected):
    assert expected in "\n".join(refusal(tmp_path, **changes))


def test_a_required_key_that_is_missing_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(TINY | {"batch": {"row_tokens": 8}}))
    with pytest.raises(UserError, match=r"recipe.yaml: batch.rows: is required$"):
        load_recipe(path)


@pytest.mark.parametrize("written", ["2e-5", '"2e-5"', "0.00002", "2.0e-5"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path, written):
    path = tmp_path / "recipe.yaml"
    path.write_text(re.sub(r"lr: \S+", f"lr: {written}", (ROOT / "recipes" / "tiny.yaml").read_text()))
    assert load_recipe(path).optim.lr == 2e-5


def test_overrides_replace_the_file_and_keep_their_types(tmp_path):
    recipe = read(
        tmp_path, "optim.lr=1e-5", "data.packing=false", "train.steps=null", "train.epochs=2", "run.name=a=b"[:-2]
    )
    assert (recipe.optim.lr, recipe.data.packing, recipe.train.steps, recipe.train.epochs) == (1e-5, False, None, 2.0)
    assert (recipe.run.name, recipe.batch.rows) == ("a", TINY["batch"]["rows"])
    with_equals = read(tmp_path, "data.split=train[:5%]=x", "adapter.targets=[q_proj, v_proj]")
    assert (with_equals.data.split, with_equals.adapter.targets) == ("train[:5%]=x", ["q_proj", "v_proj"])


def test_what_only_the_command_line_breaks_is_said_to_be_there(tmp_path):
    wrong = refusal(
        tmp_path, "train.steps=10", "data.path=no.jsonl", schedule={"warmup": 50}, eval={"path": "none.txt"}
    )
    assert [line.partition(", ")[0] for line in wrong] == [
        "command line: schedule.warmup: must be below the 10 steps of the run",
        "command line: data.path: no such file 'no.jsonl'",
        "eval.path: no such file 'none.txt'",
    ]
    lines = refusal(tmp_path, "data.path=no.jsonl", eval={"path": "none.txt"})
    assert lines == ["command line: data.path: no such file 'no.jsonl'", "eval.path: no such file 'none.txt'"]


def test_an_override_of_steps_or_epochs_replaces_the_other_of_the_file(tmp_path):
    hints: list[str] = []
    path = tmp_path / "recipe.yaml"
    for override, other in (("train.epochs=2", "steps"), ("train.steps=5", "epochs")):
        train = read(tmp_path, override, train={"steps": None, "epochs": None} | {other: 3}).train
        assert getattr(train, other) is None
        load_recipe(path, [override], hints.append)
    assert hints == [
        f"command line: train.epochs replaces train.steps of {path}",
        f"command line: train.steps replaces train.epochs of {path}",
    ]
    for group in ("5", "", "null", "[1]"):
        lines = refusal(tmp_path, "train.steps=3", f"train={group}")
        assert lines[0].startswith("command line: train: "), lines
    assert "give exactly one" in refusal(tmp_path, "train.epochs=2", "train.steps=5")[0]
    assert "give exactly one" in refusal(tmp_path, "train.epochs=null", train={"steps": None})[0]
    assert read(tmp_path, "train.epochs=null").train.steps == TINY["train"]["steps"]


@pytest.mark.parametrize("key", ["data", "eval"])
def test_a_list_of_paths_is_a_list_of_sources(tmp_path, key):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    a, b = f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"
    for recipe in (
        read(tmp_path, f"{key}.path=[{a},{b}]"),
        read(tmp_path, **{key: {"path": [a, {"path": b}]}}),
        read(tmp_path, **{key: {"path": [{"path": a}, {"path": b}]}}),
    ):
        assert getattr(recipe, key).path == [Source(path=a), Source(path=b)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=[3]", "data.path.0: must be a path, or a mapping such as {path: chats.jsonl, weight: 2}, found 3"),
        ("data.path=[a, {pathh: b}]", "data.path.1.pathh: unknown key; did you mean 'path'?"),
        ("data.path=[a, {path: b, weight: 2}]", "data.path: give a weight to every source or to none"),
        ("data.path=[]", "data.path: list should have at least 1 item"),
        ("eval.path=[a, 3]", "eval.path.1: must be a path, or a mapping"),
        ("eval.path=[{path: a, weight: 2}]", "eval.path: every document counts once in an evaluation; remove weight"),
        ("eval.path=[no.jsonl]", "eval.path: no such file 'no.jsonl'"),
    ],
)
def test_a_wrong_item_of_a_list_is_named(tmp_path, override, said):
    assert f"command line: {said}" in "\n".join(refusal(tmp_path, override))


@pytest.mark.parametrize("override", ["optim.lr", "optim.=1", "=1"])
def test_an_override_without_key_and_value_is_refused(tmp_path, override):
    (line,) = refusal(tmp_path, override)
    assert line.startswith(f"command line: {override!r}: overrides take the form group.key=value")


def test_overrides_are_checked_like_the_file(tmp_path):
    assert refusal(tmp_path, "batch.rows=x", "optim.weight_decy=1") == [
        "command line: batch.rows: input should be a valid integer, unable to parse string as an integer, found 'x'",
        "command line: optim.weight_decy: unknown key; did you mean 'weight_decay'?",
    ]


def test_all_mistakes_are_reported_at_once(tmp_path):
    lines = refusal(tmp_path, "lr=1", optm={}, batch={"rows": 0}, train={"epochs": 3})
    assert sorted(line.split(":")[0] for line in lines) == ["batch.rows", "command line", "optm", "train"]
    lines = refusal(tmp_path, model={"name": "./nowhere"}, data={"path": "no/such.txt"})
    assert [line.split(":")[0] for line in lines] == ["model.name", "data.path"]


@pytest.mark.parametrize(
    "key", "model.name adapter.path data.path eval.path data.chat_template run.dir run.resume save.stage".split()
)
@pytest.mark.parametrize("text", ["a" * 256, "b/" * 501, '"a\\0b"', '"\\ud800"', "~nobody-here/x"])
def test_text_that_cannot_be_a_path_is_refused(tmp_path, key, text):
    (line,) = refusal(tmp_path, f"{key}={text}")
    assert line.startswith(f"command line: {key}: is not a path: ") and len(line) < 200


def test_a_home_folder_is_found_and_a_date_is_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = read(tmp_path, "run.dir=~/runs", "run.name=2026-11-22")
    assert (given.run.dir, given.run.name) == (f"{tmp_path}/runs", "2026-11-22")
    assert read(tmp_path, "run.name=2026-13-45").run.name == "2026-13-45"
    (line,) = refusal(tmp_path, "data.path=" + "[" * 900)  # nested too deeply for a YAML list
    assert line.startswith("command line: data.path: ")


def test_data_in_a_pipe_or_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl", "p*.jsonl"):
        (line,) = refusal(tmp_path, data={"path": str(tmp_path / name)})
        assert "is not a regular file; give a file or a folder" in line


def test_a_rehearsal_needs_its_data_but_not_its_model(tmp_path):
    absent = {"model": {"name": "./nowhere"}, "run": {"rehearse": True}}
    assert read(tmp_path, **absent).run.rehearse
    assert refusal(tmp_path, data={"path": "no/such.txt"}, **absent) == ["data.path: no such file 'no/such.txt'"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  name: a\n  init: random\n  name: b\n", "recipe.yaml:4: duplicate key 'name'; keep one"),
        ("model: {}\ndata: {}\nmodel: {}\n", "recipe.yaml:3: duplicate key 'model'; keep one"),
        ("- model\n", "recipe.yaml: must be a mapping of groups, such as `model:`, found list"),
        ("", "recipe.yaml: must be a mapping of groups, such as `model:`, found NoneType"),
        ("model: [1\n", "recipe.yaml: invalid YAML: "),
        ("model:\n\tname: a\n", "recipe.yaml: invalid YAML: "),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused_in_one_line(tmp_path, text, expected):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_recipe_names_the_nearest_file(tmp_path):
    read(tmp_path)
    with pytest.raises(UserError, match=r"recipes.yaml: no such file; did you mean 'recipe.yaml'\?"):
        load_recipe(tmp_path / "recipes.yaml")


def test_the_default_recipe_shows_every_key_and_its_default():
    assert {f"{group}.{key}" for group, keys in TINY.items() for key in keys} == set(recipe_keys())
    shown = load_recipe(ROOT / "recipes" / "tiny.yaml").model_dump()
    needed = {"model": {"name": "org/model"}, "data": {"path": "org/data"}, "batch": {"rows": 1, "row_tokens": 8},
              "optim": {"lr": 1}, "train": {"steps": 1}}  # fmt: skip
    default = Recipe.model_validate(needed).model_dump()
    differing = {
        key for key in recipe_keys() for group, name in [key.split(".")] if shown[group][name] != default[group][name]
    }
    assert differing <= CHOSEN


def test_every_key_has_a_description():
    for group, field in Recipe.model_fields.items():
        for key, of_group in field.annotation.model_fields.items():
            assert of_group.description and of_group.description.endswith("."), f"{group}.{key}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr": 1}, "lr: unknown key; did you mean 'optim.lr'?"),
        ({"optim": {"steps": 5}}, "optim.steps: unknown key; did you mean 'train.steps'?"),
        ({"optim": {"r": 5}}, "optim.r: unknown key; did you mean 'adapter.r'?"),
        ({"optim": {"betas": [1.5, 0.9]}}, "optim.betas.0: input should be less than 1"),
        ({"optim": {"lr": float("inf")}}, "optim.lr: input should be a finite number"),
        ({"batch": {"rows": True}}, "batch.rows: must be an integer"),
    ],
)
def test_an_exact_key_beats_a_near_one_and_odd_numbers_are_refused(tmp_path, changes, expected):
    with pytest.raises(UserError) as refusal:
        load_changed(tmp_path, changes)
    assert expected in str(refusal.value)


def load_changed(tmp_path, changes):
    content = {group: {**keys, **changes.get(group, {})} for group, keys in TINY.items()}
    content |= {key: value for key, value in changes.items() if key not in TINY}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    return load_recipe(tmp_path / "r.yaml")
