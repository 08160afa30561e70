"""Train the same chats in TRL and in Gearbox with equal settings, and print the largest difference of their losses.

Usage: python benchmarks/same_as_trl.py

A step trains all 16 chats, so that the order of the data does not matter. The model is recipes/tiny with one set of
random weights, in fp32 on a CPU. The first run installs TRL into .peers/, as `make bench` does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, CHATS, LR = 10, 16, 2e-3
# What both change, as (TRL's settings, Gearbox's overrides).
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "answers only": ({}, []),
    "all tokens": ({"data": "messages"}, ["data.supervise=all"]),
    "answers only, 4 rounds of 4 chats": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        ["batch.micro_rows=4"],
    ),
    "answers only, second beta 0.999": ({"adam_beta2": 0.999}, ["optim.betas=[0.9,0.999]"]),
}


def main() -> None:
    """Run each case in both, and print a table."""
    from peers import environments

    if failure := environments.install("trl"):
        sys.exit(failure)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_material(folder)
        print("| trained | loss of step 1 | of step 10 | largest relative difference |\n|---|---|---|---|")
        for name, (theirs, ours) in CASES.items():
            settings = json.dumps(theirs)
            python = str(environments.python_of("trl"))
            subprocess.run([python, __file__, "--trl", scratch, settings], check=True, capture_output=True)
            expected = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
            losses = train_here(folder, ours)
            worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
            print(f"| {name} | {losses[0]:.4f} | {losses[-1]:.4f} | {worst:.1e} |", flush=True)


def write_material(folder: Path) -> None:
    """Write the chats in both formats, and the model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    chats = [json.loads(line)["messages"] for line in (ROOT / "recipes/chats.jsonl").read_text().splitlines()]
    chats = [chat for chat in chats if [turn["role"] for turn in chat] == ["user", "assistant"]][:CHATS]
    records = {
        "messages": [{"messages": chat} for chat in chats],
        "prompt": [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats],
    }
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "recipes/tiny"), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(ROOT / "recipes/tiny").save_pretrained(folder / "model")


def train_here(folder: Path, overrides: list[str]) -> list[float]:
    """Return the losses of Gearbox."""
    recipe = {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / "messages.jsonl"), "packing": False},
        "batch": {"rows": CHATS, "row_tokens": 512, "micro_rows": CHATS},
        "optim": {"lr": LR},
        "schedule": {"name": "linear"},
        "train": {"steps": STEPS},
        "eval": {"fraction": 0, "samples": 0},
        "save": {"every": 0},
        "run": {"dir": str(folder / "runs"), "name": "run", "resume": "never"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML, too
    command = [sys.executable, str(ROOT / "src/train.py"), str(folder / "recipe.yaml"), *overrides]
    subprocess.run(command, check=True, capture_output=True)
    path = max((folder / "runs").glob("run*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


def train_in_trl(folder: Path, changes: dict[str, Any]) -> None:
    """Train with TRL, in its own environment, and write the losses."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    data = changes.pop("data", "prompt")
    settings = {"per_device_train_batch_size": CHATS, "adam_beta2": 0.95, **changes}
    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        learning_rate=LR,
        max_length=512,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **settings,
    )
    documents = load_dataset("json", data_files=str(folder / f"{data}.jsonl"), split="train")
    trainer = SFTTrainer(str(folder / "model"), args=arguments, train_dataset=documents)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_in_trl(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
