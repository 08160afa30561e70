"""Run src/plan.py as users do."""

import json
import re

import pytest

import plan
from gearbox import ROOT
from gearbox.console import Screen
from gearbox.errors import UserError
from gearbox.planning import report
from gearbox.simulation.simulate import Simulation

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


def test_json_has_the_time_and_the_price_of_the_run(capsys):
    arguments = [str(RECIPES / "fsdp_2gpu.yaml"), "--gpu=H100", "--gpus=8", "--nodes=2", "--price=2", "--json"]
    assert plan.main(arguments) == 0
    for one in json.loads(capsys.readouterr().out)["gears"]:
        assert one["seconds_per_run"] == 500 * one["seconds_per_step"]
        assert one["price_per_run"] == pytest.approx(2 * 16 * one["seconds_per_run"] / 3600)
        assert one["host_bytes_per_machine"] == pytest.approx(one["host_bytes"] / 2, abs=1)
        assert one["tokens_per_step"] == 64 * 2048


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (120, 1)])
def test_the_table_fits_a_terminal(monkeypatch, capsys, width, tables):
    monkeypatch.setattr(plan, "make_console", lambda speaks: Screen(force_terminal=True, width=width, no_color=True))
    assert plan.main([str(RECIPES / "fsdp_2gpu.yaml"), "--gpu=H100", "--gpus=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "fsdp_offload" in line and "." in line and "cannot run" not in line]
    assert len(rows) == tables and all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width for line in rows)


def test_a_family_without_a_closed_form_is_simulated(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    step = Simulation(2**30, dict.fromkeys(("weights", "gradients", "optimizer", "activations"), 2**28), 0, {}, 1.0)
    monkeypatch.setattr(plan, "simulate", lambda job, config: step)
    arguments = [str(RECIPES / "fsdp_2gpu.yaml"), f"model.name={tmp_path}", "--gpu=24GB", "--gpus=2", "--json"]
    with pytest.raises(UserError, match="no closed form"):
        plan.main(arguments)
    assert plan.main([*arguments, "--simulate"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_gear = {one["gear"]: one for one in found["simulated"]}
    assert by_gear["fsdp"]["fits"] and by_gear["fsdp"]["peak_bytes"] > 1.9 * 2**30
    assert found["refused"]["single"] == "uses 1 of 2 GPUs"


def test_a_simulation_prints_nothing_but_json(monkeypatch, capsys):
    step = Simulation(2**30, {"weights": 2**30}, 0, {}, 1.0)
    monkeypatch.setattr(plan, "simulate", lambda job, config: step)
    plan.main([str(RECIPES / "fsdp_2gpu.yaml"), "--gpus=2", "--gear=fsdp", "--simulate", "--json"])
    assert json.loads(capsys.readouterr().out)["simulated"][0]["peak_bytes"] == 2**30


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
    of_eight = next(one["peaks"] for one in best if one["num_processes"] == 8 and one["method"] == "full")
    assert of_eight["fsdp"] < of_eight["zero2"] < of_eight["zero1"] < of_eight["ddp"]
    plan.main([str(RECIPES / "fsdp_2gpu.yaml")])
    out = capsys.readouterr().out
    headings = next(line for line in out.splitlines() if line.startswith("method")).split()
    assert headings == ["method", "GPUs", *report.COMPARED]
    assert ["full", "8", *(report.gib(of_eight[name]) if name in of_eight else "-" for name in report.COMPARED)] in [
        line.split() for line in out.splitlines()
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu=H1000"], "--gpu: 'H1000' is unknown"),
        (["--gpus=0"], "--gpus: must be above 0"),
        (["--params="], "--params: '' is not a known size"),
        (["--gpu="], "--gpu: '' is unknown"),
        (["--gear=", "--gpus=2"], "--gear: '' is unknown"),
        (["--nodes=2"], "--nodes: needs the GPUs of each machine; give --gpus too"),
        (["--price=2", "--gpu=24GB"], "--price: needs the speed of a GPU; name one with --gpu"),
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
