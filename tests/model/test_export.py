"""Test that a saved model's config.json, index and weights agree, whatever the base's dtype and the gear."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gearbox.model import export
from support.methods import two_models

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
