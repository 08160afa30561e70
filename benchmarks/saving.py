"""Measure the cost of a checkpoint: the stall of asynchronous and synchronous saves, and the memory of a save.

Usage: python benchmarks/saving.py

It needs `make smollm2`, and only prints figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import pytest  # noqa: E402

from gearbox.checkpoint import checkpointer  # noqa: E402
from gearbox.checkpoint.train_state import TrainState  # noqa: E402
from support.documents import make_chats  # noqa: E402
from support.ranks import run_ranks, skip_loading_back  # noqa: E402

RUNS = 3
BILLION = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 16,
    "tie_word_embeddings": True, "dtype": "bfloat16", "pad_token_id": 0, "eos_token_id": 3,
}  # fmt: skip

skip_loading_back(pytest.MonkeyPatch())
begin = checkpointer.Checkpointer._start_save


def synchronous(self: checkpointer.Checkpointer, state: TrainState) -> None:
    """Save, and make training wait for it."""
    begin(self, state)
    self._wait()


def stalls(folder: Path, name: str) -> list[float]:
    """Return the stall in seconds of each save but the first and the last.

    The first save allocates the buffer, and all ranks wait for the last.
    """
    outcome = run_ranks(
        "fsdp",
        ["recipes/smollm2_135m.yaml", f"data.path={folder}/chats.jsonl", f"run.dir={folder}/runs", f"run.name={name}",
         "train.steps=9", "schedule.warmup=1", "batch.rows=2", "batch.row_tokens=64", "eval.samples=0",
         "eval.every=0", "eval.fraction=0", "save.every=2", "run.hang_timeout=600"],
        folder / "runs", 2,
    )  # fmt: skip
    assert set(outcome.codes) == {0}, outcome.output[-3000:]
    found = [line["save_stall_seconds"] for line in outcome.lines("save_stall_seconds")]
    seconds = [line["save_seconds"] for line in outcome.lines("save_seconds")]
    print(f"{name}: stalls {found}, until complete {seconds}", flush=True)
    return found[1:-1]


def memory(folder: Path) -> None:
    """Print the size of each rank's shard and the largest growth of its memory during a save.

    The model has a billion random weights.
    """
    model = folder / "billion"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(BILLION))
    for file in (ROOT / "recipes/tiny").iterdir():
        if file.name != "config.json":
            (model / file.name).write_bytes(file.read_bytes())

    def watched(self: checkpointer.Checkpointer, state: TrainState) -> None:
        assert not self.staging.in_foreground, "too little memory is free to measure a save in the background"
        me, before, peak = psutil.Process(), psutil.Process().memory_info().rss, [0]

        def look() -> None:
            while self._step:
                peak[0] = max(peak[0], me.memory_info().rss)
                time.sleep(0.01)

        begin(self, state)
        thread = threading.Thread(target=look)
        thread.start()
        self._wait()
        thread.join()
        shard = self.staging.num_bytes
        grown = (peak[0] - before) / 2**30
        print(f"rank {self.world.rank}: shard {shard / 2**30:.2f} GiB, grew by {grown:.2f} GiB", flush=True)

    checkpointer.Checkpointer._start_save = watched
    outcome = run_ranks(
        "fsdp",
        ["recipes/tiny.yaml", f"model.name={model}", f"data.path={folder}/chats.jsonl", f"run.dir={folder}/runs",
         "run.name=billion", "optim.master_weights=bf16", "train.steps=1", "schedule.warmup=0", "batch.rows=2",
         "batch.micro_rows=1", "batch.row_tokens=128", "eval.samples=0", "eval.fraction=0", "eval.every=0"],
        folder / "runs", 2,
    )  # fmt: skip
    checkpointer.Checkpointer._start_save = begin
    print("\n".join(line for line in outcome.output.splitlines() if "shard" in line or "parameters on" in line))
    assert set(outcome.codes) == {0}, outcome.output[-3000:]


def main() -> None:
    """Measure the stalls of both kinds of save in turns, then the memory."""
    with tempfile.TemporaryDirectory(dir=ROOT / "models") as name:
        folder = Path(name)
        make_chats(folder / "chats.jsonl")
        ours, theirs = [], []
        for number in range(RUNS):
            ours += stalls(folder, f"asynchronous-{number}")
            checkpointer.Checkpointer._start_save = synchronous
            theirs += stalls(folder, f"synchronous-{number}")
            checkpointer.Checkpointer._start_save = begin
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(f"stall: {mine:.3f} s asynchronous, {other:.3f} s synchronous: {mine / other:.0%}")
        memory(folder)


if __name__ == "__main__":
    main()
