"""Compute the figures of samples, and the tables of docs/performance.md."""

from __future__ import annotations

import statistics
from typing import Any

from peers.cases import CASES, GPU_CASES, SYSTEMS, Case

Sample = dict[str, Any]
Record = dict[str, Any]
FIGURES = {  # name in the table, and whether more is better
    "cpu_rate": ("tokens / CPU s", True),
    "wall_rate": ("tokens / s", True),
    "mfu": ("MFU", True),
    "peak_gb": ("peak GB", False),
    "first_cpu": ("first step, CPU s", False),
    "first_wall": ("first step, s", False),
}


def flops_of_a_token(config: dict[str, Any], case: Case, context: float, share: float) -> float:
    """Return the FLOPs that training one token needs.

    `context` is the mean number of tokens that a token attends to, and `share` that of the supervised tokens. Frozen
    weights have no gradients.
    """
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    keys = hidden * groups // heads
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    adapter = 16 * (4 * hidden + 2 * (hidden + keys) + 3 * (hidden + inner)) if case.method != "full" else 0
    attention = 3 * 4 * hidden * context * layers
    passes = 6 if case.method == "full" else 4
    return passes * (layers * layer + share * hidden * config["vocab_size"]) + 6 * layers * adapter + attention


def figures(sample: Sample, flops: float) -> dict[str, float]:
    """Return the figures of one run. The rates leave out the first step."""
    first, *later = sample["steps"]
    tokens = sum(step["real_tokens"] for step in later)
    cpu, wall = later[-1]["cpu"] - first["cpu"], later[-1]["wall"] - first["wall"]
    on_gpu = bool(sample["device_bytes"])
    counted = [step for step in later if step["targets"]]  # Gearbox ends before it logs the last step
    share = sum(step["targets"] for step in counted) / max(1, sum(step["real_tokens"] for step in counted))
    return {
        "cpu_rate": tokens / cpu,
        "wall_rate": tokens / wall,
        "mfu": flops * tokens / (wall if on_gpu else cpu) / sample["matmul_rate"],
        "peak_gb": (sample["device_bytes"] if on_gpu else sample["peak_bytes"]) / 1e9,
        "first_cpu": first["all_cpu"],
        "first_wall": first["wall"] - sample["spawned"],
        "loss": first["loss"],
        "padding": 1 - sum(s["real_tokens"] for s in sample["steps"]) / sum(s["tokens"] for s in sample["steps"]),
        "supervised": share,
    }


def collect(record: Record, case_name: str) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each system's runs of a case."""
    case = (CASES | GPU_CASES)[case_name]
    found: dict[str, list[dict[str, float]]] = {}
    for sample in record["samples"]:
        if sample["case"] == case_name and "steps" in sample:
            reference = 1.0 if case.supervise == "all" else supervised_share(record, case_name)
            flops = flops_of_a_token(record["models"][case.model], case, record["chats"]["context"], reference)
            found.setdefault(sample["system"], []).append(figures(sample, flops) | {"round": sample["round"]})
    return {name: found[name] for name in SYSTEMS if name in found}


def supervised_share(record: Record, case_name: str) -> float:
    """Return the share of supervised tokens in all runs of a case, the same for all systems."""
    steps = [
        step
        for sample in record["samples"]
        if sample["case"] == case_name
        for step in sample.get("steps", ())[1:]  # Gearbox also tries a narrow model before the first one ends
        if step["targets"]
    ]
    return sum(step["targets"] for step in steps) / max(1, sum(step["real_tokens"] for step in steps))


def ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]], key: str) -> str:
    """Return the median and the range of how many times better we are, over common rounds; above 1 we are better."""
    pairs = [(mine[key], other[key]) for mine in ours for other in theirs if mine["round"] == other["round"]]
    ratios = [a / b if FIGURES[key][1] else b / a for a, b in pairs]
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def table(record: Record, case_name: str) -> list[str]:
    """Return the table of a case, in Markdown. Each cell is a median; the rates have their range."""
    found = collect(record, case_name)
    head = ["system", *(title for title, _ in FIGURES.values()), "Gearbox is faster by", "leaner by"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, runs in found.items():
        cells = [SYSTEMS[name].title]
        for key in FIGURES:
            values = [run[key] for run in runs]
            cells.append(number(key, statistics.median(values)))
            if key == "cpu_rate":
                cells[-1] += f" ({min(values):.0f} to {max(values):.0f})"
        ours = [] if name == "gearbox" else found.get("gearbox", [])
        cells += [ratio(ours, runs, key) for key in ("cpu_rate", "peak_gb")]
        lines.append(f"| {' | '.join(cells)} |")
    for name in SYSTEMS:
        failures = [
            s["error"] for s in record["samples"] if (s["system"], s["case"]) == (name, case_name) and "error" in s
        ]
        if name not in found and failures:
            lines.append(f"| {SYSTEMS[name].title} | did not run: {failures[-1]} |" + " |" * (len(head) - 2))
    return lines


def number(key: str, value: float) -> str:
    """Return a figure as text."""
    if key == "mfu":
        return f"{value:.0%}"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def checks(record: Record, case_name: str) -> list[str]:
    """Return one line of each system that shows that it trains the same: loss, supervised tokens, padding."""
    lines = ["| system | loss of step 1 | supervised | padding |", "|---|---|---|---|"]
    for name, runs in collect(record, case_name).items():
        middle = {key: statistics.median(run[key] for run in runs) for key in ("loss", "supervised", "padding")}
        shown = f"{middle['loss']:.2f} | {middle['supervised']:.0%} | {middle['padding']:.0%}"
        lines.append(f"| {SYSTEMS[name].title} | {shown} |")
    return lines


def page(record: Record) -> str:
    """Return the part of docs/performance.md between its markers."""
    machine, count = record["machine"], rounds(record)
    parts = [
        f"Measured on {record['date']} on {machine.get('gpu', machine['cpu'])}, {machine['cores']} cores, one thread "
        "for each system, "
        f"load {machine['load']:.1f} at the start; {count} round{'s' * (count > 1)} in turns. ",
        f"The chats are {record['chats']['file']}: {record['chats']['chats']} of "
        f"{record['chats']['mean_tokens']:.0f} tokens on average.",
        "",
        *(f"- {name or 'gearbox'}: " + ", ".join(f"{k} {v}" for k, v in found.items())
          for name, found in sorted(record["versions"].items())),
    ]  # fmt: skip
    for name, case in (CASES | GPU_CASES).items():
        if any(sample["case"] == name for sample in record["samples"]):
            parts += ["", f"### {case.title}", "", *table(record, name), "", *checks(record, name)]
    return "\n".join(line.rstrip() for line in parts) + "\n"


def rounds(record: Record) -> int:
    """Return the number of rounds."""
    return 1 + max((sample["round"] for sample in record["samples"]), default=-1)
