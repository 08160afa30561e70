"""Test that composite models train their text under every gear, and are exported with their towers unchanged."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gearbox.model.loading import load_for_answers
from gearbox.sharding import unwrap
from support.composites import FAMILIES, write_composite
from support.methods import METHODS

SETTINGS = (
    "run.rehearse=false", "model.init=pretrained", "batch.rows=4", "batch.row_tokens=64", "train.steps=2",
    "schedule.warmup=0", "optim.lr=5e-3", "optim.eps=1e-3", "eval.fraction=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def composite(tmp_path_factory):
    """Return a function that writes a family's model once and returns its folder."""
    folder = tmp_path_factory.mktemp("composites")
    return lambda family: folder / family if (folder / family).exists() else write_composite(family, folder / family)


@pytest.fixture
def tune(train, composite):
    """Return a function that trains a family: tune("Gemma3", "fsdp", *overrides) -> Outcome."""
    return lambda family, gear, *more: train(gear, f"model.name={composite(family)}", *SETTINGS, *more)


@pytest.mark.parametrize(
    ("family", "gears"),
    [
        *((family, ("fsdp", "zero3")) for family in FAMILIES),
        ("Gemma3", ("ddp", "tp", "pp", "fsdp_tp", "zero2")),
        ("Qwen3_5", ("pp",)),
    ],
)
def test_every_gear_trains_the_text_and_exports_the_towers_unchanged(tune, composite, family, gears):
    before = load_file(composite(family) / "model.safetensors")
    one = tune(family, "single")
    assert one.weights.keys() == before.keys(), "the names in the files stay the same"
    towers = {name for name in before if not any(part in name for part in ("language_model", "lm_head"))}
    assert len(towers) > 10
    assert {name for name in before if torch.equal(before[name], one.weights[name])} & towers == towers
    trained = next(name for name in before if name.endswith("q_proj.weight") and name not in towers)
    assert not torch.equal(before[trained], one.weights[trained])
    for gear in gears:
        outcome = tune(family, gear)
        assert outcome.losses == pytest.approx(one.losses, rel=1e-5), outcome.output
        for name, tensor in outcome.weights.items():
            assert torch.allclose(tensor, one.weights[name], rtol=0, atol=1e-5), f"{gear}: {name}"


def without_dtype(config: dict) -> dict:
    """Return a config's dictionary without the dtype of its parts, which transformers adds."""
    return {k: without_dtype(v) if isinstance(v, dict) else v for k, v in config.items() if k != "dtype"}


@pytest.mark.parametrize("family", ["Gemma3", "Qwen3_5"])
def test_the_exported_model_is_whole(train, composite, tmp_path, family):
    source = tmp_path / "bf16"
    shutil.copytree(composite(family), source)
    full_class = unwrap.model_class(transformers.AutoConfig.from_pretrained(source))
    full_class.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(source)
    outcome = train("single", f"model.name={source}", *SETTINGS)
    assert {tensor.dtype for tensor in outcome.weights.values()} == {torch.bfloat16}
    config, original = (transformers.AutoConfig.from_pretrained(f) for f in (outcome.folder / "model", source))
    assert config.text_config.dtype == config.vision_config.dtype == config.dtype == torch.bfloat16
    assert without_dtype(config.to_diff_dict()) == without_dtype(original.to_diff_dict())
    model, report = full_class.from_pretrained(outcome.folder / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert len([*model.parameters()]) > len([*unwrap.text_class(config)(config).parameters()])


@pytest.mark.parametrize(("family", "method"), [("Gemma3", "lora"), ("Qwen3_5", "qlora"), ("Llama4", "lora")])
def test_adapters_train_and_load_on_the_full_model(tune, family, method):
    one, outcome = (tune(family, gear, *METHODS[method]) for gear in ("single", "fsdp"))
    assert outcome.losses == pytest.approx(one.losses, rel=1e-5), outcome.output
    model, _ = load_for_answers(one.folder / "model")
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted and all("language_model" in name for name in adapted), "layers of the tower have the same names"
    assert {name.split(".lora_")[0] for name in one.weights} == adapted
    continued = tune(family, "fsdp", *METHODS[method], f"adapter.path={one.folder / 'model'}")
    assert continued.codes == [0, 0], continued.output
    assert continued.losses[0] < one.losses[0], "it starts from the trained adapter"


def test_a_named_layer_of_the_tower_is_not_adapted(tune):
    outcome = tune("Gemma3", "single", "adapter.method=lora", "adapter.targets=[q_proj]")
    targets = json.loads((outcome.folder / "model" / "adapter_config.json").read_text())["target_modules"]
    assert targets == r"model\.language_model\.(.*\.)?(q_proj)|(q_proj)"


def test_a_rehearsal_of_a_composite_model(train, composite):
    for family in ("Gemma3", "Mistral3"):
        outcomes = [train(gear, f"model.name={composite(family)}", "run.name=r-" + gear) for gear in ("single", "fsdp")]
        assert [outcome.codes for outcome in outcomes] == [[0], [0, 0]], outcomes[0].output
        assert outcomes[0].losses == pytest.approx(outcomes[1].losses, rel=1e-5)
