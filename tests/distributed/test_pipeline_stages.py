"""A model cut into stages: where, what of it a stage holds, and what cannot be cut."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gearbox import ROOT
from gearbox.config.compatibility import check_architecture
from gearbox.config.gear import load_gear
from gearbox.distributed import pipeline_stages
from gearbox.errors import UserError
from support.pipelines import FAMILIES, NARROW, load_stage, write_model
from support.ranks import fork_ranks


@pytest.mark.ranks
def test_a_stage_is_loaded_alone(tmp_path):
    """Bytes held and the peak while loading, of 4 stages of a model of 135 MiB."""
    wide = NARROW | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    # In bf16: fp32 weights would be mapped from the file, and not count as memory until they are used.
    write_model(transformers.LlamaConfig(**wide, num_hidden_layers=9), tmp_path, torch.bfloat16)
    whole = 2 * sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())

    def work():
        stages = [load_stage(tmp_path, pipeline_stages.Stage(8, 9))]  # what the libraries need once
        for index in range(4):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew from here
            before = resident("VmRSS")
            stages.append(load_stage(tmp_path, pipeline_stages.Stage(index, 4)))
            assert resident("VmHWM") - before < 0.6 * whole, "3 layers of 9 at most, and them in bf16 before"
        shares = [sum(parameter.nbytes for parameter in stage.parameters()) / whole for stage in stages[1:]]
        assert abs(sum(shares) - 1) < 1e-6 and max(shares) < 3.1 / 9

    codes, output = fork_ranks(1, {}, work)
    assert codes == [0], output


def resident(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def test_balance():
    assert pipeline_stages.balance([10] * 4, 2, before=0, after=0) == [0, 2, 4]
    assert pipeline_stages.balance([10] * 3, 2, before=0, after=0) == [0, 2, 3], (
        "the last stage computes the logits too"
    )
    assert pipeline_stages.balance([10] * 8, 2, before=40, after=40) == [0, 4, 8]
    assert pipeline_stages.balance([10] * 8, 2, before=5, after=45) == [0, 6, 8]
    assert pipeline_stages.balance([1, 1, 1, 50], 2, before=0, after=0) == [0, 3, 4]
    assert pipeline_stages.balance([10] * 3, 3, before=100, after=0) == [0, 1, 2, 3], "each has a layer"
    assert pipeline_stages.balance([10] * 80, 8, before=30, after=30)[1] == 8, "two layers less on the first"


def test_what_cannot_be_cut_is_refused():
    gear = load_gear(ROOT / "accelerate_configs/pp.yaml", {"num_processes": "4", "parallelism_config_pp_size": "4"})
    with pytest.raises(UserError, match="4 stages, but this model has 3 layers; use 3 or fewer"):
        check_architecture(gear, FAMILIES["llama, tied"])
    with pytest.raises(UserError, match=r"transformers has no pipeline plan for gpt2; use .*fsdp\.yaml"):
        check_architecture(gear, transformers.GPT2Config())
    for config in FAMILIES.values():
        pipeline_stages.check_stages_equal_whole(config)


def test_a_cut_that_changes_the_model_is_refused(monkeypatch):
    granite = FAMILIES["granite"]
    # As if a stage took what was received for an embedding: Granite multiplies it once more.
    monkeypatch.setattr(
        pipeline_stages.ReceivedHidden, "forward", lambda self, given, **_: self.hidden if given.dim() == 2 else given
    )
    with pytest.raises(UserError, match="family granite cannot be cut into stages: its logits then differ by"):
        pipeline_stages.check_stages_equal_whole(granite)
    monkeypatch.undo()
    plan = {name: entry for name, entry in granite.base_model_pp_plan.items() if name != "norm"}
    monkeypatch.setattr(type(granite), "base_model_pp_plan", plan)
    with pytest.raises(UserError, match=r"model\.norm\.weight lies outside its pipeline plan"):
        pipeline_stages.check_stages_equal_whole(granite)
