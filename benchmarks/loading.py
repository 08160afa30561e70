"""Measure the host memory that loading a model takes, on 1, 2 and 4 ranks. Exit with 1 above the limits.

Usage: python benchmarks/loading.py [GEAR ...]

It takes 5 minutes and 10 GB of memory.

Two random models are written in bf16, in several files: a Llama, and a Mixtral whose files have one matrix for each
expert. Each rank measures its own memory (RssAnon) every millisecond while it loads the model, and under FSDP until
the engine has its shards. What it holds then is its share: on a GPU machine that is on the GPU. What it needed above
that, for a time, is host memory. The files are mapped, and all ranks of a machine share their pages.

Host memory of a machine = size of the files + what all ranks needed above their shares. Only FSDP needs it on the host.
The other engines load and convert each tensor on the GPU, and ZeRO-3 gathers it there in two copies.
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
from gearbox.config.gear import Gear, load_gear  # noqa: E402
from gearbox.config.job import Job  # noqa: E402
from gearbox.distributed import engine  # noqa: E402
from gearbox.sharding import sharded_state  # noqa: E402
from gearbox.training import session  # noqa: E402
from support.documents import make_chats  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

LIMIT = 1.2  # times the size of the files
LIMIT_ABOVE = 2.1  # times the largest tensor in fp32
NUM_RANKS = {
    "single": (1,), "ddp": (2, 4), "fsdp": (2, 4), "fsdp_offload": (2,), "hsdp": (4,), "zero2": (2,), "zero3": (2, 4),
    "ulysses": (2,), "tp": (2,), "fsdp_tp": (4,), "pp": (2, 4),
}  # fmt: skip
HEADS = "| gear | ranks | share of a rank, GiB | needed above its share, GiB | host memory / files | seconds |"
WITHOUT_MIXTRAL = ("ulysses", "tp", "fsdp_tp", "pp")  # these gears refuse it
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


def write(config: transformers.PretrainedConfig, path: Path) -> None:
    """Write random weights in bf16, with the tokenizer of recipes/tiny, in a process of its own.

    The ranks are forked from this process, and would use again the memory that it has freed.
    """
    child = os.fork()
    if child == 0:
        torch.set_default_dtype(torch.bfloat16)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size="400MB")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for file in (ROOT / "recipes/tiny").iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (path / file.name).write_bytes(file.read_bytes())


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
    """Measure each gear with both models, and print a table. Return 1 if one is above a limit."""
    session.build_engine = measured
    ratios, multiples = [], []
    with tempfile.TemporaryDirectory(dir=ROOT / "models") as name:
        folder = Path(name)
        make_chats(folder / "chats.jsonl")
        for config in (LLAMA, MIXTRAL):
            path = folder / config.model_type
            write(config, path)
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            largest = 4 * config.vocab_size * config.hidden_size
            print(f"## {config.model_type}: {size / 2**30:.2f} GiB in bf16\n\n{HEADS}")
            print("|---|---|---|---|---|---|")
            chosen = [gear for gear in NUM_RANKS if gear in gears or not gears]
            for gear in chosen if config is LLAMA else [gear for gear in chosen if gear not in WITHOUT_MIXTRAL]:
                for num_ranks in NUM_RANKS[gear]:
                    found = run(gear, num_ranks, path, folder)
                    above = [one["peak"] - one["held"] for one in found]
                    share, seconds = (max(one[key] for one in found) for key in ("share", "seconds"))
                    cuts_on_host = load_gear(ROOT / f"accelerate_configs/{gear}.yaml").engine == "fsdp"
                    ratios.append((size + sum(above) * cuts_on_host) / size)
                    multiples.append(max(above) / largest)
                    print(
                        f"| `{gear}` | {num_ranks} | {share / 2**30:.2f} | {max(above) / 2**30:.2f} | {ratios[-1]:.2f} "
                        f"| {seconds:.1f} |", flush=True,
                    )  # fmt: skip
            print()
    print(f"Most host memory: {max(ratios):.2f} times the files; the limit is {LIMIT}.")
    print(f"Most above a share: {max(multiples):.2f} times the largest tensor in fp32; the limit is {LIMIT_ABOVE}.")
    return int(max(ratios) > LIMIT or max(multiples) > LIMIT_ABOVE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
