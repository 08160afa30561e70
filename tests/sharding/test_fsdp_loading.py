"""Test that a rank reads only its own rows of each weight, and that they are the right ones."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import core_model_loading, modeling_utils

from gearbox.sharding import fsdp_loading
from gearbox.sharding.fsdp_loading import OWN_ROWS, RowRange
from support.environment import ROOT
from support.small_models import small_model

CPU = torch.device("cpu")


def load(folder, dtype, rows: RowRange | None, **options):
    with fsdp_loading.reading(rows, **options):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def parameters(model):
    return dict(model.named_parameters(remove_duplicate=False))


def saved(family, folder, **options):
    """Save a small random model in bf16 and return its folder."""
    model = small_model(family, torch.bfloat16)
    model.save_pretrained(folder, **options)
    return folder


# GPT-2 transposes its matrices; a Mixtral's file has one matrix for each expert; BERT's head has a bias and is tied.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "phi3", "bert"])
@pytest.mark.parametrize("count", [2, 5])  # 5 does not divide the rows, and leaves some ranks without any
def test_each_rank_has_its_rows_and_nothing_else(family, dtype, count, tmp_path):
    full = parameters(load(saved(family, tmp_path), dtype, None))
    seen = {name: [] for name in full}
    for index in range(count):
        cut = parameters(load(tmp_path, dtype, RowRange(index, count, CPU)))
        assert cut.keys() == full.keys()
        for name, parameter in cut.items():
            assert (parameter.dtype, parameter.shape) == (full[name].dtype, full[name].shape)
            assert parameter.requires_grad
            if hasattr(parameter, OWN_ROWS):
                assert parameter.isnan().all() and parameter.untyped_storage().nbytes() == dtype.itemsize
                seen[name].append(getattr(parameter, OWN_ROWS))
                assert seen[name][-1].untyped_storage().nbytes() == seen[name][-1].nbytes, "a view of the full weight"
            else:
                assert parameter.dim() == 1 and torch.equal(parameter, full[name])
    for name, parts in seen.items():
        if parts:
            assert torch.equal(torch.cat(parts), full[name])
            assert [len(part) for part in parts] == [len(part) for part in full[name].chunk(count)] + [0] * (
                count - len(full[name].chunk(count))
            )
    assert sum(bool(parts) for parts in seen.values()) > len(seen) / 3


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_weight_is_compared_by_its_values(is_equal, tmp_path):
    """Test a file with both of two tied weights: transformers ties them only if they are equal."""
    model = small_model("llama")
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][-1, -1] += 0 if is_equal else 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for index in range(2):  # only the last rank has the row that differs
        cut = load(tmp_path, torch.float32, RowRange(index, 2, CPU))
        assert (cut.lm_head.weight is cut.model.embed_tokens.weight) == is_equal


def test_ends_that_get_more_rows_stay_whole(tmp_path):
    full = parameters(load(saved("llama", tmp_path), torch.float32, None))
    cut = parameters(load(tmp_path, torch.float32, RowRange(1, 2, CPU), whole_ends=True))
    whole = {name for name, parameter in cut.items() if not hasattr(parameter, OWN_ROWS) and parameter.dim() > 1}
    assert whole == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(cut[name], full[name]) for name in whole)


def test_nothing_stays_changed_after_loading(tmp_path, monkeypatch):
    monkeypatch.setenv(fsdp_loading.READS_RANK_0, "true")

    def state():
        return (
            core_model_loading.set_param_for_module, core_model_loading._materialize_copy,
            modeling_utils._tied_params_are_equal, os.environ[fsdp_loading.READS_RANK_0],
            os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"),
        )  # fmt: skip

    before = state()
    with pytest.raises(RuntimeError), fsdp_loading.reading(RowRange(0, 2, CPU)):
        assert state() != before
        raise RuntimeError
    assert state() == before


MEASURE = """
import json, pathlib, sys
import transformers
import loading
folder = pathlib.Path(sys.argv[1])
loading.make_chats(folder / "chats.jsonl")
sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 2048}
loading.write(transformers.LlamaConfig(**sizes, num_attention_heads=8), folder / "model")
loading.session.build_engine = loading.measured
print(json.dumps([one for gear in ("fsdp", "zero3") for one in loading.run(gear, 2, folder / "model", folder)]))
"""


@pytest.mark.cold
def test_no_rank_holds_more_than_its_share_and_one_tensor(tmp_path):
    """Test a model of 120 MiB in fp32, whose share is half of it. Each rank measures its memory all the time.

    Its ranks are forked from a fresh process: other tests leave holes in the heap, and what is freed there stays.
    """
    command = [sys.executable, "-c", MEASURE, tmp_path]
    printed = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}, capture_output=True, text=True, cwd=ROOT
    )
    assert printed.returncode == 0, printed.stderr
    measured = json.loads(printed.stdout.splitlines()[-1])
    assert len(measured) == 4
    for found in measured:
        assert 60e6 < found["share"] < 80e6
        assert found["held"] < found["share"] + 25e6
        assert found["peak"] < found["held"] + 25e6
