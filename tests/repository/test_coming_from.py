"""The pages for users of other trainers name real keys and true defaults, and their recipes load.

Their configs, given to the loader, are answered with a name of ours for each key.
"""

import re

import pytest
import yaml

from gearbox import ROOT
from gearbox.config import other_names
from gearbox.config.loader import keys_meant, load_recipe, recipe_keys
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError

FOLDER = ROOT / "docs" / "coming-from"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
TRAINERS = [name for name in PAGES if name not in ("README", "accelerate")]
NAME = re.compile(r"`([a-z]\w+)`")
PAIR = re.compile(r"`(\w+\.\w+): ([^`]+)`")


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table below a heading."""
    section = PAGES[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def blocks(page: str) -> list[str]:
    """Return the recipes of a page."""
    return re.findall(r"```yaml\n(.*?)```", PAGES[page], re.S)


def test_each_trainer_has_a_page_in_the_index():
    assert {f"({name}.md)" for name in PAGES} - {"(README.md)"} <= set(re.findall(r"\([\w-]+\.md\)", PAGES["README"]))
    assert len(PAGES) == 7


@pytest.mark.parametrize("page", TRAINERS)
def test_the_table_of_keys_agrees_with_the_loader(page):
    """A name of theirs is one that the loader answers, and with the key that its row gives."""
    rows, num_names = table(page, "Keys"), 0
    for theirs, ours in rows:
        for name in NAME.findall(theirs):
            num_names += 1
            meant, advice = keys_meant(name), other_names.advice_on_key(name)
            assert meant or advice, f"{page}: {name} is unknown to other_names.py"
            keys = re.findall(r"`(\w+\.\w+)`", ours)
            named = {one if "." in one else f"{one}.{other_names.FIRST_KEYS[one]}" for one in meant}
            assert not keys or not meant or named & {*keys}, f"{page}: the loader answers {name} with {meant}"
    assert num_names >= 10


@pytest.mark.parametrize("page", PAGES)
def test_each_key_of_ours_exists(page):
    """Cover keys outside tables too, such as those in the text."""
    groups = "|".join(Recipe.model_fields)
    named = set(re.findall(rf"`((?:{groups})\.(?!md|py)\w+)", PAGES[page]))
    assert named <= {*recipe_keys()}
    assert named or page == "README"


@pytest.mark.parametrize("page", TRAINERS)
def test_the_defaults_are_those_of_the_schema_and_the_advice_is_accepted(page):
    rows, num_pairs = table(page, "What differs in the result"), 0
    for _, _, here, change in rows:
        for key, value in PAIR.findall(here):
            num_pairs += 1
            group, name = key.split(".")
            default = Recipe.model_fields[group].annotation.model_fields[name].default
            given = yaml.safe_load(value)
            assert (tuple(given) if isinstance(given, list) else given) == default, f"{page}: {key}"
        for key, value in PAIR.findall(change):
            extra = ["adapter.method=lora"] if key.startswith(("adapter.", "model.")) else []
            load_recipe(ROOT / "recipes/tiny.yaml", [*extra, f"{key}={value}"])
    assert num_pairs >= 3


@pytest.mark.parametrize("page", TRAINERS)
def test_the_recipe_of_a_page_loads_and_says_what_the_page_says(page, tmp_path):
    (text,) = blocks(page)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    recipe = load_recipe(path)
    architecture = recipe.model.name.replace("/", "--") + ".json"
    assert (ROOT / "recipes/architectures" / architecture).is_file(), "a rehearsal needs no network"
    assert recipe.optim.betas == (0.9, 0.999), "their default, which differs from ours"


THEIRS = {
    "trl": """
        model_name_or_path: org/model
        dataset_name: org/data
        max_length: 1024
        packing: true
        assistant_only_loss: true
        learning_rate: 2.0e-5
        dataset_test_split: test
        """,
    "axolotl": """
        base_model: org/model
        datasets: [{path: org/data, type: alpaca}]
        adapter: qlora
        micro_batch_size: 2
        liger_rms_norm: true
        tokenizer_type: AutoTokenizer
        loss_watchdog_patience: 3
        """,
    "llama-factory": """
        model_name_or_path: org/model
        finetuning_type: lora
        cutoff_len: 2048
        max_samples: 1000
        save_only_model: false
        template: qwen3
        """,
    "torchtune": """
        tokenizer: {path: tokenizer.model}
        checkpointer: {checkpoint_dir: folder}
        loss: {}
        clip_grad_norm: null
        save_adapter_weights_only: false
        """,
    "alignment-handbook": """
        torch_dtype: bfloat16
        dataset_mixture: {datasets: [{id: org/data}]}
        gradient_checkpointing_kwargs: {use_reentrant: false}
        per_device_eval_batch_size: 8
        """,
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_config_of_theirs_is_answered_key_by_key(trainer, tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text("\n".join(line.strip() for line in THEIRS[trainer].strip().splitlines()))
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    lines = str(caught.value).splitlines()
    for key in yaml.safe_load(path.read_text()):
        (line,) = [line for line in lines if line.startswith(f"{path}: {key}: ")]
        assert re.search("did you mean|; use |; remove it", line), line
