"""src/check.py prints every finding with its place, and train.py refuses the same at its start."""

import json
import os
import re
import subprocess
import sys

import pytest

import check
from gearbox import ROOT
from gearbox.errors import UserError

pytestmark = pytest.mark.cold
WRONG = ["recipes/tiny.yaml", "optim.lrr=1", "eval.every=900", "batch.row_tokens=9000", "data.path=none.jsonl"]


def python(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )


def test_the_command_prints_findings_and_exits_with_2():
    ended = python("src/check.py", *WRONG, "--config_file=accelerate_configs/ddp.yaml", "--num_processes=5")
    assert (ended.returncode, ended.stderr) == (2, "")
    *lines, verdict = ended.stdout.splitlines()
    assert lines[0].startswith("command line: optim.lrr: unknown key; did you mean 'lr'?")
    assert (
        "command line: hint: batch.row_tokens: rows of 9,000 tokens are longer than the 4,096 positions" in ended.stdout
    )
    assert re.search(r"^recipes/tiny.yaml:40: hint: batch.rows: 8 rows on 5 data-parallel ranks: ", ended.stdout, re.M)
    assert verdict.startswith("recipes/tiny.yaml and accelerate_configs/ddp.yaml: 2 problems, 3 hints (")


def test_the_command_agrees_with_0_and_prints_json():
    assert python("src/check.py").stdout.startswith("recipes/tiny.yaml and accelerate_configs/single.yaml agree (")
    ended = python("src/check.py", *WRONG, "--json")
    found = json.loads(ended.stdout)
    assert ended.returncode == 2 and found["agree"] is False
    assert {*found["findings"][0]} == {"file", "line", "column", "key", "severity", "message"}
    assert "torch" not in python("-X", "importtime", "src/check.py").stderr


def test_training_refuses_what_the_command_finds():
    ended = python("src/train.py", *WRONG)
    found = json.loads(python("src/check.py", *WRONG, "--json").stdout)["findings"]
    problems = [
        f"gearbox: {one['file']}: {one['key']}: {one['message']}" for one in found if one["severity"] == "problem"
    ]
    assert ended.returncode == 2
    assert sorted(ended.stderr.splitlines()) == sorted(problems) and len(problems) == 2


def test_options_are_told_from_flags_and_keys():
    options, words = check.split(
        ["mine.yaml", "--config_file", "fsdp", "--gpu=A100", "optim.lr=1", "--num_processes=2"]
    )
    assert options == {"--config_file": "fsdp", "--gpu": "A100"}
    assert words == ["mine.yaml", "optim.lr=1", "--num_processes=2"]


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        ("--gpu", "--gpu", "needs a value"),
        ("--gpu=Z9", "--gpu", "'Z9' is unknown"),
        ("--config_file none", "none", "unknown gear"),
        ("--lr=1", "--lr=1", "unknown flag; a key of the recipe has no dashes: optim.lr=1"),
        ("a.yaml b.yaml", "", "a.yaml b.yaml: expected [RECIPE]"),
        ("optim.lr 1", "optim.lr", "write optim.lr=1, as one word"),
    ],
)
def test_a_wrong_command_is_json_too(words, key, message, capsys):
    assert check.main(["--json", *words.split()]) == 2
    (one,) = json.loads(capsys.readouterr().out)["findings"]
    assert (one["file"], one["key"], one["severity"]) == ("command line", key, "problem")
    assert one["message"].startswith(message)
    with pytest.raises(UserError):
        check.main(words.split())
