"""Compare tokens per second when preparing an instruction file with Gearbox and with datasets.map.

Usage: python benchmarks/prepare.py FILE [RUNS]

The ways run in turns, each in a fresh process with an empty cache, from the file to mapped tokens with their mask.
Imports and loading the tokenizer are not counted. `gearbox` also checks every row.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
MODEL = ROOT / "models" / "smollm2-135m"


def gearbox(tokenizer, path: str) -> int:
    """Return the number of tokens, prepared by Gearbox."""
    from gearbox.config.loader import load_recipe
    from gearbox.data import corpus

    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml", [f"data.path={path}"])
    documents, _ = corpus.load_corpora(recipe, tokenizer, corpus.Builder(tell=lambda _: None))
    return int(documents.lengths.sum())


def usual(tokenizer, path: str, num_proc: int | None = None) -> int:
    """Return the number of tokens, prepared by datasets.map one row at a time.

    The labels come from the lengths of the chat and of the prompt without the answer.
    """
    import datasets

    def prepare(row):
        question = "\n\n".join(filter(None, [row["instruction"], row["input"]]))
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}

    rows = datasets.load_dataset("json", data_files=path, split="train")
    rows = rows.map(prepare, remove_columns=rows.column_names, num_proc=num_proc)
    return sum(len(ids) for ids in rows.data.column("input_ids").to_pylist())


def without_mask(tokenizer, path: str) -> int:
    """Return the number of tokens, prepared by datasets.map without labels."""
    import datasets

    def prepare(row):
        question = "\n\n".join(filter(None, [row["instruction"], row["input"]]))
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        return {"input_ids": tokenizer.apply_chat_template(chat, return_dict=False)}

    rows = datasets.load_dataset("json", data_files=path, split="train")
    rows = rows.map(prepare, remove_columns=rows.column_names)
    return sum(len(ids) for ids in rows.data.column("input_ids").to_pylist())


WAYS = {
    "gearbox": gearbox,
    "datasets.map": usual,
    "datasets.map, num_proc=2": lambda tokenizer, path: usual(tokenizer, path, num_proc=2),
    "datasets.map, no mask": without_mask,
}


def measure(way: str, path: str) -> None:
    """Print tokens and seconds. Runs in a separate process."""
    import datasets
    from transformers import AutoTokenizer

    import gearbox.data.corpus  # noqa: F401  imports are not counted

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    started = time.perf_counter()
    num_tokens = WAYS[way](tokenizer, path)
    print(json.dumps([num_tokens, time.perf_counter() - started]))


def main(path: str, num_runs: int) -> None:
    """Run every way in turns, and print the rates and ratios."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(num_runs):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, __file__, "--measure", way, path]
                environment = os.environ | {"HF_DATASETS_CACHE": cache}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            num_tokens, seconds = json.loads(done.stdout.splitlines()[-1])
            found[way].append(num_tokens / seconds)
    ours = found["gearbox"]
    print(f"{Path(path).name}, {num_runs} runs each in turns, {len(os.sched_getaffinity(0))} cores: tokens per second")
    for way, rates in found.items():
        ratios = [a / b for a, b in zip(ours, rates, strict=True)]
        print(
            f"{way:<26}{statistics.median(rates):>10,.0f}  ({min(rates):,.0f} to {max(rates):,.0f})"
            + (
                f"   gearbox is {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
                if way != "gearbox"
                else ""
            )
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data" / "alpaca_en_demo.json"
        if not file.is_file():
            sys.exit("skipped: needs a JSON file of instruction, input, output: python benchmarks/prepare.py FILE")
        main(str(file), int(sys.argv[2]) if len(sys.argv) > 2 else 7)
