"""Test how a model is split into stages, what each stage holds, and which models are refused."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gearbox.checks.model import check_architecture
from gearbox.config.gear import load_gear
from gearbox.distributed import pipeline_stages
from gearbox.errors import UserError
from support.gears import written
from support.pipelines import FAMILIES, NARROW, load_stage, write_model
from support.ranks import fork_ranks


@pytest.mark.ranks
def test_loading_a_stage_does_not_load_the_full_model(tmp_path):
    """Measure the bytes held, and the peak while loading, for 4 stages of a 135 MiB model."""
    wide = NARROW | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    # The file is in bf16: fp32 weights would be mapped from it and not count as memory until they are used.
    write_model(transformers.LlamaConfig(**wide, num_hidden_layers=9), tmp_path, torch.bfloat16)
    whole = 2 * sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())

    def work():
        stages = [load_stage(tmp_path, pipeline_stages.Stage(8, 9))]  # the libraries' one-time memory
        for index in range(4):
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            before = resident("VmRSS")
            stages.append(load_stage(tmp_path, pipeline_stages.Stage(index, 4)))
            assert resident("VmHWM") - before < 0.6 * whole, "at most 3 of 9 layers in fp32, and their bf16 originals"
        shares = [sum(parameter.nbytes for parameter in stage.parameters()) / whole for stage in stages[1:]]
        assert abs(sum(shares) - 1) < 1e-6 and max(shares) < 3.1 / 9

    codes, output = fork_ranks(1, {}, work)
    assert codes == [0], output


def resident(field: str) -> int:
    """Return the bytes of this process's memory: VmRSS is the current value, VmHWM the peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def test_balance():
    assert pipeline_stages.balance([10] * 4, 2, before=0, after=0) == [0, 2, 4]
    assert pipeline_stages.balance([10] * 3, 2, before=0, after=0) == [0, 2, 3], (
        "the last stage also computes the logits"
    )
    assert pipeline_stages.balance([10] * 8, 2, before=40, after=40) == [0, 4, 8]
    assert pipeline_stages.balance([10] * 8, 2, before=5, after=45) == [0, 6, 8]
    assert pipeline_stages.balance([1, 1, 1, 50], 2, before=0, after=0) == [0, 3, 4]
    assert pipeline_stages.balance([10] * 3, 3, before=100, after=0) == [0, 1, 2, 3], "each stage has a layer"
    assert pipeline_stages.balance([10] * 80, 8, before=30, after=30)[1] == 8, "the first stage has two layers fewer"


def test_models_that_cannot_be_split_are_refused(tmp_path):
    gear = load_gear(written(tmp_path, "pp", num_processes=4, parallelism_config={"parallelism_config_pp_size": 4}))
    with pytest.raises(UserError, match="4 stages, but this model has 3 layers; use 3 or fewer"):
        check_architecture(gear, FAMILIES["llama, tied"])
    with pytest.raises(UserError, match=r"transformers has no pipeline plan for gpt2; use .*fsdp\.yaml"):
        check_architecture(gear, transformers.GPT2Config())
    for config in FAMILIES.values():
        pipeline_stages.check_stages_equal_whole(config)


def test_a_split_that_changes_the_model_is_refused(monkeypatch):
    granite = FAMILIES["granite"]
    # Let each stage treat what it received as an embedding: Granite then multiplies it once more.
    monkeypatch.setattr(
        pipeline_stages.ReceivedHidden, "forward", lambda self, given, **_: self.hidden if given.dim() == 2 else given
    )
    with pytest.raises(UserError, match="family granite cannot be split into stages: the logits differ by"):
        pipeline_stages.check_stages_equal_whole(granite)
    monkeypatch.undo()
    plan = {name: entry for name, entry in granite.base_model_pp_plan.items() if name != "norm"}
    monkeypatch.setattr(type(granite), "base_model_pp_plan", plan)
    with pytest.raises(UserError, match=r"model\.norm\.weight is outside its pipeline plan"):
        pipeline_stages.check_stages_equal_whole(granite)
