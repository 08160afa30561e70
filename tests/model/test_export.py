"""Test that an exported model is complete and equal to what transformers saves, and that its tensors are streamed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gearbox.model import export
from gearbox.model.random_init import shrink_config
from gearbox.sharding.full_parameters import FullParameters
from gearbox.sharding.unwrap import model_class, text_class
from support import experts
from support.composites import write_composite
from support.methods import two_models
from support.world import SingleProcess

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def small_files(monkeypatch):
    """Write several files and an index, as for a large model."""
    monkeypatch.setattr(export, "SHARD_BYTES", 60_000)


def of_dtype(folder, copy, dtype, key):
    """Copy a model with weights and config of this dtype."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    save_file({n: t.to(DTYPES[dtype]) for n, t in tensors.items()}, copy / "model.safetensors", {"format": "pt"})
    settings = json.loads((copy / "config.json").read_text())
    del settings["dtype"]
    (copy / "config.json").write_text(json.dumps(settings | ({key: dtype} if key else {})))
    return copy


@pytest.mark.parametrize(
    ("gear", "ranks", "model", "dtype", "key"),
    [
        ("single", 1, "tied", "bfloat16", "dtype"),
        ("single", 1, "untied", "float16", "torch_dtype"),
        ("single", 1, "untied", "bfloat16", None),
        ("fsdp", 2, "tied", "bfloat16", "torch_dtype"),
        ("zero3", 2, "untied", "float32", "dtype"),
        ("pp", 2, "untied", "bfloat16", "dtype"),
    ],
)
def test_config_index_and_weights_agree(train, models, tmp_path, small_files, gear, ranks, model, dtype, key):
    base = of_dtype(models / model, tmp_path / "base", dtype, key)
    given = (f"model.name={base}", "model.init=pretrained", "run.rehearse=false", "train.steps=2")
    outcome = train(gear, *given, ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.output
    folder = outcome.folder / "model"
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    assert {tensor.dtype for tensor in weights.values()} == {DTYPES[dtype]}
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in weights.values())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {DTYPES[dtype]}
    original = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    assert loaded.get_memory_footprint() == original.get_memory_footprint()


def full_parameters(model):
    return FullParameters(model, SingleProcess(), torch.device("cpu"), only_trainable=False)


def exported(model, dtype, folder, source=""):
    model.own_dropout = {}
    export.save(model, full_parameters(model), experts.TOKENIZER, str(source), dtype, folder)
    return folder


# Families whose experts are fused while they are loaded, with other converted or integer tensors, and without any.
FAMILIES = ("Mixtral", "Qwen3Moe", "HrmText", "DeepseekV4", "Glm4Moe", "GPT2", "Llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_files_are_those_of_transformers(tmp_path, family, tied):
    """Compare the bytes with files from save_pretrained, which gets the complete model."""
    made = experts.config_of(family) if family in experts.FAMILIES else getattr(transformers, f"{family}Config")()
    config = shrink_config(made, experts.TOKENIZER, num_layers=2)
    config.tie_word_embeddings = tied
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = exported(model, torch.bfloat16, tmp_path / "ours")
    model.save_pretrained(tmp_path / "fp32")
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "theirs")  # some tensors of mixtures of experts stay in fp32
    name = "model.safetensors"
    assert (folder / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_several_files_load_as_one(tmp_path, monkeypatch):
    """Load a mixture of experts, whose experts are fused again, from many files."""
    model = transformers.AutoModelForCausalLM.from_config(experts.config_of("Qwen3Moe"))
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    folder = exported(model, torch.float32, tmp_path / "x")
    sizes = [path.stat().st_size for path in folder.glob("model-*-of-*.safetensors")]
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert len(sizes) > 5 and max(sizes) < max(20_000, largest) + 5_000
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def peak_growth(work):
    """Return by how many bytes the memory of this process grew at most while it did the work. Files do not count."""

    def of(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, starts at the present size
    before = of("VmRSS")
    work()
    return of("VmHWM") - before


def test_no_more_than_a_group_of_tensors_is_held(tmp_path, monkeypatch):
    """Export 210 MB of experts in shards of 20 MB. A group is a layer's fused tensor and the copies made of it."""
    config = experts.config_of("Mixtral")
    config.update({"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000_000)
    exported(model, torch.float32, tmp_path / "warm")
    grown = peak_growth(lambda: exported(model, torch.float32, tmp_path / "x"))
    total = sum(path.stat().st_size for path in (tmp_path / "x").glob("*.safetensors"))
    group = 2 * max(parameter.nbytes for parameter in model.parameters())
    assert total > 200_000_000 and grown < 20_000_000 + group, f"{grown:,} of {total:,} bytes"


@pytest.mark.parametrize("fault", ["missing", "twice", "shape"])
def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path, fault):
    files = export.ShardedFiles(tmp_path, {name: torch.empty(2, 3, device="meta") for name in "ab"})
    files.write("a", torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"1 planned tensors were not written, such as b|differs from the planned"):
        if fault == "shape":
            files.write("b", torch.ones(3, 2))
        elif fault == "twice":
            files.write("a", torch.ones(2, 3))
        files.write_index()


def test_towers_of_several_files_go_to_several_files(tmp_path, monkeypatch):
    config = transformers.AutoConfig.from_pretrained(write_composite("Gemma3", tmp_path / "whole"))
    whole = model_class(config).from_pretrained(tmp_path / "whole")
    whole.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    text = text_class(config).from_pretrained(tmp_path / "source")
    monkeypatch.setattr(export, "SHARD_BYTES", 40_000)
    folder = exported(text, torch.float32, tmp_path / "x", tmp_path / "source")
    assert all(len([*place.glob("model-*")]) > 3 for place in (folder, tmp_path / "source"))
    again, report = model_class(config).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
