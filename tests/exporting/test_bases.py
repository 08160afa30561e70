"""Test that an export takes and names the base that was trained: its revision on the Hub, its license, its layers."""

import json
import shutil

import peft
import pytest
import torch
import transformers
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.exporting import comparing
from gearbox.sharding.unwrap import model_class
from support.composites import write_composite
from support.exports import export, logits_of, verify_here, write_adapter, write_model

PINNED, MAIN = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def here(monkeypatch):
    verify_here(monkeypatch)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a cache of the Hub with two revisions of me/base, which have the same shapes but other weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub/models--me--base"
    pinned = write_model("llama", folder / "snapshots" / PINNED)
    main = shutil.copytree(pinned, folder / "snapshots" / MAIN)
    weights = {name: one.flip(0) for name, one in load_file(pinned / "model.safetensors").items()}
    save_file(weights, main / "model.safetensors", {"format": "pt"})
    (pinned / "README.md").write_bytes(b"---\r\nlicense: apache-2.0\r\n---\r\n# Base\r\n")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(MAIN)
    return folder


@pytest.fixture
def adapter(hub, tmp_path):
    """Return an adapter of the pinned revision."""
    folder = write_adapter(hub / "snapshots" / PINNED, tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": "me/base", "revision": PINNED}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def far(first, second):
    return comparing.difference(first[0], second[0]).distance


def as_run(saved, run, **model):
    """Return a finished run's folder with this saved model."""
    recipe = yaml.safe_load((ROOT / "recipes/tiny.yaml").read_text())
    recipe["model"] |= model
    recipe["adapter"]["method"] = "lora" if (saved / "adapter_config.json").exists() else "none"
    shutil.copytree(saved, run / "model")
    (run / "resolved.yaml").write_text(yaml.safe_dump(recipe))
    (run / "status.json").write_text('{"outcome": "done"}')
    return run


@pytest.mark.unit
@pytest.mark.parametrize("has_recipe", [False, True])
@pytest.mark.parametrize("has_main", [False, True])
def test_an_adapter_stays_with_the_pinned_revision_of_its_base(hub, adapter, tmp_path, has_recipe, has_main):
    if not has_main:
        shutil.rmtree(hub / "refs")
    run = as_run(adapter, tmp_path / "run", name="me/base", revision=PINNED, init="pretrained")
    source = run if has_recipe else adapter
    merged = export(source, tmp_path / "merged", "--merge")
    assert far(logits_of(adapter), logits_of(merged)) < 1e-4
    assert json.loads((merged / "gearbox_export.json").read_text())["base_revision"] == PINNED
    plain = export(source, tmp_path / "plain")
    assert json.loads((plain / "adapter_config.json").read_text())["revision"] == PINNED
    card = (plain / "README.md").read_text()
    assert f"revision='{PINNED}'" in card
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "apache-2.0"


@pytest.mark.unit
def test_another_base_has_no_revision_of_the_recipe(hub, adapter, tmp_path):
    (hub.parent / "models--me--other/refs").mkdir(parents=True)
    (hub.parent / "models--me--other/refs/main").write_text(MAIN)
    shutil.copytree(hub / "snapshots" / MAIN, hub.parent / "models--me--other/snapshots" / MAIN)
    run = as_run(adapter, tmp_path / "run", name="me/base", revision=PINNED, init="pretrained")
    plain = export(run, tmp_path / "plain", "--base", "me/other")
    assert json.loads((plain / "adapter_config.json").read_text())["revision"] is None
    merged = export(run, tmp_path / "merged", "--merge", "--base", "me/other")
    assert far(logits_of(plain), logits_of(merged)) < 1e-4


@pytest.mark.unit
def test_the_card_of_a_random_model_names_no_other_base(tmp_path):
    base = write_model("llama", tmp_path / "base")
    run = as_run(base, tmp_path / "run", name="me/base", revision=PINNED, init="random")
    folder = export(run, tmp_path / "x")
    card, record = (folder / "README.md").read_text(), json.loads((folder / "gearbox_export.json").read_text())
    assert "base_model" not in card and "from `me/base`" not in card
    assert (record["base"], record["base_revision"]) == (str(run / "base"), None)
    run = as_run(base, tmp_path / "run2", name=str(base), init="pretrained")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    card = (export(run, tmp_path / "y") / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "mit"


@pytest.mark.unit
def test_an_adapter_of_layers_that_are_not_loaded_is_refused(tmp_path):
    """PEFT leaves out the adapters of a tower without a word, since the text is loaded alone."""
    base = write_composite("Gemma3", tmp_path / "base")
    config = transformers.AutoConfig.from_pretrained(base)
    model = peft.get_peft_model(
        model_class(config).from_pretrained(base, dtype="auto"),
        peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]),
    )
    model.save_pretrained(tmp_path / "adapter")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"vision_tower\S+: is of a layer that is not loaded here, one of 8 such"):
        export(tmp_path / "adapter", tmp_path / "x", "--merge")


@pytest.mark.unit
@pytest.mark.parametrize("dtype", ["bf16", None])
def test_an_adapter_is_rounded_and_says_so(tmp_path, dtype):
    base = write_model("llama", tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    if dtype is None:  # it keeps its own
        save_file({name: one.bfloat16() for name, one in load_file(weights).items()}, weights, {"format": "pt"})
    folder = export(adapter, tmp_path / "x", *(["--dtype", dtype] if dtype else []))
    assert {one.dtype for one in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "gearbox_export.json").read_text())["dtype"] == "bfloat16"
    assert "| dtype | bfloat16 |" in (folder / "README.md").read_text()
