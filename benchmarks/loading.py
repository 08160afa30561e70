"""Measure the host memory that loading a model takes, on 1, 2 and 4 ranks. Exit with 1 above the limits.

Usage: python benchmarks/loading.py [GEAR ...]

Two random models are written in bf16, in several files: a Llama, and a Mixtral whose files have one matrix for each
expert. Each rank measures its own memory (RssAnon) every millisecond while it loads the model, and under FSDP until
the engine has its shards. What it holds then is its share: on a GPU machine that is on the GPU. What it needed above
that, for a time, is host memory. The files are mapped, and all ranks of a machine share their pages.

Host memory of a machine = size of the files + what all ranks needed above their shares.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import torch  # noqa: E402
import transformers  # noqa: E402

from gearbox import processes  # noqa: E402
from gearbox.config.gear import Gear  # noqa: E402
from gearbox.config.job import Job  # noqa: E402
from gearbox.distributed import engine, sharded_state  # noqa: E402
from gearbox.training import session  # noqa: E402
from support.documents import make_chats  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

LIMIT = 1.2  # times the size of the files
GEARS = {
    "single": (1,), "ddp": (2, 4), "fsdp": (2, 4), "fsdp_offload": (2,), "hsdp": (4,), "zero2": (2,), "zero3": (2, 4),
    "tp": (2,), "fsdp_tp": (4,), "ulysses": (2,), "ring": (2,), "pp": (2, 4),
}  # fmt: skip
SIZES = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000}
LLAMA = transformers.LlamaConfig(**SIZES, intermediate_size=4096, num_hidden_layers=26, tie_word_embeddings=False)
MIXTRAL = transformers.MixtralConfig(**SIZES, intermediate_size=1024, num_hidden_layers=16, num_local_experts=8)
build, prepare = session.build_engine, engine.prepare


def anonymous() -> int:
    """Return the bytes of memory that this process does not share with a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def trimmed() -> int:
    """Return the same after giving free memory back."""
    gc.collect()
    processes.return_free_memory()
    return anonymous()


def measured(job: Job, *others: object) -> None:
    """Build the engine until it has the weights, print what that took, and end this rank."""
    before, peak, is_done = trimmed(), [0], threading.Event()

    def look() -> None:
        while not is_done.wait(0.001):
            peak[0] = max(peak[0], anonymous())

    def finish(model: torch.nn.Module) -> None:
        seconds = time.perf_counter() - started
        is_done.set()
        looking.join()
        held = trimmed()
        shards = [sharded_state.shard_of(name, p) for name, p in model.named_parameters()]
        share = sum(shard.local_numel * shard.parameter.element_size() for shard in shards)
        found = {"held": held - before, "peak": max(peak[0], held) - before, "share": share, "seconds": seconds}
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        print(f"MEASURED {json.dumps(found)}", flush=True)
        os._exit(0)

    def prepared(gear: Gear, accelerator: object, model: torch.nn.Module, *others: object) -> None:
        if gear.engine != "fsdp":
            finish(model)
        finish(prepare(gear, accelerator, model, *others)[0])

    engine.prepare = prepared
    looking = threading.Thread(target=look)
    looking.start()
    started = time.perf_counter()
    build(job, *others)


def run(gear: str, num_ranks: int, model: Path, folder: Path) -> list[dict[str, float]]:
    """Load the model under a gear, and return what each rank measured."""
    outcome = run_ranks(
        gear,
        ["recipes/tiny.yaml", f"model.name={model}", "model.init=pretrained", f"data.path={folder}/chats.jsonl",
         "run.name=loading", "run.rehearse=false", "optim.master_weights=fp32", "train.steps=1", "schedule.warmup=0",
         "batch.rows=4", "batch.micro_rows=1", "batch.row_tokens=128", "eval.samples=0", "eval.fraction=0",
         "eval.every=0"],
        folder / "runs", num_ranks,
    )  # fmt: skip
    lines = [line for line in outcome.output.splitlines() if line.startswith("MEASURED ")]
    assert len(lines) == num_ranks, outcome.output[-3000:]
    return [json.loads(line.removeprefix("MEASURED ")) for line in lines]


def main(gears: list[str]) -> int:
    """Measure each gear with both models, and print a table. Return 1 if one is above the limit."""
    session.build_engine = measured
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=ROOT / "models") as name:
        folder = Path(name)
        make_chats(folder / "chats.jsonl")
        for config in (LLAMA, MIXTRAL):
            with torch.device("cpu"):
                torch.set_default_dtype(torch.bfloat16)
                model = transformers.AutoModelForCausalLM.from_config(config)
                torch.set_default_dtype(torch.float32)
            path = folder / config.model_type
            model.save_pretrained(path, max_shard_size="400MB")
            del model
            for file in (ROOT / "recipes/tiny").iterdir():
                if "token" in file.name or file.name.endswith("jinja"):
                    (path / file.name).write_bytes(file.read_bytes())
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            print(f"{config.model_type}: {size / 2**30:.2f} GiB in bf16, trained in fp32\n")
            print("| gear | ranks | share of a rank, GiB | needed above its share, GiB | host memory / files | seconds |")
            print("|---|---|---|---|---|---|")
            for gear, counts in GEARS.items():
                for num_ranks in counts if not gears or gear in gears else ():
                    found = run(gear, num_ranks, path, folder)
                    above = [one["peak"] - one["held"] for one in found]
                    share, seconds = (max(one[key] for one in found) for key in ("share", "seconds"))
                    ratio = (size + sum(above)) / size
                    worst = max(worst, ratio)
                    print(
                        f"| `{gear}` | {num_ranks} | {share / 2**30:.2f} | {max(above) / 2**30:.2f} | {ratio:.2f} "
                        f"| {seconds:.1f} |  held {max(one['held'] for one in found) / 2**30:.2f}", flush=True,
                    )  # fmt: skip
    print(f"\nThe most is {worst:.2f} times the files; the limit is {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
