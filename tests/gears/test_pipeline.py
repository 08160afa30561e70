"""Test that the gear pp trains the same weights as one device."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from gearbox import ROOT

STEPS = 8
# The clip takes effect and eps has the gradients' size; else AdamW would hide a constant factor (see test_parity).
FULL = (
    "optim.lr=5e-3", "optim.eps=1e-3", "optim.max_grad_norm=0.5", f"train.steps={STEPS}", "schedule.warmup=3",
    "batch.rows=4", "batch.row_tokens=96",
)  # fmt: skip
MODELS = {
    "three layers": {"num_hidden_layers": 3},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "gemma2": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 32, "query_pre_attn_scalar": 32,
        "sliding_window": 32,
    },
}  # fmt: skip


def folder_of(name: str, folder: Path) -> str:
    """Write the config of recipes/tiny with these changes, for random weights at full width, and return its folder."""
    made = folder / "model"
    shutil.copytree(ROOT / "recipes/tiny", made)
    config = json.loads((made / "config.json").read_text()) | {"hidden_size": 64} | MODELS[name]
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def assert_same(outcome, reference, weight_tolerance=1e-4, loss_tolerance=1e-5):
    assert set(outcome.codes + reference.codes) == {0}, outcome.output + reference.output
    assert outcome.losses == pytest.approx(reference.losses, rel=loss_tolerance)
    norms = [[line["grad_norm"] for line in each.lines("grad_norm")] for each in (outcome, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert outcome.weights.keys() == reference.weights.keys()
    for name, tensor in outcome.weights.items():
        assert torch.allclose(tensor, reference.weights[name], rtol=0, atol=weight_tolerance), name


@pytest.mark.parametrize("name", MODELS)
def test_pipelines_train_the_same(train, tmp_path, name):
    given = (*FULL, f"model.name={folder_of(name, tmp_path)}", "run.rehearse=false", "model.init=random")
    ranks = 4 if name == "three layers" else 2
    assert_same(train("pp", *given, ranks=ranks), train("single", *given))


def test_gpipe_evaluates_and_reports_its_idle_time(train, tmp_path):
    gear = tmp_path / "pp.yaml"
    gear.write_text((ROOT / "accelerate_configs/pp.yaml").read_text().replace("1f1b", "gpipe"))
    outcome = train(str(gear), *FULL, "eval.every=4", "eval.samples=1", "perf.checkpointing=full")
    single = train("single", *FULL, "eval.every=4", "eval.samples=1")
    assert_same(outcome, single)
    assert "pipeline, gpipe, pp 2" in outcome.output and "layers 0-0, 1-1" in outcome.output
    assert "4 rows = 1 replica x 4 accumulation rounds x 1 row\n" in outcome.output
    # 4 micro-batches on 2 stages
    assert "20% of a step idle if all stages are equally fast: (p-1)/(m+p-1)" in outcome.output
    assert all(0 < line["idle"] < 1 for line in outcome.lines("idle"))
    evaluated = [[line["eval_loss"] for line in each.lines("eval_loss")] for each in (outcome, single)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


@pytest.mark.parametrize("given", [(), ("model.quantize=nf4",)], ids=["lora", "qlora"])
def test_adapters(train, given):
    given = (*FULL, "adapter.method=lora", "optim.lr=1e-2", *given)
    outcome, single = train("pp", *given), train("single", *given)
    assert_same(outcome, single, loss_tolerance=1e-4)
    assert len([name for name in outcome.weights if "lora_B" in name]) == 14
    settings = [json.loads((each.folder / "model/adapter_config.json").read_text()) for each in (outcome, single)]
    assert sorted(settings[0].pop("target_modules")) == sorted(settings[1].pop("target_modules"))
    assert settings[0].pop("base_model_name_or_path") != settings[1].pop("base_model_name_or_path")
    assert settings[0] == settings[1]


def test_training_continues_from_an_adapter(train):
    """A pipeline trains a saved DoRA adapter further, the same as one device."""
    given = ("adapter.method=dora", "optim.lr=1e-2", "run.rehearse=false", "model.init=random")
    first = train("single", *given, "run.name=first")
    path = f"adapter.path={first.folder / 'model'}"
    assert_same(train("pp", *given, path), train("single", *given, path), loss_tolerance=1e-4)


def test_unpacked_rows(train):
    given = (*FULL, "data.packing=false", "train.steps=5")
    assert_same(train("pp", *given, ranks=4), train("single", *given))


@pytest.fixture(scope="module")
def whole():
    """Return a list of the uninterrupted run on one device, once it is made."""
    return []


@pytest.mark.parametrize(("before", "after", "ranks"), [("pp", "single", None), ("single", "pp", 4)])
def test_a_run_resumes_under_another_gear(train, whole, before, after, ranks):
    whole[:] = whole or [train("single", "train.steps=6", "run.name=whole")]
    saving = ("train.steps=6", "save.every=3", "save.keep=3", "run.name=cut")
    first = train(before, *saving)
    shutil.rmtree(first.folder / "checkpoints/step-6")
    outcome = train(after, *saving, "run.resume=latest", ranks=ranks)
    assert "resuming from" in outcome.output and "step 3 of 6" in outcome.output
    assert_same(outcome, whole[0])


def test_few_layers_are_refused(train, tmp_path):
    gear = tmp_path / "pp.yaml"
    gear.write_text((ROOT / "accelerate_configs/pp.yaml").read_text().replace("_size: 2", "_size: 3"))
    given = (f"model.name={folder_of('untied', tmp_path)}", "run.rehearse=false", "model.init=random")
    outcome = train(str(gear), *given, ranks=3)
    assert set(outcome.codes) == {2} and "3 stages, but this model has 2 layers; use 2 or fewer" in outcome.output
