"""Measure memory and time from a file of a million documents to the first step.

Usage: python benchmarks/million.py [DOCUMENTS]

The script runs the same command twice. The first start tokenizes, the second uses the cache. Memory is the sum over
all processes, sampled ten times a second. RSS is resident memory and counts shared pages once per process. PSS is
proportional and counts them once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
WORDS = (ROOT / "LICENSE").read_text(encoding="utf-8").split()


def write_documents(path: Path, num_documents: int) -> None:
    """Write questions and answers of a few to a few hundred words, most of which are short."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_documents):
            length = min(400, int(draw.lognormvariate(3.0, 0.9)) + 1)
            first = draw.randrange(len(WORDS) - length) if length < len(WORDS) else 0
            record = {"instruction": f"Recall passage {number}.", "output": " ".join(WORDS[first : first + length])}
            file.write(json.dumps(record) + "\n")


def start(path: Path, folder: Path) -> None:
    """Run the training script for one step, and print its time and memory."""
    command = [
        sys.executable, "-u", "src/train.py", "recipes/smollm2_135m.yaml", f"data.path={path}",
        f"run.dir={folder}/runs",
        "run.rehearse=true", "batch.row_tokens=2048", "batch.rows=1", "train.steps=1", "schedule.warmup=0",
        "eval.fraction=1e-6", "eval.samples=0",
    ]  # fmt: skip
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    resident = proportional = 0
    output, prepared, first_step = "", 0.0, 0.0
    while process.poll() is None:
        output += (process.stdout.read() or b"").decode()
        first_step = first_step or ("step 1/1" in output and time.perf_counter() - started)
        prepared = prepared or ("Gearbox  recipe" in output and time.perf_counter() - started)
        family = [psutil.Process(process.pid)]
        try:
            family += family[0].children(recursive=True)
            memory = [member.memory_full_info() for member in family]
        except psutil.Error:
            continue
        if not first_step:
            resident = max(resident, sum(m.rss for m in memory))
            proportional = max(proportional, sum(m.pss for m in memory))
        time.sleep(0.1)
    output += (process.stdout.read() or b"").decode()
    for line in output.splitlines():
        if line.startswith(("tokenized", "document", "tokens", "packed rows")):
            print("   ", line.split("; cached in")[0])
    print(
        f"    prepared after {prepared:.1f} s, first step after {first_step:.1f} s; "
        f"peak memory {proportional / 2**30:.2f} GiB (PSS), {resident / 2**30:.2f} GiB (RSS)"
    )
    assert process.returncode == 0 and first_step, output


def main(num_documents: int) -> None:
    """Write the documents, then start training on them twice."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = folder / "documents.jsonl"
        write_documents(path, num_documents)
        print(
            f"{num_documents:,} documents, {path.stat().st_size / 2**20:,.0f} MiB, {len(os.sched_getaffinity(0))} cores"
        )
        for name in ("first start", "second start"):
            print(name)
            start(path, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
