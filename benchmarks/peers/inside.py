"""Measure only Gearbox: where the time of a step goes, and how the rate grows with rows, sizes and ranks."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import figures
from peers.cases import CASES, Case

CALLERS = {"optimizer": "Optimizer.step", "head and loss": "_CrossEntropySum", "attention": "attend"}
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul")
VIEWS = ("detach", "view", "t", "transpose", "as_strided", "slice", "select", "reshape", "unsqueeze", "empty", "expand")


def group_of(path: str) -> str:
    """Return the group of an operator, given its name and those of its callers, outward, as in aten::mm<aten::linear.

    An operator belongs to the caller that asked for it: the head's matrix products are the head's.
    """
    names = path.split("<")
    for group, word in CALLERS.items():
        if any(word in name for name in names):
            return group
    space, _, name = names[0].partition("::")
    if name in PRODUCTS:
        return "matrix products of the layers"
    return "norms, activations, copies" if space == "aten" and name.split(".")[0] not in VIEWS else "rest"


def shares(times: dict[str, float]) -> dict[str, float]:
    """Return each group's share of the time that operators take themselves, largest first."""
    found: dict[str, float] = {}
    for path, seconds in times.items():
        found[group_of(path)] = found.get(group_of(path), 0.0) + seconds
    total = sum(found.values())
    return {name: found[name] / total for name in sorted(found, key=lambda name: -found[name])}


def profile(record: dict[str, Any]) -> None:
    """Profile the last step of a LoRA run, and keep the shares of its groups in the record."""
    from peers import __main__ as bench

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        found = bench.sample("gearbox", CASES["135m-lora"], record["chats"]["pad_token"], gpu=False, profile=str(path))
        if "error" in found:
            raise RuntimeError(found["error"])
        record["profile"] = shares(json.loads(path.read_text(encoding="utf-8")))
    print("\n".join(profile_table(record)))


def profile_table(record: dict[str, Any]) -> list[str]:
    """Return the table of a step's time."""
    lines = ["| part of a LoRA step of SmolLM2-135M | share of the time of torch's operators |", "|---|---|"]
    return [*lines, *(f"| {name} | {share:.1%} |" for name, share in record["profile"].items())]


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the line through the logarithms of the points, by least squares."""
    places = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (statistics.mean(values) for values in zip(*places, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in places)
    return sum((x - x_mean) * (y - y_mean) for x, y in places) / spread


def rate(record: dict[str, Any], case: Case, chats: list[list[int]] | None = None, **extra: Any) -> float:
    """Return the tokens per CPU second of one run of Gearbox. `chats` gives the words of each chat's turns."""
    from peers import __main__ as bench

    with tempfile.TemporaryDirectory() as folder:
        if chats:
            path = Path(folder) / "chats.jsonl"
            turns = [[{"role": r, "content": "ta " * n} for r, n in zip(("user", "assistant"), chat, strict=True)]
                     for chat in chats]  # fmt: skip
            path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns), encoding="utf-8")
            extra["chats"] = str(path)
        found = bench.sample("gearbox", case, record["chats"]["pad_token"], gpu=False, **extra)
    if "error" in found:
        raise RuntimeError(found["error"])
    return figures.figures({**found, "matmul_rate": 1.0}, 0)["cpu_rate"]


def rate_of_ranks(num_ranks: int) -> float:
    """Return the tokens per second of a run of the gear ddp, each rank with one thread."""
    from peers import __main__ as bench

    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "model": {"name": str(bench.MATERIAL / "llama-10m")},
            "data": {"path": str(bench.MATERIAL / "chats.jsonl"), "supervise": "all"},
            "batch": {"rows": 4, "row_tokens": 1024}, "optim": {"lr": 1e-4}, "train": {"steps": 6},
            "eval": {"fraction": 0, "samples": 0}, "save": {"every": 0}, "run": {"dir": folder, "name": "run"},
        }  # fmt: skip
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        gear = str(bench.ROOT / "accelerate_configs" / "ddp.yaml")
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", gear]
        script = str(bench.ROOT / "src" / "train.py")
        variables = os.environ | bench.VARIABLES | {"PYTHONPATH": str(bench.ROOT / "src")}
        command = [*launch, "--num_processes", str(num_ranks), script, str(path)]
        subprocess.run(command, env=variables, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, *_, last = (line for line in map(json.loads, lines) if "tokens_supervised" in line)
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def curves(record: dict[str, Any]) -> None:
    """Measure the curves with the small Llama, and keep them in the record."""
    small = {"model": "llama-10m", "method": "full", "supervise": "all", "steps": 4, "steps_unpacked": 4}

    def case(rows: int, row_tokens: int) -> Case:
        return Case("", rows=rows, row_tokens=row_tokens, **small)  # type: ignore[arg-type]

    found: dict[str, list[tuple[float, float]]] = {}
    found["tokens of a row"] = [(n, rate(record, case(4096 // n, n))) for n in (256, 512, 1024, 2048, 4096)]
    found["rows of a step"] = [(n, rate(record, case(n, 1024))) for n in (1, 2, 4, 8)]
    found["layers of the model"] = [(n, rate(record, case(2, 1024), layers=n)) for n in (2, 4, 8, 16)]
    found["documents of a row of 2,048"] = [
        (n, rate(record, case(2, 2048), [[10, 2048 // n - 45]] * (n * 10))) for n in (2, 4, 8, 16, 32)
    ]
    found["ranks of ddp, tokens per second"] = [(n, rate_of_ranks(n)) for n in (1, 2)]
    record["curves"] = found
    print("\n".join(curves_table(record)))


def curves_table(record: dict[str, Any]) -> list[str]:
    """Return the table of the curves."""
    lines = ["| over | tokens per second of one core | slope |", "|---|---|---|"]
    for name, points in record["curves"].items():
        shown = ", ".join(f"{x:,}: {y:,.0f}" for x, y in points)
        lines.append(f"| {name} | {shown} | {slope(points):+.2f} |")
    return lines
