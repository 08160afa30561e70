"""Train two steps of each shipped recipe with run.rehearse: a small random model of the same architecture."""

import json
import re

import jsonschema
import pytest
import ruamel.yaml
import torch
import transformers
import yaml

import schema
from gearbox import ROOT
from gearbox.config.job import rehearsed
from gearbox.config.loader import load_recipe, recipe_keys
from gearbox.config.recipe import BUILTIN_FORMS, BUILTIN_PREFERENCES, BUILTIN_TASKS, Recipe
from gearbox.data import builtin_tasks
from gearbox.errors import UserError
from gearbox.launch.cli import split_arguments

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
GEARS = {
    "ddp_4gpu": "ddp",
    "ddp_4gpu_full": "ddp",
    "dpo_1gpu": "single",
    "dpo_4gpu": "ddp",
    "fsdp_2gpu": "fsdp",
    "qlora_1gpu": "single",
    "smollm2_135m": "single",
    "tiny": "single",
    "tiny_dpo": "single",
    "zero3_2gpu": "zero3",
}


def test_every_recipe_is_tested():
    assert {path.stem for path in RECIPES} == set(GEARS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_two_steps(train, path):
    recipe = f"recipes/{path.name}"
    gear = GEARS[path.stem]
    if path.stem == "smollm2_135m" and not (ROOT / "models/smollm2-135m").exists():
        with pytest.raises(UserError, match="make smollm2"):
            load_recipe(path)
        architecture = ["model.name=recipes/tiny"]  # the same family: Llama with tied embeddings
    else:
        architecture = []
    if "dpo" in path.stem:
        architecture += ["data.path=builtin:preferences"]
    ranks = {"single": 1, "ddp": 4}.get(gear, 2)
    outcome = train(
        gear, "train.steps=2", "batch.micro_rows=2", *architecture, recipe=recipe, ranks=ranks, load_back=True
    )
    assert set(outcome.codes) == {0}, outcome.output
    assert len(outcome.losses) == 2
    config = yaml.safe_load((outcome.folder / "resolved.yaml").read_text())
    asked = yaml.safe_load(path.read_text())
    assert config["adapter"]["method"] == asked.get("adapter", {}).get("method", "none")
    assert config["model"]["quantize"] == asked["model"].get("quantize")
    adapter = (outcome.folder / "model" / "adapter_config.json").exists()
    assert adapter == (config["adapter"]["method"] == "lora")
    assert "reloaded in a fresh process" in outcome.output


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem != "tiny"], ids=lambda path: path.stem)
def test_short_and_its_memory_adds_up(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 30
    parts = [float(found[1]) for line in lines if (found := re.match(r"#\s+([\d.]+) GB  (?!in all)", line))]
    totals = [float(found[1]) for line in lines if (found := re.match(r"#\s+([\d.]+) GB  in all", line))]
    if parts:
        assert totals == [pytest.approx(sum(parts), abs=0.11)]
    else:
        assert path.stem in ("smollm2_135m", "tiny_dpo")


def test_fsdp_and_zero3_are_the_same_numbers():
    assert load("fsdp_2gpu") == load("zero3_2gpu")


def load(name: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml")


def test_a_rehearsal_asks_no_hub():
    recipe = rehearsed(load("qlora_1gpu"))
    assert (recipe.model.init, recipe.data.path) == ("random", BUILTIN_TASKS)
    assert rehearsed(load("dpo_1gpu")).data.path == BUILTIN_PREFERENCES


def test_a_model_that_another_run_makes_is_named_with_its_command(tmp_path, monkeypatch):
    """Say what to run first, with a command that makes that folder. A rehearsal needs no such run."""
    path = ROOT / "recipes" / "tiny_dpo.yaml"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"model\.name: no such folder 'runs/tiny-forms/model'; first run `") as caught:
        load_recipe(path)
    (command,) = re.findall(r"`python src/launch\.py single (.*)`", str(caught.value))
    assert f"launch.py single {command}" in path.read_text()
    monkeypatch.chdir(ROOT)
    made, overrides = split_arguments(command.split())
    base = load_recipe(made, overrides)
    assert f"{base.run.dir}/{base.run.name}/model" == "runs/tiny-forms/model"
    assert base.data.path == BUILTIN_FORMS
    monkeypatch.chdir(tmp_path)
    assert rehearsed(load_recipe(path, ["run.rehearse=true"])).model.name == "recipes/tiny"


def test_both_answers_of_a_built_in_pair_are_right_in_one_form_each():
    """The base of tiny_dpo sees both forms equally often, and few of its questions are asked again."""
    answers = [chat["messages"][1]["content"] for chat in builtin_tasks.forms(2000)]
    assert 0.45 < sum(map(str.isupper, answers)) / len(answers) < 0.55
    pairs = builtin_tasks.preferences()
    for pair in pairs:
        task, letters = pair["prompt"].split()
        assert (pair["chosen"].lower(), pair["rejected"]) == (pair["rejected"], builtin_tasks.TASKS[task](letters))
        assert pair["chosen"].isupper()
    asked = {chat["messages"][0]["content"] for chat in builtin_tasks.forms()}
    assert sum(pair["prompt"] in asked for pair in pairs) < len(pairs) / 2


def test_rehearsal_of_an_unknown_architecture_names_the_missing_file(train):
    outcome = train("single", "model.name=nobody/knows-this")
    assert outcome.codes == [2]
    assert "recipes/architectures/nobody--knows-this.json" in outcome.output
    assert outcome.folder is None, "a run that did not start left a folder"


def test_the_schema_and_the_reference_are_current():
    assert schema.SCHEMA.read_text() == schema.schema(), "run `make schema`"
    assert schema.REFERENCE.read_text() == schema.reference(), "run `make schema`"
    assert schema.GEAR_REFERENCE.read_text() == schema.gear_reference(), "run `make schema`"


def test_the_reference_names_every_key():
    rows = re.findall(r"^## (\w+)$|^\| `(\w+)` \| .+ \| .+ \| .{8,} \|$", schema.reference(), re.M)
    group, named = "", []
    for heading, key in rows:
        group = heading or group
        named += [f"{group}.{key}"] if key else []
    assert [key for key in named if not key.startswith("source.")] == recipe_keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_an_editor_finds_the_schema_and_checks_with_it(recipe):
    """The first line names the schema relative to the recipe, as yaml-language-server reads it."""
    modeline = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", recipe.read_text().splitlines()[0])
    assert modeline, f"{recipe.name} lacks the modeline"
    validator = jsonschema.Draft202012Validator(json.loads((recipe.parent / modeline[1]).read_text()))
    written = ruamel.yaml.YAML(typ="safe").load(recipe)  # YAML 1.2, as editors read it: 2e-3 is a number
    assert [error.message for error in validator.iter_errors(written)] == []
    assert not validator.is_valid({**written, "modle": {}})
    for wrong in ("many", 0, 1.5):
        assert not validator.is_valid({**written, "train": {"steps": wrong}}), wrong
    assert not validator.is_valid({**written, "optim": {"lr": 1e-3, "betas": [0.9, 1.5]}})


def test_the_tokenizer_of_tiny_is_current(tmp_path):
    builtin_tasks.write_tokenizer(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_text() == (ROOT / "recipes/tiny" / file.name).read_text(), file.name


def test_tiny_has_one_to_five_million_weights():
    config = transformers.AutoConfig.from_pretrained(ROOT / "recipes/tiny")
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(config)
    assert 1e6 <= sum(p.numel() for p in made.parameters()) <= 5e6
