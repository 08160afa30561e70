"""Run src/plan.py as users do."""

import json

import pytest

import plan
from gearbox import ROOT
from gearbox.errors import UserError

RECIPES = ROOT / "recipes"


def test_a_plan_names_the_gear_and_the_reason(capsys):
    code = plan.main([str(RECIPES / "fsdp_2gpu.yaml"), "--gpu=A100-80GB", "--gpus=2", "--price=2"])
    out = capsys.readouterr().out
    assert code == 0
    assert "verdict       fsdp fits on 2 x A100-80GB (80.0 GiB), with batch.micro_rows up to" in out
    assert "at 2 per GPU and hour" in out
    assert "cannot run    single: uses 1 of 2 GPUs" in out


def test_json_has_every_term(capsys):
    assert plan.main([str(RECIPES / "qlora_1gpu.yaml"), "--gpu=24GB", "--gpus=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (single,) = found["gears"]
    assert sum(single["terms"].values()) == single["peak_bytes"] < 24 * 2**30
    assert found["verdict"].startswith("single fits")


def test_nothing_fits_is_exit_code_1_with_advice(capsys):
    code = plan.main([str(RECIPES / "fsdp_2gpu.yaml"), "--params=70B", "--gpu=80GB", "--gpus=1"])
    out = capsys.readouterr().out
    assert code == 1
    assert "nothing fits on 1 x 80GB" in out
    assert "model.quantize=nf4 fits under single" in out


def test_without_gpus_counts_and_methods_are_compared(capsys):
    assert plan.main([str(RECIPES / "fsdp_2gpu.yaml"), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert {(one["method"], one["num_processes"]) for one in best} == {
        (method, count) for method in ("full", "lora", "qlora") for count in plan.COUNTS
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu=H1000"], "--gpu: 'H1000' is unknown"),
        (["--gpus=0"], "--gpus: must be above 0"),
        (["--nodes=-1"], "--nodes: must be above 0"),
        (["--mfu=40"], "--mfu: must be above 0 and at most 1"),
        (["--method=magic"], "--method: 'magic' is unknown"),
        (["--params=1T"], "--params: '1T' is not a known size"),
        (["--gear=fdsp", "--gpus=2"], "--gear: 'fdsp' is unknown"),
        (["--gear=single", "--gpus=2"], "--gear: single: uses 1 of 2 GPUs"),
        (["model.name=no/where"], "the config.json of 'no/where' is not on this machine"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message):
    with pytest.raises(UserError) as caught:
        plan.main([str(RECIPES / "fsdp_2gpu.yaml"), *arguments])
    assert message in str(caught.value)
