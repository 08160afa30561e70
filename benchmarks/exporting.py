"""Measure the memory that the export of a model takes on rank 0, and compare it with the size of a shard.

Usage: python benchmarks/exporting.py [--weights MILLIONS] [--shard GB]

    --weights MILLIONS  size of the random model (default: 1000)
    --shard GB          most bytes in one file, in units of 10^9 (default: 1; a run has 5)

It writes benchmarks/exporting.md. It exits with 1 if rank 0 ever takes more than a shard above what it held before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import torch  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from gearbox.config.gear import load_gear  # noqa: E402
from gearbox.distributed import process_group  # noqa: E402
from gearbox.model import export  # noqa: E402
from gearbox.sharding.full_parameters import FullParameters  # noqa: E402
from support.experts import TOKENIZER  # noqa: E402
from support.ranks import fork_ranks, launcher_environment  # noqa: E402

LAYER = 12 * 2048**2 + 2 * 2048
"""Weights of a layer of this width, roughly."""
CASES = [("single", 1, torch.float32), ("single", 1, torch.bfloat16), ("fsdp", 2, torch.float32),
         ("fsdp", 2, torch.bfloat16)]  # fmt: skip
PAGE = """# Memory of an export

```bash
python benchmarks/exporting.py
```

A random Llama of about {weights:,} weights in fp32 is exported as after a training, in files of at most {shard:.1f} GB.
A run writes files of at most 5 GB. The memory is the most that rank 0 held during the export, above what it held
before. It is `RssAnon` of `/proc/PID/status`, which leaves out mapped and cached files.

| gear | ranks | saved as | files | GB written | GB above | seconds |
|---|---|---|---|---|---|---|
{rows}

- Machine: {cores} cores of an {processor}, {memory:.0f} GiB, no GPU, other jobs running at times; {date}.
- torch {torch}, transformers {transformers}, safetensors {safetensors}.
"""


def anonymous(process: int) -> int:
    """Return the bytes that only this process holds and no file has."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def export_one(gear_name: str, dtype: torch.dtype, weights: int, folder: Path) -> None:
    """Make a model, sharded under fsdp, and export it. Write what this rank holds before the export to a file."""
    world = process_group.join_process_group(load_gear(ROOT / f"accelerate_configs/{gear_name}.yaml"))
    num_layers = max(1, round((weights - 2 * 32000 * 2048) / LAYER))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(
            vocab_size=32000, hidden_size=2048, intermediate_size=5461, num_hidden_layers=num_layers,
            num_attention_heads=16, num_key_value_heads=16,
        ), dtype=torch.float32)  # fmt: skip
    if gear_name == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.detach().normal_()
    model.own_dropout = {}
    world.barrier()
    if world.rank == 0:
        (folder / "before").write_text(str(anonymous(os.getpid())))
    started = time.perf_counter()
    tensors = FullParameters(model, world, torch.device("cpu"), only_trainable=False)
    export.save(model, tensors, TOKENIZER, "", dtype, folder / "model")
    if world.rank == 0:
        (folder / "seconds").write_text(str(time.perf_counter() - started))
    world.barrier()


def measure(gear_name: str, num_ranks: int, dtype: torch.dtype, weights: int) -> tuple[int, str]:
    """Return the growth of rank 0 in bytes, and a row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder, peak = Path(name), [0]

        def watch(children: list[int]) -> None:
            while (Path(f"/proc/{children[0]}/stat")).read_text().split()[2] != "Z":
                if (folder / "before").exists() and not (folder / "seconds").exists():
                    peak[0] = max(peak[0], anonymous(children[0]))
                time.sleep(0.002)

        gear = f"accelerate_configs/{gear_name}.yaml"
        environment = launcher_environment(ROOT / gear, num_ranks)
        work = lambda: export_one(gear_name, dtype, weights, folder)  # noqa: E731
        codes, output = fork_ranks(num_ranks, environment, work, watch)
        assert set(codes) == {0}, output[-3000:]
        files = [*(folder / "model").glob("*.safetensors")]
        written = sum(path.stat().st_size for path in files) / 1e9
        grown = peak[0] - int((folder / "before").read_text())
        seconds = float((folder / "seconds").read_text())
    kind = str(dtype).removeprefix("torch.")
    row = f"| {gear_name} | {num_ranks} | {kind} | {len(files)} | {written:.2f} | {grown / 1e9:.2f} | {seconds:.0f} |"
    print(row, flush=True)
    return grown, row


def main() -> int:
    """Measure all cases, write the page, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", type=float, default=1000, metavar="MILLIONS")
    parser.add_argument("--shard", type=float, default=1, metavar="GB")
    given = parser.parse_args()
    weights, export.SHARD_BYTES = round(given.weights * 1e6), round(given.shard * 1e9)
    measured = [measure(gear, ranks, dtype, weights) for gear, ranks, dtype in CASES]
    processor = next(line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines()
                     if line.startswith("model name"))  # fmt: skip
    packages = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    page = PAGE.format(
        weights=weights, shard=given.shard, rows="\n".join(row for _, row in measured), cores=os.cpu_count(),
        processor=processor, memory=psutil.virtual_memory().total / 2**30, date=datetime.now(UTC).date(), **packages,
    )  # fmt: skip
    (ROOT / "benchmarks/exporting.md").write_text(page)
    return int(max(grown for grown, _ in measured) > export.SHARD_BYTES)


if __name__ == "__main__":
    sys.exit(main())
