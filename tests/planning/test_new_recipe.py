"""Choose a recipe's keys for a model, and write them as YAML."""

import json

import pytest
import ruamel.yaml
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gearbox import ROOT
from gearbox.config.loader import DatesAsText, load_recipe
from gearbox.errors import UserError
from gearbox.planning import new_recipe
from gearbox.planning.architecture import Architecture
from gearbox.planning.gpus import Gpu
from gearbox.planning.new_recipe import ModelFacts, Sizes, parse_gpus
from gearbox.planning.strategy import METHODS, Machines
from gearbox.reporting import model_facts, recipe_draft, recipe_text
from support.corpora import jsonl

LIKE = load_recipe(ROOT / "recipes/fsdp_2gpu.yaml")
QWEN = Sizes(7_615_616_512, 6_525_288_448, 0, 2_523_136)
MIXTURE = Sizes(46_702_792_704, 1_400_000_000, 45_000_000_000, 700_000)


def facts_of(sizes: Sizes = QWEN, **more) -> ModelFacts:
    return ModelFacts(
        **{"name": "org/model", "config": {}, "sizes": sizes, "positions": 4096, "template": "own"} | more
    )


@pytest.mark.parametrize(
    ("text", "count", "memory"),
    [("2x80GB", 2, 80), ("1x24GB", 1, 24), ("2 x 80 GB", 2, 80), ("4XA100-40gb", 4, 40), ("8xH100-80GB", 8, 80)],
)
def test_gpus_are_a_count_and_a_kind(text, count, memory):
    gpus = parse_gpus(text)
    assert (gpus.total, round(gpus.gpu.memory / 2**30)) == (count, memory)


@pytest.mark.parametrize("text", ["", "0x80GB", "3x", "80GB", "-1x24GB", "2x0GB", "99999x80GB", "1x24GB;ls", "2x", "x"])
def test_other_texts_are_no_gpus(text):
    with pytest.raises(UserError, match=r"^--gpus: .*(; write a count and a kind|; give )"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("sizes", "gpus", "method", "expected"),
    [
        (QWEN, "1x24GB", None, ("qlora", "single")),
        (QWEN, "1x48GB", None, ("lora", "single")),
        (QWEN, "8x80GB", None, ("full", "fsdp")),
        (QWEN, "8x80GB", "lora", ("lora", "ddp")),
        (QWEN, "2x24GB", "dora", ("dora", "fsdp")),
        (MIXTURE, "8x80GB", None, ("lora", "fsdp")),
        (Sizes(135_000_000, 106_000_000, 0, 700_000), "4x24GB", None, ("full", "ddp")),
    ],
)
def test_the_first_method_that_fits_is_chosen(sizes, gpus, method, expected):
    choice = new_recipe.choose(facts_of(sizes), LIKE, parse_gpus(gpus), method, METHODS)
    assert (choice.method, choice.gear) == expected
    assert sum(size for size, _ in choice.memory) <= choice.gpus.gpu.memory / 2
    assert new_recipe.nearest_recipe(*expected).is_file()


@pytest.mark.parametrize(
    ("model", "gpus", "method", "expected"),
    [
        ("Qwen--Qwen2.5-7B-Instruct", "1x24GB", None, ("lora", "single", 2048, "full")),
        ("Qwen--Qwen2.5-7B-Instruct", "1x24GB", "full", None),
        ("Qwen--Qwen2.5-7B-Instruct", "2x80GB", None, ("full", "fsdp", 2048, "none")),
        ("meta-llama--Llama-3.3-70B-Instruct", "2x80GB", None, ("qlora", "ddp", 2048, "none")),
        ("meta-llama--Llama-3.3-70B-Instruct", "16xH100", None, ("lora", "fsdp", 2048, "none")),
        ("Qwen--Qwen2.5-32B-Instruct", "1x24GB", None, ("qlora", "single", 1024, "full")),
        ("mistralai--Mixtral-8x7B-Instruct-v0.1", "8xH100", None, ("lora", "fsdp", 2048, "full")),
    ],
)
def test_the_plan_decides_where_the_family_has_a_closed_form(model, gpus, method, expected):
    config = json.loads((ROOT / f"recipes/architectures/{model}.json").read_text())
    shape, machines = Architecture.of(config), parse_gpus(gpus)
    in_experts = shape.num_weights if shape.experts else 0
    facts = facts_of(Sizes(shape.num_weights, shape.num_weights, in_experts, 10**6), config=config)
    if expected is None:
        with pytest.raises(UserError, match=r"even with short rows; give more or larger GPUs than one 24 GB GPU$"):
            new_recipe.choose(facts, LIKE, machines, method, METHODS)
        return
    choice = new_recipe.choose(facts, LIKE, machines, method, METHODS)
    assert (choice.method, choice.gear, choice.row_tokens, choice.checkpointing) == expected
    assert sum(size for size, _ in choice.memory) <= 0.9 * machines.gpu.memory
    assert "closed form" not in choice.note


def test_a_config_whose_closed_form_counts_other_weights_is_not_planned_by_it():
    config = json.loads((ROOT / "recipes/architectures/Qwen--Qwen2.5-7B-Instruct.json").read_text())
    facts = facts_of(Sizes(9 * 10**9, 1, 0, 1), config=config)
    choice = new_recipe.choose(facts, LIKE, parse_gpus("8x80GB"), None, METHODS)
    assert "closed form" in choice.note


@pytest.mark.parametrize(
    ("facts", "gpus", "method", "problem"),
    [
        (facts_of(), "1x8GB", None, "--gpus: QLoRA of 'org/model' needs 6.* GB"),
        (facts_of(), "2x80GB", "full", "--gpus: Full fine-tuning of 'org/model' needs 60.9 GB"),
        (facts_of(MIXTURE), "1x24GB", "qlora", "--method: qlora quantizes linear layers, but most weights"),
        (facts_of(added=("<|im_end|>",)), "1x80GB", "dora", "--method: dora cannot add the tokens"),
        (facts_of(adapter="a", adapter_method="dora"), "1x80GB", "lora", "--method: is lora, but a is an adapter"),
    ],
)
def test_what_does_not_fit_is_refused(facts, gpus, method, problem):
    with pytest.raises(UserError, match=problem):
        new_recipe.choose(facts, LIKE, parse_gpus(gpus), method, METHODS)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("data", [None, "chats.jsonl"])
@pytest.mark.parametrize("like", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_difference_has_its_reason(like, method, data):
    recipe = load_recipe(like, ["run.rehearse=true"])
    facts = facts_of()
    choice = new_recipe.choose(facts, recipe, parse_gpus("8x80GB"), method, ())
    draft = recipe_draft.compose(facts, choice, recipe, data, is_named=True)
    written = yaml.load(recipe_text.render(draft.content, ["head"], ROOT / "recipes/mine.yaml"), DatesAsText)
    made = type(recipe).model_validate(written)
    changed = {
        f"{group}.{key}"
        for group in type(recipe).model_fields
        for key, value in getattr(made, group).model_dump().items()
        if value != getattr(recipe, group).model_dump()[key]
    }
    assert changed == set(draft.changes) and all(change.reason for change in draft.changes.values())
    assert made.schedule == recipe.schedule and made.train == recipe.train and made.method == method
    for group, keys in written.items():
        for key, value in keys.items():
            assert value != recipe_draft._default_of(f"{group}.{key}"), f"{group}.{key} has its default"


def test_keys_of_the_other_model_are_left_out():
    recipe = load_recipe(
        ROOT / "recipes/ddp_4gpu.yaml",
        [
            "model.revision=main", "model.trust_remote_code=true", "model.router_loss=0.1", "adapter.targets=[q_proj]",
            "perf.ddp_compression=bf16", "run.name=other", f"data.chat_template={recipe_draft.CHATML}",
        ],
    )  # fmt: skip
    facts = facts_of()
    choice = new_recipe.choose(facts, recipe, parse_gpus("1x80GB"), "lora", ())
    content = recipe_draft.compose(facts, choice, recipe, None, is_named=True).content
    assert (content["model"], content["adapter"]) == ({"name": "org/model"}, {"method": "lora"})
    assert content["perf"] == {"checkpointing": "full"} and not content.get("run")
    assert content["data"] == {"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft[:20000]"}


def test_data_with_judged_answers_get_an_objective(tmp_path):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    records = {
        "sft": {"prompt": "a", "completion": "b"},
        "dpo": pair,
        "kto": {**pair, "label": True, "completion": "b"},
    }
    del records["kto"]["chosen"], records["kto"]["rejected"]
    recipe = load_recipe(ROOT / "recipes/ddp_4gpu.yaml")
    for objective, record in records.items():
        data = recipe.data.model_copy(update={"path": str(jsonl(tmp_path / f"{objective}.jsonl", [record]))})
        assert model_facts.objective_for(data, recipe) == objective
    draft = recipe_draft.Draft({"optim": {"lr": 2e-4}})
    recipe_draft.set_objective(draft, "sft", "lora")
    assert not draft.changes
    recipe_draft.set_objective(draft, "dpo", "lora")
    assert draft.content == {"optim": {"lr": 5e-6}, "train": {"objective": "dpo"}}


@pytest.mark.parametrize(
    ("num_rows", "gpus", "rows"), [(2, 1, 1), (2, 4, 4), (100, 2, 8), (10_000, 8, 64), (None, 2, 64)]
)
def test_few_data_get_small_steps(num_rows, gpus, rows):
    draft = recipe_draft.Draft({"batch": {"rows": 64, "row_tokens": 2048}})
    recipe_draft.set_rows(draft, num_rows, Machines(Gpu("", 0), gpus))
    assert draft.content["batch"]["rows"] == rows


HOSTILE = [
    'it\'s "a"', "a\nb", "null", "1e5", "0x1f", "2024-01-01", "12:30", "[x]", "{a: b}", "a: b #c", "*a", "&a", "%p",
    "漢字 😀", "x\x85y\u2028z", "\ufeff", "\x1b[31m", "-", "~", "yes", "on", "1_000", "=", "<<", "", " a ", "a:",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_every_text_is_read_as_it_is(text):
    check_scalar({"name": text, "list": [text]})


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_is_read_as_it_is(text):
    check_scalar(text)


def check_scalar(value: object) -> None:
    """Read a value as our loader does, and as editors do, which use YAML 1.2."""
    line = f"model: {recipe_text.scalar(value)}\n"
    assert len(line.splitlines()) == 1
    assert yaml.load(line, DatesAsText) == {"model": value}
    assert ruamel.yaml.YAML(typ="safe", pure=True).load(line) == {"model": value}


@pytest.mark.parametrize("value", [2e-4, 1.5e-5, 1e-8, 0.02, 0.95, 1.0, 0.0, 64, True, None, [0.9, 0.95], {"a": None}])
def test_numbers_are_short_and_exact(value):
    text = recipe_text.scalar(value)
    assert type(value) is not float or not text.endswith(".0")
    assert ruamel.yaml.YAML(typ="safe", pure=True).load(text) == value and len(text) <= len(json.dumps(value))
