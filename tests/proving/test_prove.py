"""Test src/prove.py: a new family is proved, a killed command resumes, and a broken gear is reported."""

import json
import os
import re
import signal
import time
import xml.etree.ElementTree as ET

import psutil
import pytest
import transformers

import prove as script
import train
from gearbox.proving import prover
from gearbox.proving.record import read_proof
from gearbox.sharding import sharded_state
from support.breakages import averaged_per_micro_batch
from support.documents import make_chats

pytestmark = pytest.mark.ranks
SMALL = ("batch.rows=4", "batch.row_tokens=64", "batch.micro_rows=1")


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe for a family that no file of the repository names, with its own chats."""
    config = transformers.Starcoder2Config(hidden_size=256, num_attention_heads=8, num_key_value_heads=1)
    config.save_pretrained(tmp_path / "model")
    make_chats(tmp_path / "chats.jsonl")
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"model: {{name: {tmp_path}/model}}\ndata: {{path: {tmp_path}/chats.jsonl}}\n"
        "batch: {rows: 8, row_tokens: 512, micro_rows: 2}\noptim: {name: adamw_8bit, lr: 1e-3}\n"
        f"schedule: {{warmup: 20}}\ntrain: {{epochs: 2}}\nrun: {{dir: {tmp_path}/runs}}\n"
    )
    return path


def rows(page: str) -> dict[str, list[str]]:
    """Return the cells of the page's table by gear."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def kill_after_the_first_gear(arguments: list[str], record) -> None:
    """Run the command in a forked child, and kill it once one gear is recorded. Its ranks must end too."""
    child = os.fork()
    if child == 0:
        try:
            script.main(arguments)
        finally:
            os._exit(0)
    while (found := read_proof(record)) is None or not found.gears:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it could be killed"
        time.sleep(0.01)
    while not (ranks := psutil.Process(child).children()):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []


def test_a_killed_command_resumes_and_proves_a_new_family(recipe, tmp_path, capsys):
    arguments = [str(recipe), "--gears", "single,fsdp,zero2", "--page", f"{tmp_path}/docs/mine.md", *SMALL]
    record = tmp_path / "runs/proof-mine/proof.json"
    kill_after_the_first_gear(arguments, record)
    assert script.main(arguments) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "resuming: 1 of 3 gears are done" in said and "1 of 3: single" not in said
    page, badge = (tmp_path / "docs/mine.md").read_text(), (tmp_path / "docs/mine.svg").read_text()
    assert "proved: 3 gears" in ET.fromstring(badge).findtext("{http://www.w3.org/2000/svg}title")
    table = rows(page)
    assert [*table] == ["single", "fsdp", "zero2"]
    for gear, origin in (("single", "zero2-2"), ("fsdp", "single-1"), ("zero2", "fsdp-2")):
        _, result, _, _, resumed, moved, _, _ = table[gear]
        assert (result, resumed) == ("ran", "bit for bit"), gear
        assert moved.startswith(f"`{origin}`: "), moved
    proof = read_proof(record)
    assert proof.facts.family == "starcoder2"
    for one in proof.gears[1:]:
        assert 0 < max(one.parity.largest.values()) < 1e-3, "two ranks round differently from one"
        assert one.exported.num_tensors > 20 and one.logits < 1e-4
    assert "Changed: `optim.name=adamw`" in page and "of recipes/tiny (bytes)" in page
    assert re.search(r"<\|assistant\|>«\w+<\|end\|>»", page)
    assert not list((tmp_path / "runs/proof-mine").rglob("*.safetensors")), "large files are deleted"


def test_a_stopped_command_says_that_it_can_resume(recipe, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(prover.forked_ranks, "fork_ranks", stop)
    with pytest.raises(KeyboardInterrupt):
        script.main([str(recipe), "--gears", "single,fsdp", *SMALL])
    assert "stopped; the same command resumes" in capsys.readouterr().out


def test_broken_gears_are_reported_and_stop_no_other(recipe, tmp_path, monkeypatch, capsys):
    """Train with another loss under ddp, and restore no optimizer state under fsdp."""
    usual = train.main

    def breaking(arguments, gear):  # in a forked rank, so that nothing is broken afterwards
        if gear.name == "ddp":
            averaged_per_micro_batch(monkeypatch)
        if gear.name == "fsdp":
            monkeypatch.setattr(sharded_state, "_make_state", lambda *_: None)
        return usual(arguments, gear)

    monkeypatch.setattr(train, "main", breaking)
    code = script.main([str(recipe), "--gears", "single,ddp:2,fsdp,tp", *SMALL])
    page = (tmp_path / "runs/proof-mine/proof.md").read_text()
    assert code == 1, page
    assert ">failed: 2 of 3 gears<" in (tmp_path / "runs/proof-mine/proof.svg").read_text()
    table = rows(page)
    results = {gear: re.sub(r" \[\d+\]", "", cells[1]) for gear, cells in table.items()}
    assert results == {"single": "ran", "ddp": "**failed**", "fsdp": "**failed**", "tp": "refused"}
    assert "step 1 differs in loss" in page and "resumed, step 3 differs" in page
    assert table["fsdp"][4] not in ("bit for bit", "-")
    assert "failed: 2 of 3 gears" in capsys.readouterr().out
    record = json.loads((tmp_path / "runs/proof-mine/proof.json").read_text())
    assert record["is_complete"], "the next command starts over"
