"""Test src/parity.py: equal gears pass, and any divergence is found with its step and its parameter."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import parity as script
from gearbox import ROOT
from gearbox.config.gear import Gear
from gearbox.errors import UserError
from gearbox.launch import supervisor
from gearbox.pages import run_comparison
from gearbox.training import loop
from support.breakages import averaged_per_micro_batch, clipped_at_auto
from support.ranks import skip_loading_back, supervise_warm
from support.repository import HEAVY

SMALL = ("batch.rows=6", "batch.row_tokens=128", "batch.micro_rows=1", "optim.max_grad_norm=0.5")


def rows(said: str) -> dict[str, str]:
    """Return the lines of the table by gear."""
    lines = [line.strip() for line in said.split(" verdict")[1].splitlines()]
    return {line.split()[0]: line for line in lines if line and not line.split()[0].endswith(":")}


@pytest.fixture
def compare(tmp_path, chats, monkeypatch, capsys):
    """Run the command on forked ranks: compare("single,fsdp:2", ...) -> exit code, output. `meddle` precedes a run."""
    skip_loading_back(monkeypatch)

    def call(gears: str, *arguments: str, meddle=lambda gear, patch: None) -> tuple[int, str]:
        def train(flags: list[str], given: list[str], output) -> int:
            with monkeypatch.context() as patch:
                meddle(Path(flags[0].partition("=")[2]).stem, patch)
                return supervise_warm(tmp_path / "runs", flags, given, output)

        monkeypatch.setattr(supervisor, "supervise", train)
        given = ["--gears", gears, "--steps", "6", f"run.dir={tmp_path}/runs", f"data.path={chats}", *SMALL]
        code = script.main([*given, *arguments])
        return code, capsys.readouterr().out

    return call


def test_only_small_files_remain(compare, tmp_path):
    """The large folders are deleted, and an existing folder is not touched."""
    (tmp_path / "runs" / "parity-tiny").mkdir(parents=True)
    code, said = compare("single,fsdp")
    assert code == 0, said
    assert rows(said)["single-1"].endswith("reference") and rows(said)["fsdp-2"].endswith("equal")
    folder = tmp_path / "runs" / "parity-tiny-2"
    assert sorted(path.name for path in folder.iterdir()) == [
        "fsdp-2", "fsdp-2.log", "parity.html", "single-1", "single-1.log",
    ]  # fmt: skip
    assert sorted(path.name for path in (folder / "fsdp-2").iterdir()) == [
        "lock", "loss.png", "metrics.jsonl", "report.html", "resolved.yaml", "run.json", "status.json", "tensorboard",
        "trackers.json",
    ]  # fmt: skip
    page = (folder / "parity.html").read_text()
    assert page.count("<figure") == 6 and page.count("data-name=") == 2 * 2 + 4 * 1
    assert list((tmp_path / "runs" / "parity-tiny").iterdir()) == []


def test_three_gears_are_equal(compare):
    code, said = compare("single,ddp:3,zero3", "--weights-every", "4")
    assert code == 0, said
    assert said.count(" equal") == 2


def test_another_learning_rate_is_found_at_its_step(compare):
    def meddle(gear, patch):
        usual = loop.learning_rate
        if gear == "ddp":
            patch.setattr(loop, "learning_rate", lambda step, *rest: usual(step, *rest) * (1.1 if step >= 2 else 1.0))

    code, said = compare("single,fsdp:2,ddp:2", meddle=meddle)
    assert code == 1
    assert rows(said)["fsdp-2"].endswith("equal")
    assert rows(said)["ddp-2"].endswith("diverges @3")
    assert "ddp-2: step 3 differs in weights by " in said and "(mostly in model." in said


@pytest.mark.parametrize("fault", [averaged_per_micro_batch, clipped_at_auto])
def test_common_faults_are_found(compare, fault):
    code, said = compare("single,zero2", meddle=lambda gear, patch: fault(patch) if gear == "zero2" else None)
    assert code == 1, said
    assert "zero2-2: step " in said and "moments by " in said


def clipped_by_zero2(gear: str, patch: pytest.MonkeyPatch) -> None:
    """Let DeepSpeed clip at another norm, which the check of the running configuration refuses."""
    filled = Gear.filled_json
    if gear == "zero2":
        patch.setattr(Gear, "filled_json", lambda *given: filled(*given) | {"gradient_clipping": 0.25})


def test_a_failed_gear_is_reported(compare):
    code, said = compare("single,zero2,fsdp", meddle=clipped_by_zero2)
    assert code == 1
    lines = {line.split()[0]: line for line in said.splitlines()[3:] if line.strip()}
    assert "failed" in lines["zero2-2"] and "equal" in lines["fsdp-2"]
    assert "zero2-2: accelerate_configs/zero2.yaml: the running configuration does not" in said.replace(f"{ROOT}/", "")


def test_nothing_is_compared_with_a_failed_reference(compare):
    code, said = compare("zero2,fsdp", meddle=clipped_by_zero2)
    assert code == 1
    assert "zero2-2: " in said and "fsdp-2" not in said


def test_a_stopped_comparison_leaves_no_checkpoints(tmp_path, monkeypatch, capsys):
    """launch.py exits with 85 when it was asked to stop and has saved, and with 130 after a second Ctrl-C."""
    begun = []

    def train(flags: list[str], given: list[str], output) -> int:
        begun.append(tmp_path / "runs" / "parity-tiny" / "single-1" / "checkpoints" / "step-1")
        begun[-1].mkdir(parents=True)
        return 85

    monkeypatch.setattr(supervisor, "supervise", train)
    assert script.main(["--gears", "single,fsdp", f"run.dir={tmp_path}/runs"]) == 130
    assert len(begun) == 1 and not begun[0].parent.exists()
    assert "stopped" in capsys.readouterr().out


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    return {}


@pytest.fixture
def pair(train, made, tmp_path):
    """Return a run and a copy of it."""
    if not made:
        outcome = train("single", *SMALL, "save.every=1", "save.keep=3")
        assert outcome.codes == [0], outcome.output
        made["a"] = outcome.folder
    shutil.copytree(made["a"], tmp_path / "b")
    return run_comparison.Compared("a", made["a"]), run_comparison.Compared("b", tmp_path / "b")


FP32 = run_comparison.TOLERANCES["no"]
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(("kind", "quantity"), [("parameter", "weights"), ("exp_avg", "moments")])
def test_a_changed_parameter_is_named_with_its_step(pair, kind, quantity):
    reference, other = pair
    other.compare_with(reference)
    assert other.verdict(FP32) == "equal"
    assert other.is_exact and all(set(found.values.values()) == {0.0} for found in other.differences)
    file = other.folder / "checkpoints" / "step-2" / "shard-00000.safetensors"
    tensors = load_file(file)
    tensors[f"{kind}|{NAME}|0"] *= 1.05
    save_file(tensors, file)
    other.compare_with(reference)
    assert other.verdict(FP32) == "diverges @2"
    assert other.explanation(FP32).startswith(f"step 2 differs in {quantity} by ")
    assert other.explanation(FP32).endswith(f" (mostly in {NAME})")
    assert run_comparison.TOLERANCES["no"][quantity] < other.largest(quantity)[0] < 1
    assert other.largest(quantity)[1] == 2


def test_one_bit_of_a_second_moment_is_not_exact(pair):
    """No tolerance covers second moments: the weights of later steps show an error in them."""
    reference, other = pair
    file = other.folder / "checkpoints" / "step-3" / "shard-00000.safetensors"
    tensors = load_file(file)
    tensors[f"exp_avg_sq|{NAME}|0"].view(torch.uint8)[0] ^= 1
    save_file(tensors, file)
    other.compare_with(reference)
    assert other.verdict(FP32) == "equal" and not other.is_exact


def test_a_skipped_step_differs_at_any_learning_rate(pair):
    """Differences in weights are relative to the distance that the learning rates allow, not to the weights."""
    reference, other = pair
    second, third = (other.folder / "checkpoints" / f"step-{step}" / "shard-00000.safetensors" for step in (2, 3))
    before, after = load_file(second), load_file(third)
    save_file({key: (before if key.startswith("parameter|") else after)[key] for key in after}, third)
    other.compare_with(reference)
    assert other.verdict(FP32) == "diverges @3"
    assert 0.05 < other.largest("weights")[0] < 0.5


@pytest.mark.parametrize(
    ("key", "value", "explained"),
    [
        ("rows_hash", "0", "rows"),
        ("loss", None, "loss by inf"),
        ("grad_norm", 3.0, "gradient norm by "),
    ],
)
def test_each_number_of_a_step_is_compared(pair, key, value, explained):
    reference, other = pair
    path = other.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [line | {key: value} if line["step"] == 3 and key in line else line for line in lines]
    path.write_text("\n".join(map(json.dumps, changed)))
    other.compare_with(reference)
    assert other.verdict(FP32) == "diverges @3"
    assert other.explanation(FP32).startswith(f"step 3 differs in {explained}")


def test_a_missing_checkpoint_is_not_equality(pair):
    reference, other = pair
    (other.folder / "checkpoints" / "step-1" / "manifest.json").unlink()
    other.compare_with(reference)
    assert other.verdict(FP32) == "failed" and other.problem == "manifest.json: is missing"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gears", "single,fsdpp"], "--gears: fsdpp: unknown gear; did you mean 'fsdp'?"),
        (["--gears", "single,ddp:many"], "num_processes=many: must be an integer >= 1, found 'many'"),
        (["--gears", "single:2,fsdp"], '--num_processes=2: 2 ranks, but distributed_type is "NO"; use 1 rank'),
        (["--gears", "fsdp"], "--gears: fsdp: give two or more, such as single,fsdp"),
        (["--gears", "single,fsdp,fsdp:2"], "--gears: duplicate fsdp-2"),
        (["--geers", "single,fsdp"], "usage: python src/parity.py"),
        (["--steps", "few"], "usage: python src/parity.py"),
        (["--steps", "0"], "--steps 0 --weights-every 1: both must be 1 or more"),
        (["train.steps=60"], "train.steps: the comparison sets this key"),
        (["save.every=5"], "save.every: the comparison sets this key"),
        (["optim.lrr=1"], "optim.lrr: unknown key; did you mean 'lr'?"),
        (["adapter.method=lora", "adapter.dropout=0.1"], "adapter.dropout: each rank draws different random numbers"),
        (["model.dropout=true"], "model.dropout: each rank draws different random numbers"),
        (["optim.name=adamw_8bit"], "optim.name: adamw_8bit rounds in blocks of a rank's shard"),
        (["optim.master_weights=bf16", "--gears", "single,fsdp"], "optim.master_weights: bf16 rounds"),
    ],
)
def test_a_user_error_is_one_line(arguments, said, tmp_path):
    with pytest.raises(UserError) as refused:
        script.main([*arguments, f"run.dir={tmp_path}/runs"])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.cold
def test_a_user_error_is_found_without_torch():
    code = "import sys, parity\ntry: parity.main(['--gears', 'fsdp'])\nfinally: print({*sys.argv} & {*sys.modules})"
    outcome = subprocess.run(
        [sys.executable, "-c", code, *HEAVY], cwd=ROOT / "src", capture_output=True, text=True, check=False
    )  # fmt: skip
    assert outcome.stdout == "set()\n" and "give two or more" in outcome.stderr


@pytest.mark.parametrize(
    ("recipe", "steps", "warmup"), [("tiny", 20, 5), ("tiny", 400, 35), ("tiny", 1, 0), ("fsdp_2gpu", 100, 20)]
)
def test_the_warm_up_stays_within_the_steps(recipe, steps, warmup):
    path = ROOT / "recipes" / f"{recipe}.yaml"
    overrides = script.comparison_overrides(script.load_recipe(path), [], steps, 1)
    made = script.load_recipe(path, [*overrides, "run.rehearse=true"])
    assert (made.train.steps, made.schedule.warmup, made.eval.fraction) == (steps, warmup, 0)


@pytest.mark.parametrize(
    ("visible", "gears"),
    [
        ("0", "single,fsdp:1,zero1:1,zero3:1"),
        ("0,1", "single,ddp:2,fsdp:2,zero3:2"),
        ("", "single,ddp:2,fsdp:2,zero3:2"),
    ],
)
def test_the_default_gears_fit_the_machine(monkeypatch, visible, gears):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert script.default_gears() == gears
    assert all(isinstance(gear, Gear) for gear in script.load_gears(gears.split(",")))
