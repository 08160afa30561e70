"""Test that a model or an adapter that anyone may have written is refused in one line: no code, no prompt, no hang."""

import ast
import builtins
import json
import os
import shutil
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ask
from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.model import adapters, export, loading
from gearbox.model.pretrained import Pretrained
from gearbox.sharding.full_parameters import FullParameters
from support.methods import short, two_models
from support.world import SingleProcess

ODD = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", "odd.Odd"]}}
CODE = "import os\nos.mkdir({mark!r})\nfrom transformers import PreTrainedTokenizerFast\n"
NO_LOADERS = {"GenerationConfig", "PeftModel"}  # neither can run code of a folder
VALUES = (None, -1, 10**30, 1e308, "../x", [], {}, [None])
RAW = (b"", b"null", b"[1]", b'{"a":', b'{"a":"\xff"}', b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a model, the same model in several files, and an adapter of it with an added token."""
    folder = tmp_path_factory.mktemp("saved")
    model = two_models(folder) / "tied"
    recipe = recipe_of(model, "adapter.method=lora", "model.add_tokens=[ab]", "adapter.targets=[q_proj]")
    tokenizer = loading.load_tokenizer(recipe.model, None, False)
    adapted = loading.load(str(model), recipe, tokenizer, "no")
    names = adapters.saved_frozen_names(adapted, recipe)
    tensors = FullParameters(adapted, SingleProcess(), torch.device("cpu"), only_trainable=True, also=names)
    export.save(adapted, tensors, tokenizer, str(model), torch.float32, folder / "adapter")
    shutil.copytree(model, folder / "sharded")
    (folder / "sharded" / "model.safetensors").unlink()
    whole, _ = loading.load_for_answers(model)
    whole.save_pretrained(folder / "sharded", max_shard_size="100KB")
    return folder


@pytest.fixture(autouse=True)
def no_prompt(monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a prompt on the terminal"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def recipe_of(model, *overrides):
    return load_recipe(short(model.parent), [f"model.name={model}", "train.steps=1", *overrides])


def train_on(folder, base):
    """Load a model, or an adapter of `base`, as a run does."""
    given = () if folder == base else (f"adapter.path={folder}", "model.add_tokens=[ab]")
    recipe = recipe_of(base, *given)
    tokenizer = loading.load_tokenizer(recipe.model, None, False)
    adapters.check_tokens(recipe, tokenizer)
    origin = Pretrained.of(recipe.model)
    loading.check_weights(origin, origin.config())
    model = loading.load(str(base), recipe, tokenizer, "no")
    export.stop_at(model, {5})


def refused(work):
    """Return the line of a refusal, or None if the work succeeds. Anything else fails the test."""
    begun = time.monotonic()
    try:
        work()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
        return str(error)
    finally:
        assert time.monotonic() - begun < 20
    return None


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tied", "config.json"),
        ("tied", "generation_config.json"),
        ("tied", "tokenizer_config.json"),
        ("sharded", "model.safetensors.index.json"),
        ("adapter", "adapter_config.json"),
    ],
)
def test_damaged_json(saved, tmp_path, capsys, kind, name):
    """Damage each file in many ways. Each way trains and answers, or is refused in one line."""
    good = (saved / kind / name).read_bytes()
    content = json.loads(good)
    folder = shutil.copytree(saved / kind, tmp_path / "x")
    keys = [*content][:: -(-len(content) // 12)]
    changed = [content | {key: VALUES[(i + j) % len(VALUES)]} for i, key in enumerate(keys) for j in (0, 3)]
    num_refused = 0
    for raw in [*RAW, *(json.dumps(one).encode() for one in changed)]:
        (folder / name).write_bytes(raw)
        work = (lambda: ask.main([str(folder), "hello", "max_new_tokens=1"]),)
        if kind != "sharded":
            work += (lambda: train_on(folder, saved / "tied" if kind == "adapter" else folder),)
        num_refused += sum(refused(one) is not None for one in work)
    assert num_refused >= len(RAW)
    for make in (lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to("/nowhere/x")):
        (folder / name).unlink() if not (folder / name).is_dir() else (folder / name).rmdir()
        make(folder / name)
        assert "is not a regular file" in (refused(lambda: Pretrained(str(folder)).check_files()) or "")


@pytest.mark.parametrize("use", ["ask", "train", "base"])
def test_a_tokenizers_code_neither_runs_nor_prompts(saved, tmp_path, use):
    mark = tmp_path / "it-ran"
    folder = shutil.copytree(saved / ("tied" if use == "base" else "adapter"), tmp_path / "x")
    change(folder / "tokenizer_config.json", **ODD)
    (folder / "odd.py").write_text(CODE.format(mark=str(mark)) + "class Odd(PreTrainedTokenizerFast): pass\n")
    if use == "base":
        change(folder / "config.json", model_type="odd", auto_map={"AutoConfig": "odd.Odd"})
        work, said = (lambda: train_on(folder, folder)), "model.trust_remote_code=true"
    elif use == "train":
        work, said = (lambda: train_on(folder, saved / "tied")), "model.trust_remote_code=true"
    else:
        work, said = (lambda: ask.main([str(folder), "hello"])), " trust_remote_code=true"
    text = refused(work)
    assert "config.json) comes with Python code; read it, then set" in text and text.endswith(said)
    assert not mark.exists()


def test_every_loader_is_told_whether_code_may_run():
    """Check that trust_remote_code is given: without it transformers asks on the terminal."""
    loaders = 0
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if ".from_pretrained(" in text else ():
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".from_pretrained")):
                continue
            owner = ast.unparse(call.func.value).rpartition(".")[2]
            given = ast.unparse(call)
            is_local_gguf = "gguf_file=" in given  # fetch_smollm2.py reads a file that it has unpacked
            if owner not in NO_LOADERS and not is_local_gguf:
                loaders += 1
                assert any(part in given for part in (".options", "**options", "trust_remote_code=")), (
                    f"{path}:{call.lineno}"
                )
    assert loaders >= 5


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("x.bin", "names 'x.bin'; it may name only safetensors files in the same folder"),
        ("../tied/model.safetensors", "may name only safetensors files in the same folder"),
        ("/etc/x.safetensors", "may name only safetensors files in the same folder"),
        (5, "may name only safetensors files in the same folder"),
        ("gone.safetensors", "names gone.safetensors, which is not in the folder"),
    ],
)
def test_an_index_names_safetensors_of_its_folder(saved, tmp_path, names, said):
    folder = shutil.copytree(saved / "sharded", tmp_path / "x")
    torch.save({"a": torch.ones(1)}, folder / "x.bin")
    index = folder / "model.safetensors.index.json"
    first = next(iter(json.loads(index.read_text())["weight_map"]))
    change(index, weight_map={first: names})
    for work in (lambda: train_on(folder, folder), lambda: ask.main([str(folder), "hello"])):
        assert said in refused(work)


def test_a_cache_of_links_is_read(saved, tmp_path):
    """The cache of the Hub has links to files outside the folder."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in (saved / "sharded").iterdir():
        (folder / path.name).symlink_to(path)
    assert refused(lambda: train_on(folder, folder)) is None
    assert len(Pretrained(str(folder)).weight_files()) == len([*folder.glob("*.safetensors")]) > 1


def test_files_beside_the_weights_are_not_weights(saved, tmp_path):
    folder = shutil.copytree(saved / "sharded", tmp_path / "x")
    (folder / "consolidated.safetensors").write_bytes(b"another form of the same weights")
    assert folder / "consolidated.safetensors" not in Pretrained(str(folder)).weight_files()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transformers_weights": "adapter_model.bin"}, "takes its weights from 'adapter_model.bin'"),
        ({"num_hidden_layers": 10**8}, "has num_hidden_layers: 100000000, which no model has"),
        ({"head_dim": 10**9}, "has head_dim: 1000000000, which no model has"),
        ({"output_attentions": True}, "output_attentions"),
        ({"distributed_config": {"tp_size": 2}}, "has distributed_config"),
    ],
)
def test_configs_that_would_fail_later(saved, tmp_path, settings, said):
    folder = shutil.copytree(saved / "tied", tmp_path / "x")
    change(folder / "config.json", **settings)
    assert said in refused(lambda: train_on(folder, folder))


def test_an_adapter_is_not_a_base(saved, tmp_path):
    folder = shutil.copytree(saved / "adapter", tmp_path / "x")
    shutil.copy(saved / "tied" / "config.json", folder)
    assert "is an adapter; give its base here" in refused(lambda: train_on(folder, folder))


@pytest.mark.parametrize(
    "base", ["/nowhere/model", "/etc", "../..", "https://x.y/z", "org/model", "a\0b", "x" * 2000, "", 5, None]
)
def test_an_adapter_whose_base_is_gone(saved, tmp_path, base):
    folder = shutil.copytree(saved / "adapter", tmp_path / "x")
    change(folder / "adapter_config.json", base_model_name_or_path=base)
    assert "adapter_config.json: base_model_name_or_path: " in refused(lambda: ask.main([str(folder), "hello"]))


@pytest.mark.parametrize(
    "settings",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "antigravity"},
        {"corda_config": {"cache_file": "x"}},
        {"target_modules": "["},
        {"target_modules": ["nothing"]},
        {"rank_pattern": {"q_proj": 99}},
        {"task_type": 5},
        {"r": 10**9},
        {"r": "x"},
        {"layers_pattern": "x"},
        {"peft_type": "IA3"},
    ],
)
def test_adapters_of_other_kinds(saved, tmp_path, settings):
    folder = shutil.copytree(saved / "adapter", tmp_path / "x")
    change(folder / "adapter_config.json", **settings)
    assert refused(lambda: ask.main([str(folder), "hello"]))
    assert refused(lambda: train_on(folder, saved / "tied"))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("kept", [(), ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")])
def test_a_folder_without_a_tokenizer(saved, tmp_path, kept):
    folder = shutil.copytree(saved / "tied", tmp_path / "x")
    for path in folder.iterdir():
        if path.name not in (*kept, "config.json", "model.safetensors"):
            path.unlink()
    for name in kept[1:]:
        (folder / name).write_text("{}")
    for work in (lambda: train_on(folder, folder), lambda: ask.main([str(folder), "hello"])):
        assert "has no tokenizer files, such as tokenizer.json" in refused(work)


@pytest.mark.parametrize("content", ["", "{}", "{", "[1]", '{"model": {"type": "BPE"}}', '{"version": "1.0"}'])
def test_a_damaged_tokenizer(saved, tmp_path, content):
    folder = shutil.copytree(saved / "tied", tmp_path / "x")
    (folder / "tokenizer.json").write_text(content)
    assert refused(lambda: train_on(folder, folder)).startswith("model.name: ")
    assert refused(lambda: ask.main([str(folder), "hello"])).startswith("MODEL: ")


def test_what_ask_refuses(saved, tmp_path):
    model, damaged = str(saved / "tied"), shutil.copytree(saved / "adapter", tmp_path / "x")
    (damaged / adapters.WEIGHTS).write_bytes(b"\xff" * 100)
    for arguments, said in (
        ([model], "usage: "),
        ([model, " "], "usage: "),
        ([model, "hello", "max_new_tokens=0"], "max_new_tokens: is '0'; use a number from 1 to"),
        ([model, "hello", "max_new_tokens=9999999999999999999999"], "max_new_tokens: is "),
        ([model, "hello", "max_new_tokens=x"], "max_new_tokens: is "),
        ([f"{model}/config.json", "hello"], "contains no model"),
        (["/nowhere", "hello"], "contains no model"),
        (["a" * 300, "hello"], "contains no model"),
        ([str(damaged), "hello"], "adapter_model.safetensors is damaged (Error while deserializing header"),
    ):
        assert said in refused(lambda arguments=arguments: ask.main(arguments))


def test_a_published_generation_config_with_a_fault_can_be_saved(saved, tmp_path):
    """transformers refuses to save it after a change, which would lose the trained model."""
    folder = shutil.copytree(saved / "tied", tmp_path / "x")
    change(folder / "generation_config.json", temperature=0.5, do_sample=False)
    recipe = recipe_of(folder)
    tokenizer = loading.load_tokenizer(recipe.model, None, False)
    model = loading.load(str(folder), recipe, tokenizer, "no")
    export.stop_at(model, {5})
    tensors = FullParameters(model, SingleProcess(), torch.device("cpu"), only_trainable=False)
    export.save(model, tensors, tokenizer, str(folder), torch.float32, tmp_path / "saved")
    assert 5 in json.loads((tmp_path / "saved/generation_config.json").read_text())["eos_token_id"]


def test_a_saved_model_in_4_bits_and_an_adapter_of_it_answer(saved, tmp_path, capsys):
    """Packed weights have other shapes than the config says."""
    options = {"dtype": torch.float32, "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    AutoModelForCausalLM.from_pretrained(saved / "tied", **options).save_pretrained(tmp_path / "packed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(saved / "tied" / name, tmp_path / "packed")
    shutil.copytree(saved / "adapter", tmp_path / "adapter")
    change(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "packed"))
    for folder in ("packed", "adapter"):
        assert refused(lambda: ask.main([str(tmp_path / folder), "hello", "max_new_tokens=1"])) is None  # noqa: B023
