"""Start every gear cold, with the command of the README."""

import json
import shlex

import pytest
import yaml

from gearbox import ROOT
from gearbox.launch.environment import CALLER_RELOADS
from support.cold import last_line, shell, small
from support.gears import model_for, why_no_disk_operations

pytestmark = pytest.mark.cold

FEWER = {"ddp": 2}  # a rank takes 5 s to import; other gears start cold with the 4 ranks of their files
RELOADING = ("single", "fsdp", "zero3")  # one of each export; a fresh process takes 5 s
GEARS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("gear", GEARS)
def test_every_gear(tmp_path, chats, gear):
    if gear == "zero3_nvme" and (reason := why_no_disk_operations()):
        pytest.skip(reason)
    flags = f"--num_processes {FEWER[gear]}" if gear in FEWER else ""
    arguments = shlex.join([*small(tmp_path, chats).split(), *model_for(gear)])
    caller = "" if gear in RELOADING else f"{CALLER_RELOADS}=1 "
    outcome = shell(
        f"{caller}accelerate launch --config_file accelerate_configs/{gear}.yaml {flags} src/train.py {arguments}"
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    folder = tmp_path / "runs" / f"tiny-{gear}"
    assert f"model saved to {folder}/model" in last_line(outcome.stdout)
    assert sorted(path.name for path in folder.iterdir()) == [
        "answers.jsonl", "base", "checkpoints", "lock", "loss.png", "metrics.jsonl", "model", "report.html",
        "resolved.yaml", "run.json", "run.log", "status.json", "tensorboard", "trackers.json",
    ]  # fmt: skip
    in_file = yaml.safe_load((ROOT / f"accelerate_configs/{gear}.yaml").read_text())["num_processes"]
    ranks = FEWER.get(gear, in_file)
    assert f"ranks{ranks:>20}" in outcome.stdout
    counts = {"held-out loss": 2, "before": 2, "after": 2, "no GPU: running": 1}
    for line, count in (counts | {"reloaded in a fresh process": int(gear in RELOADING)}).items():
        assert outcome.stdout.count(line) == count, line
    assert "Warning" not in outcome.stderr, outcome.stderr
    if "zero" not in gear and gear != "ulysses":  # these import DeepSpeed after the plan, and hold up to 10 % more
        steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        memory = [line["memory_predicted_bytes"] / line["memory_peak_bytes"] for line in steps if "lr" in line]
        assert 0.9 < memory[-1] < 1.1
