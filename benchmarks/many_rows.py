"""Measure starts on ten million rows: time to the first step, and memory of each rank. Exit with 1 above the limits.

Usage: python benchmarks/many_rows.py [DOCUMENTS] [FOLDER]

FOLDER keeps the documents and the cache, to measure only the second starts again.

Each document is a row (data.packing=false). The first start tokenizes and arranges them, the second reads the cache,
and the third does so on two ranks. Memory is what a rank does not share with a file (RssAnon), ten times a second. The
same starts on 1,000 documents give what the model and the libraries need.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
LIMIT_BYTES, LIMIT_SECONDS = 300e6, 10.0
WORDS = (ROOT / "LICENSE").read_text(encoding="utf-8").split()
SINGLE = [sys.executable, "-u", "src/train.py"]
TWO = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", "accelerate_configs/ddp.yaml",
       "--num_processes", "2", "src/train.py"]  # fmt: skip


class Start(NamedTuple):
    """A measured start."""

    seconds: float
    """Until the first step has ended."""
    memory: int
    """Most bytes that a rank did not share with a file."""


def write_documents(path: Path, num_documents: int) -> None:
    """Write a short document on each line."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_documents):
            first = number * 7 % (len(WORDS) - 8)
            file.write(f"{number} {' '.join(WORDS[first : first + 2 + number % 5])}\n")


def start(command: list[str], path: Path, folder: Path) -> Start:
    """Train one step, and print its time and the memory of the largest rank."""
    command = [
        *command, "recipes/smollm2_135m.yaml", f"data.path={path}", f"run.dir={folder}/runs", "run.rehearse=true",
        "data.text_unit=line", "data.packing=false", "batch.row_tokens=128", "batch.rows=2", "batch.micro_rows=1",
        "train.steps=1", "schedule.warmup=0", "eval.fraction=1e-6", "eval.samples=0", "save.every=0",
    ]  # fmt: skip
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    output, seconds, memory = "", 0.0, 0
    while process.poll() is None:
        output += (process.stdout.read() or b"").decode()
        seconds = seconds or ("step 1/1" in output and time.perf_counter() - started)
        for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            try:
                words = member.cmdline()
                if "src/train.py" in words and not any("accelerate" in word for word in words[:3]):
                    status = Path(f"/proc/{member.pid}/status").read_text()
                    memory = max(memory, int(status.partition("RssAnon:")[2].split()[0]) * 1024)
            except (psutil.Error, OSError, IndexError):
                continue
        time.sleep(0.1)
    output += (process.stdout.read() or b"").decode()
    assert process.returncode == 0 and seconds, output
    for line in output.splitlines():
        if line.startswith(("tokenized", "rows ")):
            print("   ", line.split("; cached in")[0])
    print(f"    first step after {seconds:.1f} s; {memory / 1e6:,.0f} MB of the largest rank", flush=True)
    return Start(seconds, memory)


def main(num_documents: int, folder: Path) -> int:
    """Start on few and on many documents. Return 1 if a second start is above a limit."""
    many, few = folder / f"{num_documents}.txt", folder / "few.txt"
    if not many.exists():
        write_documents(few, 1000)
        write_documents(many, num_documents)
        print(f"{num_documents:,} documents, {many.stat().st_size / 1e6:,.0f} MB, {os.cpu_count()} cores")
        start(SINGLE, few, folder)
        start(SINGLE, many, folder)
    over = []
    for name, command in (("1 rank", SINGLE), ("2 ranks", TWO)):
        base, found = start(command, few, folder), start(command, many, folder)
        above = found.memory - base.memory
        print(f"second start, {name}: {found.seconds:.1f} s; {above / 1e6:,.0f} MB a rank above 1,000 documents")
        over.append(above > LIMIT_BYTES or found.seconds > LIMIT_SECONDS)
    print(f"limits: {LIMIT_SECONDS:.0f} s and {LIMIT_BYTES / 1e6:.0f} MB")
    return int(any(over))


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    if len(sys.argv) > 2:
        Path(sys.argv[2]).mkdir(exist_ok=True)
        sys.exit(main(count, Path(sys.argv[2])))
    with tempfile.TemporaryDirectory(dir=ROOT / "models") as scratch:
        sys.exit(main(count, Path(scratch)))
