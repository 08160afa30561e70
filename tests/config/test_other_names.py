"""Test that names, values and spellings from other trainers are answered with the recipe's own, in one line each."""

import re

import pytest

from gearbox import ROOT
from gearbox.config import other_names
from gearbox.config.loader import load_recipe, recipe_keys
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.launch.cli import split_arguments

TINY = ROOT / "recipes" / "tiny.yaml"
NAMES = [*(" ".join(other_names.KEYS.values())).split(), *(" ".join(other_names.ADVICE.values())).split()]
KEY = re.compile(rf"\b(?:{'|'.join(Recipe.model_fields)})\.\w+")


def refusal(*overrides: str, path=TINY) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, list(overrides))
    return str(caught.value).splitlines()


def test_every_key_of_the_tables_exists():
    known = {*recipe_keys(), *Recipe.model_fields}
    assert {*other_names.KEYS} <= known and {*other_names.VALUES} <= known
    advice = [*other_names.ADVICE, *(text for texts in other_names.VALUES.values() for text in texts)]
    assert {key for text in advice for key in KEY.findall(text)} <= known
    assert {f"{group}.{key}" for group, key in other_names.FIRST_KEYS.items()} <= known
    assert {*other_names.FIRST_KEYS} == {*Recipe.model_fields}


def test_no_name_has_two_meanings_or_is_a_key_here():
    assert sorted(NAMES) == sorted({*NAMES})
    ours = {key.partition(".")[2] for key in recipe_keys()} | {*Recipe.model_fields}
    assert ours.isdisjoint(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_from_elsewhere_is_answered_with_ours(name):
    meant = other_names.key_of(name)
    for given in (name, f"optim.{name}", name.replace("_", "-")):
        (line,) = refusal(f"{given}=1")
        assert line.startswith(f"command line: {given}: unknown key; ")
        assert f"did you mean {meant!r}?" in line if meant else re.search("; (remove it|use)", line)


@pytest.mark.parametrize(("key", "values"), other_names.VALUES.items())
def test_a_value_from_elsewhere_is_answered_with_ours(key, values):
    """No value of the table is accepted here, and each right value that the table names is."""
    for advice, given in values.items():
        for value in given.split():
            (line,) = refusal(f"{key}={value}", "model.name=org/model")
            assert line.startswith(f"command line: {key}: ") and line.endswith(f"; use {advice}"), line
        pairs = re.findall(r"(\w+\.\w+): (\w+)", advice)
        needed = ["adapter.method=lora"] * (key[0] == "m") + ["train.teacher=a"] * advice.endswith("train.teacher")
        load_recipe(TINY, [f"{name}={right}" for name, right in pairs] + needed)


SWITCHES = {
    "assistant_only_loss": ("use data.supervise: assistant", "use data.supervise: all"),
    "completion_only_loss": ("use data.supervise: assistant", "use data.supervise: all"),
    "train_on_inputs": ("use data.supervise: all", "use data.supervise: assistant"),
    "mask_history": ("use data.supervise: last", "remove it"),
    "use_dora": ("use adapter.method: dora", "remove it"),
    "disable_gradient_checkpointing": ("use perf.checkpointing: none", "use perf.checkpointing: full"),
    "enable_activation_offloading": ("use perf.checkpointing: offload", "remove it"),
    "load_in_4bit": ("use model.quantize: nf4", "remove it"),
    "reference_free": ("use train.objective: simpo, or orpo, which have no reference", "remove it"),
    "quantize_base": ("use model.quantize: nf4", "remove it"),
}


@pytest.mark.parametrize(("name", "said"), SWITCHES.items())
def test_a_switch_from_elsewhere_is_answered_with_what_it_means(name, said):
    """An option of another trainer that is off is never turned on, and our key does not have its value."""
    for value, advice in zip(("true", "false", "null"), (*said, "remove it"), strict=True):
        assert refusal(f"{name}={value}") == [f"command line: {name}: unknown key; {advice}"]
    for key in ("data.supervise", "adapter.method"):
        (line,) = refusal(f"{key}=true")
        assert "; use" not in line


def test_a_single_value_for_a_group_names_its_key(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: org/model\noptim: adamw_bnb_8bit\nadapter: qlora\ntrain: {learning_rate: 1e-5, steps: 2}\n")
    assert refusal(path=path) == [
        f"{path}: model: is a group of keys, found 'org/model'; use model.name: org/model",
        f"{path}: adapter: is a group of keys, found 'qlora'; use adapter.method: lora, with model.quantize: nf4",
        f"{path}: data: is required",
        f"{path}: batch: is required",
        f"{path}: optim: is a group of keys, found 'adamw_bnb_8bit'; use optim.name: adamw_8bit",
        f"{path}: train.learning_rate: unknown key; did you mean 'optim.lr'?",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim.lr=1e-5", "--optim.lr=1e-5: write optim.lr=1e-5, without dashes"),
        ("--optim.lr 1e-5", "--optim.lr: write optim.lr=1e-5, without dashes"),
        ("-learning-rate 1e-5", "-learning-rate: write optim.lr=1e-5, without dashes"),
        ("recipes/tiny.yaml optim.lr 1e-5", "optim.lr: write optim.lr=1e-5, as one word"),
        ("recipes/tiny.yaml optim.lr = 1e-5", "optim.lr: write optim.lr=1e-5, as one word"),
        ("optim.lr =1e-5 train.steps=3", "optim.lr: write optim.lr=1e-5, as one word"),
        ("optim.lr= 1e-5", "optim.lr=: write optim.lr=1e-5, as one word"),
        ("learning_rate 1e-5", "learning_rate: write optim.lr=1e-5, as one word"),
        ("optim.lr", "optim.lr: write optim.lr=VALUE, as one word"),
        ("--dataset recipes/tiny.yaml", "--dataset: write data.path=VALUE, without dashes"),
        ("--lrr=3", "--lrr=3: expected [RECIPE] [key.sub=value ...], such as optim.lr=1e-5"),
        ("a.yaml b.yaml", "a.yaml b.yaml: expected [RECIPE] [key.sub=value ...], such as optim.lr=1e-5"),
    ],
)
def test_an_override_with_dashes_or_spaces_is_answered_with_the_right_one(words, said):
    with pytest.raises(UserError) as caught:
        split_arguments(words.split(" "))
    assert str(caught.value) == said


@pytest.mark.parametrize("words", ["optim.lr=", "data.path=a=b x.yaml", "x.yaml optim.lr= data.path=a"])
def test_other_arguments_are_left_to_the_recipe(words):
    assert len(split_arguments(words.split())[1]) == words.count("=") - words.count("=b")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=2e-5,", "found '2e-5,'; remove the comma"),
        ("data.path=a.jsonl,b.jsonl", "no such file 'a.jsonl,b.jsonl'; write a list as data.path='[a.jsonl, b.jsonl]'"),
        ("data.path=org/one,org/two", "write a list as data.path='[org/one, org/two]'"),
        ("optim={lr: 1}", "overrides take the form group.key=value"),
        ("adapter.targets=q_proj,v_proj", "adapter.targets: is 'q_proj,v_proj'; write a list: [q_proj, v_proj]"),
        ("adapter.targets=all", "adapter.targets: is 'all'; use all-linear"),
    ],
)
def test_a_value_with_a_comma_is_explained(override, said):
    assert said in refusal(override)[0]


def test_spaces_around_a_value_do_not_matter():
    assert load_recipe(TINY, ["optim.lr= 1e-5 ", "schedule.name=linear "]).optim.lr == 1e-5
