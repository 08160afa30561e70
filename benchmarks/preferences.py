"""Train the same pairs by DPO in Gearbox and in TRL, in turns, and write benchmarks/preferences.md.

python benchmarks/preferences.py FILE [--rounds N] [--pairs N] [--systems A,B]

FILE is a JSON list of instruction, input and output. The chosen answer is the output, and the rejected one its
beginning or the answer of another record. It trains SmolLM2-135M by LoRA, in fp32, on one core that all share. A step
trains all pairs of its round. Run `make smollm2` first. The first run installs TRL into .peers/, as `make bench` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers" / "runners")]

STEPS, LR, LONGEST, ROW_TOKENS = 4, 1e-4, 2400, 4096  # the longest pair in characters; tokens of the only row
TOLERANCE = 1e-4
SYSTEMS = {
    "gearbox": "Gearbox",
    "trl": "TRL, precomputed reference",
    "trl-live": "TRL as it comes",
    "gearbox-kto": "Gearbox, KTO",
}
COLUMNS = (
    *("system", "pairs / CPU s", "step, CPU s", "reference pass, CPU s", "tokens of a step", "peak GB"),
    *("Gearbox is faster by", "leaner by", "losses differ by"),
)
RESULT = ROOT / "benchmarks" / "preferences.md"
TEMPLATE = (
    "{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + "
    "m['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
"""ChatML that ends with the end of a turn, so that both train the same tokens of an answer."""
INTRODUCTION = """# Speed and memory of DPO

Measured by `benchmarks/preferences.py`, in `make bench FILE=alpaca.json`.

- Run: SmolLM2-135M, LoRA of rank 16 on all linear layers, fp32, one thread on one core. Each system trains the same
  pairs from the same first values, and takes its turn in each round. All pairs of a round are one batch.
- Rates are pairs per CPU second of the steps after the first. The reference pass is measured apart, once per run. TRL
  as it comes computes it again in each step.
- Checkpointing is off in both. TRL pads the answers to the longest one: its `padding_free` is switched off in this
  version. The tokens of a step include padding, which is a large part of TRL's.
- Ratios are the least and the largest of the rounds. Losses are compared at each step but the last.
"""
Sample = dict[str, Any]


def pairs_of(file: Path, number: int, seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return pairs of a file, drawn by the seed. Half of the rejected answers are cut, and half belong to others."""
    draw = random.Random(seed)
    records = [one for one in json.loads(file.read_text(encoding="utf-8")) if one["output"].strip()]
    draw.shuffle(records)
    pairs = []
    for record, other in zip(records[::2], records[1::2], strict=False):
        question = "\n\n".join(filter(None, [record["instruction"], record.get("input")]))
        words, text = record["output"].split(" "), record["output"].strip()
        rejected = other["output"].strip() if len(pairs) % 2 or len(words) < 4 else " ".join(words[: len(words) // 2])
        if len(text) + len(rejected) + 2 * len(question) > LONGEST:
            continue
        sides = {"prompt": ("user", question), "chosen": ("assistant", text), "rejected": ("assistant", rejected)}
        pairs.append({key: [{"role": role, "content": content}] for key, (role, content) in sides.items()})
    return pairs[:number]


def write_model(folder: Path) -> None:
    """Write the model in fp32, with the template of both systems."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = ROOT / "models" / "smollm2-135m"
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def start_equally() -> None:
    """Make every LoRA matrix of a shape start with the same numbers, in any system."""
    import torch

    def fill(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tensor.numel())
        bound = tensor.shape[1] ** -0.5
        with torch.no_grad():
            values = (torch.rand(tensor.shape, generator=generator) * 2 - 1) * bound
            return tensor.copy_(values.to(tensor.dtype))

    torch.nn.init.kaiming_uniform_ = fill  # type: ignore[assignment]


def timed(owner: Any, name: str, seconds: dict[str, float]) -> None:
    """Add the CPU time inside a function to `seconds`."""
    usual = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return usual(*args, **kwargs)
        finally:
            seconds["reference"] = seconds.get("reference", 0.0) + time.process_time() - began

    setattr(owner, name, call)


def train_here(settings: Sample, objective: str) -> None:
    """Train with Gearbox."""
    import runpy

    import probe

    seconds: dict[str, float] = {}
    scratch = Path(settings["scratch"])

    def add_losses(steps: list[dict[str, float]]) -> None:
        lines = (scratch / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for line in (line for line in map(json.loads, lines) if "grad_norm" in line):  # the last comes too late
            steps[line["step"] - 1]["loss"] = line["loss"]
        steps[0] |= seconds

    probe.start(add_losses)
    recipe = {
        "model": {"name": settings["model"]},
        "adapter": {"method": "lora", "r": 16, "alpha": 32},
        "data": {"path": settings["pairs"]},
        "batch": {"rows": 1, "row_tokens": ROW_TOKENS * (1 + (objective == "kto")), "micro_rows": 1},
        "optim": {"lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.95]},
        "schedule": {"name": "constant"},
        "train": {"objective": objective, "steps": STEPS},
        "eval": {"fraction": 0, "samples": 0},
        "save": {"every": 0},
        "run": {"dir": settings["scratch"], "name": "run", "resume": "never"},
    }
    (scratch / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML, too
    sys.path.insert(0, str(ROOT / "src"))
    from gearbox.training import comparing

    timed(comparing, "_complete", seconds)
    sys.argv = ["src/train.py", str(scratch / "recipe.yaml")]
    runpy.run_path(str(ROOT / "src" / "train.py"), run_name="__main__")


def train_in_trl(settings: Sample, precompute: bool) -> None:
    """Train with TRL's DPOTrainer, in TRL's own environment."""
    import probe

    seconds: dict[str, float] = {}

    def add_losses(steps: list[dict[str, float]]) -> None:
        for step in steps:
            step["loss"] = float("nan")
        for step, line in zip(steps, trainer.state.log_history, strict=False):
            step["loss"] = line["loss"]
        steps[0] |= seconds

    probe.start(add_losses)
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    timed(DPOTrainer, "_precompute_ref_logps", seconds)
    lines = Path(settings["pairs"]).read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    arguments = DPOConfig(
        output_dir=settings["scratch"],
        per_device_train_batch_size=len(pairs),
        max_length=ROW_TOKENS,
        max_steps=STEPS,
        learning_rate=LR,
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        precompute_ref_log_probs=precompute,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = DPOTrainer(
        settings["model"],
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        train_dataset=Dataset.from_list(pairs),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()


def sample(name: str, pairs: Path, model: Path) -> Sample:
    """Run a system once in its own process on one core, and return the figures of the run."""
    from peers import __main__ as bench
    from peers import environments

    with tempfile.TemporaryDirectory() as scratch:
        settings = {"scratch": scratch, "result": f"{scratch}/result.json", "steps": STEPS, "pad_token": -1,
                    "pairs": str(pairs), "model": str(model), "system": name}  # fmt: skip
        path = Path(scratch) / "settings.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        python = environments.python_of("trl" if name.startswith("trl") else "")
        core = str(max(os.sched_getaffinity(0)))
        variables = os.environ | bench.VARIABLES | {"HF_HOME": scratch}  # so that no reference is found
        command = ["taskset", "--cpu-list", core, str(python), __file__, str(path), "--inside"]
        done = subprocess.run(command, env=variables, cwd=scratch, capture_output=True, text=True, check=False)
        if not Path(settings["result"]).is_file():
            sys.exit(f"{name}: {(done.stderr or done.stdout)[-2000:]}")
        found = json.loads(Path(settings["result"]).read_text(encoding="utf-8"))
    steps, num_pairs = found["steps"], len(pairs.read_text(encoding="utf-8").splitlines())
    return {
        "system": name,
        "step": (steps[-1]["cpu"] - steps[0]["cpu"]) / (STEPS - 1),
        "pairs": num_pairs,
        "reference": steps[0].get("reference", 0.0),
        "peak": found["peak_bytes"] / 1e9,
        "tokens": steps[1]["tokens"],
        "losses": [step["loss"] for step in steps[:-1]],
        "load": os.getloadavg()[0],
    }


def page(samples: list[Sample], facts: str) -> str:
    """Return the tables."""
    of = {name: [one for one in samples if one["system"] == name] for name in SYSTEMS}
    ours = {one["round"]: one for one in of["gearbox"]}
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
    ]
    for name, runs in of.items():
        if not runs:
            continue
        rates = [one["pairs"] / one["step"] for one in runs]
        cells = [SYSTEMS[name], f"{statistics.median(rates):.3f} ({min(rates):.3f} to {max(rates):.3f})"]
        cells += [f"{statistics.median(one[key] for one in runs):.1f}" for key in ("step", "reference")]
        cells += [f"{statistics.median(one['tokens'] for one in runs):,.0f}"]
        cells += [f"{max(one['peak'] for one in runs):.2f}"]
        if name.startswith("trl"):
            mine = [ours[one["round"]] for one in runs]
            for key in ("step", "peak"):
                ratios = [one[key] / other[key] for one, other in zip(runs, mine, strict=True)]
                cells.append(f"{min(ratios):.2f} x to {max(ratios):.2f} x")
            cells.append(f"{max(worst(a, b) for a, b in zip(runs, mine, strict=True)):.0e}")
        lines.append(f"| {' | '.join([*cells, *[''] * (9 - len(cells))])} |")
    return "\n".join([INTRODUCTION, facts, "", *lines, ""])


def worst(a: Sample, b: Sample) -> float:
    """Return the largest relative difference of two runs' losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a["losses"], b["losses"], strict=True))


def main() -> None:
    """Measure, print and write the figures. Exit with 1 if TRL's losses are not those of Gearbox."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        settings = json.loads(options.file.read_text(encoding="utf-8"))
        start_equally()
        name = settings["system"]
        sys.argv = [sys.argv[0], str(options.file)]
        if name.startswith("trl"):
            train_in_trl(settings, precompute=name == "trl")
        else:
            train_here(settings, "kto" if name == "gearbox-kto" else "dpo")
        return
    if not options.file.is_file():
        sys.exit(f"{options.file}: is not a file; give a JSON list of instruction, input and output")
    from peers import __main__ as bench
    from peers import environments

    if failure := environments.install("trl"):
        sys.exit(failure)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model")
        for number in range(options.rounds):
            file = folder / f"{number}.jsonl"
            pairs = pairs_of(options.file, options.pairs, number)
            file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
            for name in (name for name in SYSTEMS if name in options.systems):
                samples.append({"round": number, **sample(name, file, folder / "model")})
                print(json.dumps(samples[-1]), flush=True)
    here, loads = bench.machine(), [one["load"] for one in samples]
    versions = ". ".join(
        f"{name}: " + ", ".join(f"{k} {v}" for k, v in environments.versions(key).items())
        for name, key in (("Gearbox", ""), ("TRL", "trl"))
    )
    facts = (
        f"Measured on {time.strftime('%Y-%m-%d')} on {here['cpu']}, one of {here['cores']} cores, one thread, load "
        f"{min(loads):.1f} to {max(loads):.1f}. There are {options.rounds} rounds in turns, each of {options.pairs} "
        f"pairs of {options.file.name} and of {STEPS - 1} steps after the first."
    )
    made = page(samples, "\n\n".join(textwrap.fill(text, 120) for text in (facts, f"{versions}.")))
    print(made)
    RESULT.write_text(made, encoding="utf-8")
    mine = {one["round"]: one for one in samples if one["system"] == "gearbox"}
    if any(worst(one, mine[one["round"]]) > TOLERANCE for one in samples if one["system"].startswith("trl")):
        sys.exit(f"the losses of Gearbox and TRL differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
