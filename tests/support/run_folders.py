"""Make run folders that no run has written, with every part of a report or hostile texts, and read their pages."""

import html
import json
import math
import random
import re
from pathlib import Path

HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
START = {"time": "2026-11-24T17:29:02+0000", "step": 0, "gear": "ddp", "num_ranks": 2, "commit": "abfab93aa001"}
FACTS = {
    "started": START["time"],
    "first": START,
    "resumes": [{**START, "step": 250, "gear": "fsdp", "time": "2026-11-24T17:31:02+0000"}],
    "recipe": "recipes/tiny.yaml",
    "gear": "fsdp",
    "command": "python src/launch.py fsdp --num_processes=2 recipes/tiny.yaml run.name=first",
    "commit": "abfab93aa001-dirty",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "hardware": {"processor": "AMD EPYC, 2 cores", "memory": "24.00 GiB", "system": "Linux 6.1"},
    "ranks": [["node1", "cuda:0 NVIDIA H100"], ["node1", "cuda:1 NVIDIA H100"]],
    "num_steps": 700,
    "method": "full fine-tuning",
    "model": "recipes/tiny",
    "num_weights_trained": 1_123_456,
    "num_weights": 1_123_456,
    "memory_available_bytes": 700 * 2**20,
    "plan": {"model": "recipes/tiny (random weights)", "batch": "8 rows = 2 ranks x 1 accumulation round x 4 rows"},
    "documents": [["tasks, row 1", [["<|user|>reverse abc<|end|><|assistant|>", False], ["cba<|end|>", True]]]],
}
STATUS = {"outcome": "done", "text": "", "time": "2026-11-24T17:33:02+0000", "step": 700, "saved_step": 700}


def step_line(step: int, draw: random.Random) -> dict:
    """Return a line of a training step with every key."""
    return {
        "step": step, "loss": 0.02 + 6 * math.exp(-step / 60) * (1 + 0.2 * draw.random()), "lr": 1e-3 * math.exp(-step),
        "grad_norm": 0.5 + draw.random(), "rows_hash": "ef3d74096c3a83e1", "tokens": 1000 * step,
        "tokens_supervised": 230 * step, "tokens_per_second": 5000 + 900 * draw.random(), "mfu": 0.41,
        "tokens_per_second_per_device": 2500.5, "seconds": round(0.2 * step, 3), "memory_bytes": 500 * 2**20,
        "memory_peak_bytes": 580 * 2**20, "memory_predicted_bytes": 600 * 2**20, "num_skipped": int(step >= 400),
        "expert_load": 1.5 + draw.random(), "seconds_data": 0.002, "seconds_forward": 0.06, "seconds_backward": 0.1,
        "seconds_communication": 0.03, "seconds_optimizer": 0.02, "seconds_save": 0.1 * (step % 100 == 0),
    }  # fmt: skip


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder: Path, num_steps: int = 700, facts: dict | None = None, seed: int = 0) -> Path:
    """Write the folder of a run that was resumed, skipped a step, had a spike and failed to save once."""
    folder.mkdir(parents=True)
    draw, lines = random.Random(seed), []
    for step in range(num_steps + 1):
        if step:
            marks = {251: {"seconds_without_a_step": 43.2}, 330: {"spike": True}}.get(step, {})
            lines.append(step_line(step, draw) | marks)
        if step % 100 == 0:
            lines.append({"step": step, "eval_loss": 0.03 + 6 * math.exp(-step / 60), "eval_exact_match": step / 800})
            lines.append({"step": step, "saved": step, "save_bytes": 1})
    lines.append({"step": num_steps, "save_failed": 640, "save_error": "No space left on device", "last_saved": 600})
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "run.json").write_text(json.dumps(FACTS if facts is None else facts))
    (folder / "status.json").write_text(json.dumps(STATUS))
    (folder / "resolved.yaml").write_text(f"model:\n  name: recipes/tiny\noptim:\n  lr: {1 + seed}e-3\n  name: adamw\n")
    answers = [(0, "????"), (300, "bca"), (700, "cba")]
    write_lines(folder / "answers.jsonl", [
        {"step": step, "question": "reverse abc", "expected": "cba", "answer": answer} for step, answer in answers
    ])  # fmt: skip
    (folder / "model").mkdir()
    (folder / "hang").mkdir()
    hang = {"rank": 1, "pid": 4, "host": "node1", "doing": "step 250, micro-batch 2", "seconds_ago": 61.0}
    (folder / "hang" / "rank-1.44.txt").write_text(json.dumps(hang) + "\nthread main\n")
    return folder


def hostile_facts() -> dict:
    """Return facts whose every text tries to leave its place in the page."""

    def spoil(value):
        if isinstance(value, dict):
            return {HOSTILE if key not in FACTS and key not in START else key: spoil(one) for key, one in value.items()}
        if isinstance(value, list):
            return [spoil(one) for one in value]
        return HOSTILE if isinstance(value, str) else value

    return spoil(FACTS)


def text_of(path: Path) -> str:
    """Return the words of a page without its style, script and tags."""
    content = re.sub(r"<(style|script)>.*?</\1>", " ", path.read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", content)).split())


def figures(step: int, draw: random.Random) -> dict:
    """Return what a step of compared answers measures: rewards part, and the rejected one falls."""
    chosen, rejected = 0.002 * step + 0.3 * draw.random() - 0.15, -0.008 * step + 0.3 * draw.random() - 0.15
    return {
        "margin": chosen - rejected, "accuracy": round(8 * min(1, 0.4 + step / 300 * draw.random())) / 8,
        "reward_chosen": chosen, "reward_rejected": rejected, "kl": 0.002 * step * draw.random(),
    }  # fmt: skip


def make_pair_run(folder: Path, num_steps: int = 300, seed: int = 0) -> Path:
    """Write the folder of a run that compares answers: dpo on pairs, with answers before and after."""
    plan = FACTS["plan"] | {"objective": "dpo: beta 0.1"}
    asked = ["<|user|>add 2 3<|end|><|assistant|>", False]
    pair = [["pairs.jsonl:3", [asked, ["5<|end|>", True]]], ["pairs.jsonl:3", [asked, ["6<|end|>", True]]]]
    more = {"num_steps": num_steps, "plan": plan, "documents": pair, "sides": ["chosen", "rejected"]}
    make_run(folder, 0, FACTS | more, seed)
    draw, lines = random.Random(seed), []
    for step in range(num_steps + 1):
        if step:
            lines.append(step_line(step, draw) | figures(step, draw) | {"loss": 0.69 * math.exp(-step / 200)})
        if step % 50 == 0:
            held_out = {f"eval_{name}": number for name, number in figures(step, draw).items()}
            lines.append({"step": step, "eval_loss": 0.69 * math.exp(-step / 300), **held_out})
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "resolved.yaml").write_text("train:\n  objective: dpo\npreference:\n  beta: 0.1\n")
    (folder / "status.json").write_text(json.dumps(STATUS | {"step": num_steps, "saved_step": num_steps}))
    pairs = [("add 2 3", "5", "6", "5"), ("reverse abc", "cba", "abc", "abc"), ("upper q", "Q", "q", "")]
    write_lines(folder / "answers.jsonl", [
        {"step": step, "question": question, "expected": chosen, "rejected": rejected, "answer": answer}
        for step in (0, num_steps // 2, num_steps)
        for question, chosen, rejected, last in pairs
        for answer in ([last] if step == num_steps else ["????"])
    ])  # fmt: skip
    return folder
