"""Test schedule.warmup: counts, shares, rounding, the old key schedule.warmup_steps, and old checkpoints."""

import json
import math
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

import schema
from gearbox import ROOT
from gearbox.config.job import rehearsed
from gearbox.config.loader import load_recipe, recipe_for_manifest
from gearbox.config.recipe import Recipe
from gearbox.config.recipe_values import Optim, Schedule
from gearbox.errors import UserError
from gearbox.model.optimizer import learning_rate
from gearbox.training import resume

TINY = ROOT / "recipes" / "tiny.yaml"
OLD = "schedule.warmup_steps"
IS_NOW = f"{OLD} is now schedule.warmup, which takes a step count or a share such as 5%"


@pytest.fixture
def old_recipe(tmp_path) -> Path:
    """Return the tiny recipe with the old key."""
    content = yaml.safe_load(TINY.read_text())
    content["schedule"] = {"name": "cosine", "warmup_steps": 50}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def rates(num_steps: int, warmup: int | str, name: str = "linear") -> list[float]:
    schedule = Schedule(name=name, warmup=warmup)
    return [learning_rate(step, num_steps, Optim(lr=1.0), schedule) for step in range(num_steps)]


def old_learning_rate(step: int, num_steps: int, lr: float, warmup_steps: int, name: str) -> float:
    """Return the learning rate as computed at commit 6346433."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[name]
    return lr * shape


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("0", 0), ("50", 50), ('"50"', 50), ("50.0", 50), ("5%", "5%"), ("2.5%", "2.5%"), ('"5.0%"', "5%"),
        ("05%", "5%"), ("10%", "10%"), ("99.9%", "99.9%"), ("0%", 0), ("0.0%", 0), ("0.01%", "0.01%"),
    ],
)  # fmt: skip
def test_a_count_and_a_share_are_read_in_one_form(written, read):
    found = load_recipe(TINY, [f"schedule.warmup={written}"]).schedule.warmup
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("true", "True"),
        ("null", "None"),
        ("[5]", "[5]"),
        ("-1", "-1"),
        ("0.05", "0.05; did you mean 5%?"),
        ("0.07", "0.07; did you mean 7%?"),
        ("0.025", "0.025; did you mean 2.5%?"),
        ("1.5", "1.5"),
        (".inf", "inf"),
        (".nan", "nan"),
        ("5 %", "'5 %'; did you mean 5%?"),
        ("120%", "'120%'"),
        ("100%", "'100%'"),
        ("-5%", "'-5%'"),
        ("5,5%", "'5,5%'"),
        ("5%%", "'5%%'"),
        ("some", "'some'"),
    ],
)
def test_anything_else_is_refused_in_one_line(written, found):
    with pytest.raises(UserError) as refusal:
        load_recipe(TINY, [f"schedule.warmup={written}"])
    expected = "must be a number of steps such as 50, or a share of the run below 100% such as 5%, found "
    assert str(refusal.value) == f"command line: schedule.warmup: {expected}{found}"


def test_a_count_must_be_below_the_steps_and_a_share_always_is():
    with pytest.raises(UserError) as refusal:
        load_recipe(TINY, ["schedule.warmup=50", "train.steps=10"])
    assert str(refusal.value) == (
        "command line: schedule.warmup: must be below the 10 steps of the run, found 50; give fewer steps, or a share "
        "of the run such as 5%"
    )
    for steps in (1, 2, 10):
        load_recipe(TINY, [f"train.steps={steps}"])
        load_recipe(TINY, [f"train.steps={steps}", "schedule.warmup=99.9%"])
    load_recipe(TINY, ["train.steps=null", "train.epochs=1", "schedule.warmup=5%"])


@pytest.mark.parametrize(
    ("warmup", "num_steps", "num_warmup_steps"),
    [
        ("5%", 1, 0), ("5%", 2, 1), ("5%", 10, 1), ("5%", 20, 1), ("5%", 21, 2), ("5%", 700, 35), ("50%", 10, 5),
        ("50%", 1, 0), ("99%", 2, 1), ("99.9%", 10, 9), ("7%", 100, 7), ("0.7%", 1000, 7), ("55%", 100, 55),
        ("0%", 10, 0), (7, 700, 7), (0, 1, 0),
    ],
)  # fmt: skip
def test_a_share_is_rounded_up_exactly_and_leaves_a_step(warmup, num_steps, num_warmup_steps):
    assert Schedule(warmup=warmup).num_warmup_steps(num_steps) == num_warmup_steps


def test_the_rates_of_short_runs():
    assert rates(1, "5%") == rates(1, "99%") == [1.0]
    assert rates(2, "5%") == rates(2, "99%") == [1.0, 1.0]
    assert rates(10, "5%") == pytest.approx([1.0, *(1 - i / 9 for i in range(9))])
    assert rates(10, "30%")[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    for num_steps in (1, 2, 3, 10, 700):
        for warmup in ("0.1%", "5%", "50%", "99.9%"):
            for name in ("cosine", "linear", "constant"):
                found = rates(num_steps, warmup, name)
                assert min(found) > 0 and max(found) == 1.0, (num_steps, warmup, name)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (10, 0), (10, 3), (700, 50), (20, 30)])
def test_a_count_gives_the_old_rates_bit_for_bit(name, num_steps, warmup):
    optim = Optim(lr=2e-3)
    for step in range(num_steps):
        now = learning_rate(step, num_steps, optim, Schedule(name=name, warmup=warmup))
        assert now == old_learning_rate(step, num_steps, 2e-3, warmup, name)


def test_a_share_gives_the_rates_of_its_count():
    assert rates(700, "5%", "cosine") == rates(700, 35, "cosine")


@pytest.mark.parametrize(
    ("in_file", "overrides", "warmup", "places"),
    [
        (True, [], 50, ["mine.yaml"]),
        (False, [f"{OLD}=7"], 7, ["command line"]),
        (True, [f"{OLD}=7"], 7, ["mine.yaml", "command line"]),
        (True, ["schedule.warmup=5%"], "5%", ["mine.yaml"]),
        (False, [f"{OLD}=7", f"{OLD}=8"], 8, ["command line"]),
        (False, ["schedule.warmup=7"], 7, []),
    ],
)
def test_the_old_key_is_read_with_a_hint(old_recipe, in_file, overrides, warmup, places):
    hints: list[str] = []
    recipe = load_recipe(old_recipe if in_file else TINY, overrides, hints.append)
    assert recipe.schedule.warmup == warmup
    assert hints == [f"{old_recipe if place == 'mine.yaml' else place}: {IS_NOW}" for place in places]


def test_both_keys_in_one_place_are_refused(old_recipe):
    both = old_recipe.with_name("both.yaml")
    both.write_text(old_recipe.read_text().replace("warmup_steps: 50", "warmup_steps: 50\n  warmup: 5%"))
    for path, overrides, place in ((both, [], both), (TINY, [f"{OLD}=7", "schedule.warmup=7"], "command line")):
        with pytest.raises(UserError) as refusal:
            load_recipe(path, overrides)
        assert str(refusal.value) == f"{place}: {OLD}: is the old name of schedule.warmup, which is also set; keep one"


def test_an_editor_knows_both_keys_and_underlines_what_is_refused(old_recipe):
    of_schedule = json.loads(schema.SCHEMA.read_text())["$defs"]["Schedule"]
    keys = of_schedule["properties"]
    assert keys["warmup_steps"]["deprecated"] is True and "deprecated" not in keys["warmup"]
    validator = jsonschema.Draft202012Validator(of_schedule)
    assert validator.is_valid(yaml.safe_load(old_recipe.read_text())["schedule"])
    for warmup, is_right in ((50, True), ("5%", True), ("2.5%", True), (0.05, False), (-1, False), ("120%", False)):
        assert validator.is_valid({"warmup": warmup}) == is_right, warmup


def old_manifest(recipe: Recipe, warmup_steps: int) -> dict:
    """Return a recipe as older code wrote it to a manifest and to resolved.yaml."""
    content = recipe.model_dump(mode="json") | {
        "schedule": {"name": recipe.schedule.name, "warmup_steps": warmup_steps}
    }
    content["model"]["gradient_checkpointing"] = False
    del content["perf"]
    return content


def test_old_manifests_are_resumed_and_differences_use_the_new_key():
    recipe = load_recipe(TINY, ["schedule.warmup=50"])
    saved = old_manifest(recipe, 50)
    assert resume.differences(saved, recipe) == []
    assert saved["schedule"] == {"name": "cosine", "warmup_steps": 50}, "the saved recipe was changed"
    assert resume.differences(saved, load_recipe(TINY, ["schedule.warmup=7%"])) == [
        "schedule.warmup changed from 50 to '7%'"
    ]
    assert resume.differences(saved, load_recipe(TINY, [f"{OLD}=49"])) == ["schedule.warmup changed from 50 to 49"]


def test_auto_takes_the_folder_of_an_unfinished_old_run(tmp_path):
    recipe = load_recipe(TINY, ["schedule.warmup=50"])
    (tmp_path / "status.json").write_text('{"outcome": "running"}')
    for warmup, is_same in ((50, True), (49, False)):
        (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(old_manifest(recipe, warmup), sort_keys=False))
        assert resume.is_to_continue(tmp_path, recipe, is_restart=False) == is_same


@pytest.mark.parametrize("warmup", [0, 50])
def test_older_code_resumes_manifests_with_a_count(warmup):
    recipe = load_recipe(TINY, [f"schedule.warmup={warmup}"])
    there, here = resume._flat(recipe_for_manifest(recipe)), resume._flat(old_manifest(recipe, warmup))
    assert there == here
    assert resume.differences(recipe_for_manifest(recipe), recipe) == []


def test_manifests_with_a_share_have_the_new_key():
    recipe = load_recipe(TINY, ["schedule.warmup=7%"])
    assert recipe_for_manifest(recipe)["schedule"] == {"name": "cosine", "warmup": "7%"}
    assert resume.differences(recipe_for_manifest(recipe), recipe) == []
    assert resume.differences(recipe_for_manifest(recipe), load_recipe(TINY, ["schedule.warmup=50"])) == [
        "schedule.warmup changed from '7%' to 50"
    ]


def test_a_run_hints_once_and_resumes_what_older_code_wrote(train, old_recipe, monkeypatch):
    """Two ranks print the hint once, and a restart by src/launch.py does not repeat it."""
    given = ("save.every=1", "train.steps=2", "run.name=x", "schedule.name=constant")
    first = train("ddp", *given, recipe=str(old_recipe), ranks=2)
    assert set(first.codes) == {0}, first.output
    assert first.output.count("hint: ") == first.output.count(f"hint: {old_recipe}: {IS_NOW}") == 1
    (manifest, *_) = sorted(first.folder.glob("checkpoints/*/manifest.json"))
    assert '"warmup_steps": 1' in manifest.read_text() and '"warmup": ' not in manifest.read_text()
    resolved = first.folder / "resolved.yaml"
    assert yaml.safe_load(resolved.read_text())["schedule"] == {"name": "constant", "warmup": 1, "decay": "20%"}

    resolved.write_text(resolved.read_text().replace("warmup: 1", "warmup_steps: 1"))
    monkeypatch.setenv("GEARBOX_RUN", str(first.folder))
    more = train("ddp", *given, "train.steps=3", recipe=str(old_recipe), ranks=2)
    assert set(more.codes) == {0}, more.output
    assert "step-2 at step 2 of 3" in more.output and "hint: " not in more.output
    refused = train("ddp", *given, "train.steps=3", "schedule.warmup=7%", recipe=str(old_recipe), ranks=2)
    assert "was made by another recipe: schedule.warmup changed from 1 to '7%'" in refused.output
    assert set(refused.codes) == {2}


@pytest.mark.parametrize(
    "given",
    [
        ("train.steps=10", "schedule.warmup=6", "schedule.decay=5"),
        ("train.steps=10", "schedule.warmup=9"),  # with the decay's default
        ("train.steps=10", "schedule.warmup=60%", "schedule.decay=5"),
        ("train.epochs=1", "train.steps=null", "schedule.warmup=60%", "schedule.decay=50%"),
    ],
)
def test_a_warmup_and_a_decay_that_overlap_are_refused(given):
    with pytest.raises(UserError) as caught:
        load_recipe(TINY, ["schedule.name=wsd", *given])
    (line,) = str(caught.value).splitlines()
    assert re.search("schedule.decay: .* is more than what schedule.warmup .* leaves of the run", line)
    load_recipe(TINY, ["schedule.name=linear", *[one for one in given if "decay" not in one]])
    load_recipe(TINY, ["schedule.name=wsd", "run.rehearse=true", *given])


def test_a_rehearsal_has_a_short_decay():
    recipe = load_recipe(TINY, ["schedule.name=wsd", "schedule.warmup=100", "schedule.decay=300"])
    schedule = rehearsed(recipe, 1).schedule
    assert (schedule.warmup, schedule.decay) == (5, 5)
    kept = ["schedule.name=wsd", "schedule.warmup=5%", "schedule.decay=30%"]
    assert rehearsed(load_recipe(TINY, kept), 1).schedule.decay == "30%"


def test_a_checkpoint_from_before_the_decay_is_resumed():
    """It lacks the key, which has no effect on its schedule."""
    recipe = load_recipe(TINY, ["schedule.name=linear"])
    saved = recipe_for_manifest(recipe)
    assert "decay" not in saved["schedule"] and resume.differences(saved, recipe) == []
    falling = load_recipe(TINY, ["schedule.name=wsd"])
    assert recipe_for_manifest(falling)["schedule"]["decay"] == "20%"
    assert resume.differences(recipe_for_manifest(falling), falling) == []
    other = load_recipe(TINY, ["schedule.name=wsd", "schedule.decay=30%"])
    (line,) = resume.differences(recipe_for_manifest(falling), other)
    assert line == "schedule.decay changed from '20%' to '30%'"


@pytest.mark.parametrize("given", [("schedule.warmup=6000",), ("schedule.name=wsd", "schedule.decay=6000")])
def test_counts_above_the_steps_of_the_epochs_are_refused(train, given):
    outcome = train("single", "run.rehearse=false", "train.steps=null", "train.epochs=1", *given)
    key = given[-1].partition("=")[0]
    assert set(outcome.codes) == {2} and f"command line: {key}: " in outcome.output, outcome.output
