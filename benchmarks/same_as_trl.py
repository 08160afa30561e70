"""Train the same chats, pairs and judged answers in TRL and in Gearbox, and print how their losses differ.

Usage: python benchmarks/same_as_trl.py

A step trains all 16 records, so that the order of the data does not matter. The model is recipes/tiny with one set of
random weights, in fp32 on a CPU. The first run installs TRL into .peers/, as `make bench` does.

ORPOTrainer has no switch for its usual loss, which also covers prompts. It is set to zero here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
STEPS, RECORDS = 10, 16


class Case(NamedTuple):
    """Hold what both train, and what differs from their defaults."""

    trainer: str
    data: str
    """The file's name, without its ending."""
    theirs: dict[str, Any]
    ours: list[str]

    @property
    def lr(self) -> float:
        """The peak of the learning rate. With a larger one, losses of pairs become too small to compare."""
        return 2e-3 if self.trainer == "SFT" else 2e-4


EXPERIMENTAL = ("CPO", "ORPO")  # modules of TRL
FILES = {"prompt": "messages"}  # that Gearbox reads instead
ONE_ROW = ["batch.rows=1", "batch.micro_rows=1", "batch.row_tokens=4096"]
PRECOMPUTED = {"precompute_ref_log_probs": True}
CASES = {
    "answers only": Case("SFT", "prompt", {}, []),
    "all tokens": Case("SFT", "messages", {}, ["data.supervise=all"]),
    "answers only, 4 rounds of 4 chats": Case(
        "SFT",
        "prompt",
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        ["batch.micro_rows=4"],
    ),
    "answers only, second beta 0.999": Case("SFT", "prompt", {"adam_beta2": 0.999}, ["optim.betas=[0.9,0.999]"]),
    "`dpo`": Case("DPO", "pairs", PRECOMPUTED, ["train.objective=dpo"]),
    "`dpo`, in packed rows": Case(
        "DPO", "pairs", PRECOMPUTED, ["train.objective=dpo", "data.packing=true", *ONE_ROW]
    ),
    "`ipo`": Case("DPO", "pairs", PRECOMPUTED | {"loss_type": ["ipo"]}, ["train.objective=ipo"]),
    "`simpo`": Case(
        "CPO", "pairs", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
        ["train.objective=simpo"],
    ),
    "`simpo` with the usual loss": Case(
        "CPO", "pairs", {"loss_type": "simpo", "cpo_alpha": 1.0, "beta": 2.0, "simpo_gamma": 1.0},
        ["train.objective=simpo", "preference.sft_weight=1"],
    ),
    "`orpo` without the usual loss": Case(
        "ORPO", "pairs", {"beta": 0.1}, ["train.objective=orpo", "preference.sft_weight=0"]
    ),
    "`kto`": Case("KTO", "labels", PRECOMPUTED, ["train.objective=kto"]),
}  # fmt: skip


def main() -> None:
    """Run each case in both, and print a table."""
    from peers import environments

    if failure := environments.install("trl"):
        sys.exit(failure)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_material(folder)
        print("| trained | loss of step 1 | of step 10 | largest relative difference |\n|---|---|---|---|")
        for name, case in CASES.items():
            settings = json.dumps([case.trainer, case.data, case.lr, case.theirs])
            python = str(environments.python_of("trl"))
            run([python, __file__, "--trl", scratch, settings])
            expected = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
            losses = train_here(folder, case)
            worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
            print(f"| {name} | {losses[0]:.4f} | {losses[-1]:.4f} | {worst:.1e} |", flush=True)


def run(command: list[str]) -> None:
    """Run a command without showing its output. Exit with the end of it if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit((done.stdout + done.stderr)[-2000:])


def write_material(folder: Path) -> None:
    """Write the records in each format, and the model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    chats = [json.loads(line)["messages"] for line in (ROOT / "recipes/chats.jsonl").read_text().splitlines()]
    chats = [chat for chat in chats if [turn["role"] for turn in chat] == ["user", "assistant"]][:RECORDS]
    answers = [chat[1:] for chat in chats]
    others = [*answers[1:], answers[0]]
    records = {
        "messages": [{"messages": chat} for chat in chats],
        "prompt": [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats],
        "pairs": [
            {"prompt": chat[:1], "chosen": chosen, "rejected": rejected}
            for chat, chosen, rejected in zip(chats, answers, others, strict=True)
        ],
        "labels": [
            {"prompt": chat[:1], "completion": other if number % 3 else answer, "label": number % 3 == 0}
            for number, (chat, answer, other) in enumerate(zip(chats, answers, others, strict=True))
        ],
    }
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "recipes/tiny"), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(ROOT / "recipes/tiny").save_pretrained(folder / "model")


def train_here(folder: Path, case: Case) -> list[float]:
    """Return the losses of Gearbox."""
    recipe = {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / f"{FILES.get(case.data, case.data)}.jsonl"), "packing": False},
        "batch": {"rows": RECORDS, "row_tokens": 512, "micro_rows": RECORDS},
        "optim": {"lr": case.lr},
        "schedule": {"name": "linear"},
        "train": {"steps": STEPS},
        "eval": {"fraction": 0, "samples": 0},
        "save": {"every": 0},
        "run": {"dir": str(folder / "runs"), "name": "run", "resume": "never"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML, too
    command = [sys.executable, str(ROOT / "src/train.py"), str(folder / "recipe.yaml"), *case.ours]
    run(command)
    path = max((folder / "runs").glob("run*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


def trainer_and_settings(name: str) -> tuple[Any, Any]:
    """Return a trainer of TRL, and the class of its settings."""
    module = import_module(f"trl.experimental.{name.lower()}" if name in EXPERIMENTAL else "trl")
    trainer, settings = getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    if name != "ORPO":
        return trainer, settings

    class WithoutUsualLoss(trainer):
        """Let the odds ratio be all of the loss."""

        def concatenated_forward(self, *arguments: Any) -> tuple[Any, ...]:
            *found, usual_loss = super().concatenated_forward(*arguments)
            return *found, 0 * usual_loss

    return WithoutUsualLoss, settings


def train_in_trl(folder: Path, name: str, data: str, lr: float, changes: dict[str, Any]) -> None:
    """Train with TRL, in its own environment, and write the losses."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer_of, settings_of = trainer_and_settings(name)
    arguments = settings_of(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        learning_rate=lr,
        max_length=512,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **{"per_device_train_batch_size": RECORDS, "adam_beta2": 0.95, **changes},
    )
    records = load_dataset("json", data_files=str(folder / f"{data}.jsonl"), split="train")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = trainer_of(model, args=arguments, train_dataset=records, processing_class=tokenizer)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_in_trl(Path(sys.argv[2]), *json.loads(sys.argv[3]))
    else:
        main()
