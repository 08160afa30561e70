"""Test that exports keep the rules of the servers that load them. The rules are retold from the sources.

- vLLM, main branch: default_loader.py of commit 00b5ad07, lora_model.py of 0306474e, peft_helper.py of e745baff.
  In lora/utils.py it is 001e63a8, and in config/lora.py 01230b40.
- Text Generation Inference 3.3.7, which pins transformers 4.51.3: server/utils/hub.py, server/utils/adapter.py,
  server/adapters/lora.py and router/src/server.rs.
"""

import fnmatch
import json

import pytest
import transformers
from safetensors import safe_open

from gearbox.console import make_console
from gearbox.exporting import exporter
from gearbox.model import export as writer
from support.exports import export, verify_here, write_adapter, write_model
from support.rotations import GEMMA, LLAMA3

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LORA = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    verify_here(monkeypatch)


def read(path):
    return json.loads(path.read_text())


def tensors_of(path):
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no dict


def problems_of_model(folder):
    """Yield which rules about a full model the folder breaks."""
    names = {path.name for path in folder.iterdir()}
    weights = {name for name in names if name.endswith(".safetensors")}
    if not weights or any(word in name for word in ("arguments", "args", "training") for name in weights):
        yield "TGI finds no weights, or leaves some out by their names"
    if fnmatch.filter(names, "consolidated*.safetensors") or fnmatch.filter(names, "*.bin"):
        yield "vLLM takes it for Mistral's own format, or TGI for an old one"
    index = folder / "model.safetensors.index.json"
    listed = {*read(index)["weight_map"].values()} if index.is_file() else weights
    if listed != weights:
        yield "vLLM reads the files of the index alone, and TGI reads all files"
    seen = [name for file in weights for name in tensors_of(folder / file)]
    if len(seen) != len({*seen}):
        yield "TGI refuses a tensor that two files hold"
    config = read(folder / "config.json")
    if not (config.get("architectures") and config.get("model_type")):
        yield "both choose the code by architectures and model_type"
    if "rope_theta" not in config or "torch_dtype" not in config:
        yield "transformers 4 takes its default for the rotary base and the data type"
    if not (folder / "generation_config.json").is_file():
        yield "no stop tokens"
    yield from problems_of_tokenizer(folder)


def problems_of_tokenizer(folder):
    """Yield which rules about the tokenizer the folder breaks."""
    settings = read(folder / "tokenizer_config.json")
    if not isinstance(settings.get("chat_template"), str):
        yield "TGI reads the chat template only here or in chat_template.json"
    if "TokenizersBackend" in settings["tokenizer_class"] or "extra_special_tokens" in settings:
        yield "transformers 4 has no such class, and needs a table for these tokens"
    if not (folder / "tokenizer.json").is_file():
        yield "no tokenizer.json"


def problems_of_adapter(folder, max_rank=16):
    """Yield which rules about an adapter the folder breaks."""
    config, shapes = read(folder / "adapter_config.json"), tensors_of(folder / "adapter_model.safetensors")
    if missing := {"r", "lora_alpha", "target_modules"} - config.keys():
        yield f"vLLM needs {missing}"
    for key in ("use_dora", "modules_to_save", "lora_bias", "layer_replication", "trainable_token_indices"):
        if config.get(key):
            yield key
    if config.get("bias", "none") != "none":
        yield "bias"
    if max([config["r"], *(config.get("rank_pattern") or {}).values()]) > max_rank or max_rank not in VLLM_RANKS:
        yield "rank"
    if unknown := [name for name in shapes if not name.endswith((*LORA, ".base_layer.weight"))]:
        yield f"vLLM refuses the tensor {unknown[0]}"
    if not all(name.startswith("base_model.model.") for name in shapes):
        yield "TGI asks for names that begin otherwise"
    if not config.get("base_model_name_or_path"):
        yield "TGI cannot compare the base"


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", {"rope_parameters": LLAMA3}), ("qwen3", {}), ("gemma3_text", GEMMA)]
)
def test_a_full_model_keeps_the_rules(tmp_path, monkeypatch, family, sizes):
    monkeypatch.setattr(writer, "SHARD_BYTES", 100_000)
    base = write_model(family, tmp_path / "base", **sizes)
    assert [*problems_of_model(base)], "transformers itself would keep the rules"
    folder = export(base, tmp_path / "x")
    assert not [*problems_of_model(folder)]
    config, given = read(folder / "config.json"), transformers.AutoConfig.from_pretrained(base)
    assert transformers.AutoConfig.from_pretrained(folder).rope_parameters == given.rope_parameters
    if family == "llama":
        assert config["rope_theta"] == 1e4 and config["rope_scaling"]["factor"] == 8.0
    if family == "gemma3_text":
        local, full = (given.rope_parameters[kind]["rope_theta"] for kind in ("sliding_attention", "full_attention"))
        assert (config["rope_local_base_freq"], config["rope_theta"]) == (local, full)
    one, other = (transformers.AutoTokenizer.from_pretrained(path) for path in (base, folder))
    assert one("ab<|end|>") == other("ab<|end|>") and one.all_special_tokens == other.all_special_tokens


def test_an_adapter_keeps_the_rules_or_is_told_of(tmp_path, capsys):
    base = write_model("llama", tmp_path / "base")
    folder = export(write_adapter(base, tmp_path / "lora"), tmp_path / "x")
    assert not [*problems_of_adapter(folder), *problems_of_tokenizer(folder)]
    assert "vLLM" not in capsys.readouterr().out
    folder = export(write_adapter(base, tmp_path / "dora", use_dora=True), tmp_path / "y")
    assert "use_dora" in [*problems_of_adapter(folder)]
    assert "hint: vLLM and TGI do not serve an adapter with DoRA; add --merge" in capsys.readouterr().out


def test_a_large_rank_is_told_of(capsys):
    exporter._print_hints({"r": 8, "rank_pattern": {"q_proj": 64}, "modules_to_save": ["lm_head"]}, make_console(True))
    assert "whole layers" in (printed := capsys.readouterr().out) and "rank 64" in printed
