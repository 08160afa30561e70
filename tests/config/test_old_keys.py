"""Test keys that were renamed: read in recipes, overrides and manifests, and written for older code.

tests/config/test_warmup.py tests the same for schedule.warmup, with its rounding.
"""

import json

import pytest
import yaml

import schema
from gearbox import ROOT
from gearbox.config.loader import load_recipe, recipe_for_manifest, recipe_keys
from gearbox.errors import UserError
from gearbox.training import resume

TINY = ROOT / "recipes" / "tiny.yaml"
OLD, NEW = "model.gradient_checkpointing", "perf.checkpointing"
IS_NOW = f"{OLD} is now {NEW}, which takes none, selective, full or offload"


def written(tmp_path, old=None, **perf):
    """Write the tiny recipe with the old key and these keys of perf."""
    content = yaml.safe_load(TINY.read_text())
    del content["perf"]
    if old is not None:
        content["model"]["gradient_checkpointing"] = old
    if perf:
        content["perf"] = perf
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("old", "perf", "overrides", "grade", "places"),
    [
        (True, {}, [], "full", ["mine.yaml"]),
        (False, {}, [], "none", ["mine.yaml"]),
        (True, {"compile": True}, [], "full", ["mine.yaml"]),
        (None, {}, [f"{OLD}=true"], "full", ["command line"]),
        (None, {"checkpointing": "offload"}, [f"{OLD}=false"], "none", ["command line"]),
        (True, {}, [f"{OLD}=false"], "none", ["mine.yaml", "command line"]),
        (True, {}, [f"{NEW}=selective"], "selective", ["mine.yaml"]),
    ],
)
def test_the_old_key_is_read_with_a_hint(tmp_path, old, perf, overrides, grade, places):
    path, hints = written(tmp_path, old, **perf), []
    recipe = load_recipe(path, overrides, hints.append)
    assert recipe.perf.checkpointing == grade and recipe.perf.compile == bool(perf.get("compile"))
    assert hints == [f"{path if place == 'mine.yaml' else place}: {IS_NOW}" for place in places]
    assert (NEW in recipe.given) == bool(overrides)


def test_an_empty_group_takes_the_old_key(tmp_path):
    path = written(tmp_path, True)
    path.write_text(path.read_text() + "perf:\n")
    assert load_recipe(path).perf.checkpointing == "full"


def test_both_keys_or_a_wrong_value_are_refused(tmp_path):
    for path, overrides in (
        (written(tmp_path, True, checkpointing="full"), []),
        (TINY, [f"{OLD}=true", f"{NEW}=full"]),
    ):
        with pytest.raises(UserError, match=rf": {OLD}: is the old name of {NEW}, which is also set; keep one$"):
            load_recipe(path, overrides)
    for value in ("7", "[1]", "maybe"):
        with pytest.raises(UserError, match=rf"^command line: {NEW}: input should be 'none', 'selective', 'full' or"):
            load_recipe(TINY, [f"{OLD}={value}"])
    path = written(tmp_path, True)
    path.write_text(path.read_text() + "perf: [1]\n")
    with pytest.raises(UserError, match="perf: is a group of keys, found"):
        load_recipe(path)


def test_an_editor_knows_the_old_key():
    keys = json.loads(schema.SCHEMA.read_text())["$defs"]["Model"]["properties"]
    assert keys["gradient_checkpointing"] == {
        "deprecated": True, "description": "Renamed to perf.checkpointing.", "type": "boolean"
    }  # fmt: skip
    assert "gradient_checkpointing" not in schema.reference()


@pytest.mark.parametrize("grade", ["none", "full"])
def test_older_code_resumes_a_manifest_that_says_what_it_knows(grade):
    recipe = load_recipe(TINY, [f"{NEW}={grade}", "schedule.warmup=50"])
    saved = recipe_for_manifest(recipe)
    known = {key for key in recipe_keys() if not key.startswith("perf.")} - {"schedule.warmup", "schedule.decay"}
    assert {*resume._flat(saved)} == known | {"schedule.warmup_steps", OLD}
    assert saved["model"]["gradient_checkpointing"] is (grade == "full")
    assert resume.differences(saved, recipe) == []


def test_a_manifest_keeps_what_older_code_does_not_know():
    recipe = load_recipe(TINY, [f"{NEW}=offload", "perf.prefetch=3"])
    saved = recipe_for_manifest(recipe)
    assert saved["perf"] == {"checkpointing": "offload", "prefetch": 3}
    assert "gradient_checkpointing" not in saved["model"] and resume.differences(saved, recipe) == []


def test_a_resumed_run_may_change_speed_but_not_rounding():
    saved = recipe_for_manifest(load_recipe(TINY, ["perf.compile=true"]))
    before = saved | {"model": saved["model"] | {"gradient_checkpointing": True}}  # as older code wrote it
    before.pop("perf")
    faster = [
        "perf.checkpointing=offload",
        "perf.prefetch=2",
        "perf.kernels=none",
        "perf.compile=false",
        "model.attention=sdpa",
    ]
    for content in (saved, before):
        assert resume.differences(content, load_recipe(TINY, faster)) == []
        assert resume.differences(content, load_recipe(TINY, ["perf.float8=true", "perf.ddp_compression=bf16"])) == [
            "perf.ddp_compression changed from 'none' to 'bf16'",
            "perf.float8 changed from False to True",
        ]
