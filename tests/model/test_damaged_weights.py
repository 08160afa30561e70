"""Test that weights which are damaged, incomplete or of other sizes are refused in one line, under every gear."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gearbox.distributed import verification
from gearbox.sharding.sharded_state import Zero3Shard
from support.methods import two_models

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1000])


def garbage(path):
    path.write_bytes(b"\xff" * 4000)


def empty(path):
    path.write_bytes(b"")


def changed(path, change):
    tensors = load_file(path)
    tensors[UP] = change(tensors[UP])
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


DAMAGES = {
    "truncated": (truncated, "model.safetensors is damaged (Error while deserializing header: "),
    "garbage": (garbage, "model.safetensors is damaged (Error while deserializing header: "),
    "empty": (empty, "model.safetensors is damaged (Error while deserializing header: "),
    "narrow": (lambda path: changed(path, lambda t: t[:-1].clone()), f"{UP} has the size [127, 64] in"),
    "missing": (lambda path: changed(path, lambda t: None), f"the file lacks {UP}; use"),
    "nan": (lambda path: changed(path, lambda t: t.index_fill(0, torch.tensor([3]), torch.nan)), f"{UP} has values"),
    "inf": (lambda path: changed(path, lambda t: t.index_fill(0, torch.tensor([3]), -torch.inf)), f"{UP} has values"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("gear", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero3", 2), ("pp", 2), ("tp", 2)]
)
def test_damaged_weights(train, folder, tmp_path, gear, ranks, damage):
    break_it, said = DAMAGES[damage]
    model = shutil.copytree(folder / "tied", tmp_path / "model")
    break_it(model / "model.safetensors")
    given = ("run.rehearse=false", "model.init=pretrained", f"model.name={model}")
    outcome = train(gear, *given, ranks=ranks)
    print(outcome.output[-3000:])
    assert said in outcome.output
    assert set(outcome.codes) == {2}, outcome.output
    assert "Traceback" not in outcome.output


def test_the_padding_of_a_partition_is_not_checked(train, monkeypatch):
    """DeepSpeed does not initialize it; here it is NaN, as it is now and then by chance."""
    usual = verification.check_finite

    def with_damaged_padding(model, world):
        for parameter in model.parameters():
            numel = Zero3Shard("", parameter).own_range()[1]
            parameter.ds_tensor.data[numel:] = torch.nan
        usual(model, world)

    monkeypatch.setattr(verification, "check_finite", with_damaged_padding)
    outcome = train("zero3", ranks=3)
    assert set(outcome.codes) == {0}, outcome.output
