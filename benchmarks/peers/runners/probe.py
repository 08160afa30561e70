"""Measure any trainer from within its process: time, tokens and loss of each optimizer step, and peak memory.

A runner calls `start` first. After the last step, the probe writes its results and ends the process, so that no system
is charged for saving. It replaces two functions that every trainer calls, so it needs no hook of the trainer.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

Settings = dict[str, Any]
embedding, cross_entropy = functional.embedding, functional.cross_entropy
now: dict[str, float] = {"tokens": 0, "real_tokens": 0, "targets": 0, "loss": 0.0}  # of the step that runs
steps: list[dict[str, float]] = []


def start(report: Callable[[list[dict[str, float]]], None] = lambda steps: None) -> Settings:
    """Return the settings of the file in argv[1], and measure from here on. `report` may complete the steps."""
    settings: Settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    functional.embedding = lambda ids, *args, **kwargs: count_tokens(settings["pad_token"], ids, *args, **kwargs)
    functional.cross_entropy = count_targets

    def end_step(*_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steps.append({**now, "cpu": time.process_time(), "wall": time.time(), "all_cpu": sum(os.times()[:4])})
        now.update(dict.fromkeys(now, 0))
        if len(steps) == settings["steps"]:
            finish(settings, report)

    register_optimizer_step_post_hook(end_step)
    return settings


def count_tokens(pad_token: int, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Look up embeddings as torch does. Count the tokens, and those that are not padding."""
    if torch.is_grad_enabled():
        now["tokens"] += ids.numel()
        now["real_tokens"] += int((ids != pad_token).sum())
    return embedding(ids, *args, **kwargs)


def count_targets(scores: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute the loss as torch does. Count the labels that are trained, and add up their losses."""
    loss = cross_entropy(scores, labels, *args, **kwargs)
    if torch.is_grad_enabled() and not labels.is_floating_point():
        count = int((labels != kwargs.get("ignore_index", -100)).sum())
        is_mean = kwargs.get("reduction", "mean") == "mean"
        now["targets"] += count
        now["loss"] += float(loss.detach().sum()) * (count if is_mean and count else 1)
    return loss


def finish(settings: Settings, report: Callable[[list[dict[str, float]]], None]) -> None:
    """Write the results, and end the process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    for step in steps:
        step["loss"] /= max(1, step["targets"])
    report(steps)
    result = {"steps": steps, "peak_bytes": peak, "device_bytes": device}
    Path(settings["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # without the trainer's end: it would save


def questions_and_answers(settings: Settings) -> list[list[dict[str, str]]]:
    """Return the chats, each a list of messages."""
    lines = Path(settings["chats"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]
