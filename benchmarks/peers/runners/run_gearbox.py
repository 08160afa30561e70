"""Train with Gearbox, by src/train.py with a recipe."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import probe
import torch

ROOT = Path(__file__).resolve().parents[3]


def add_losses(steps: list[dict[str, float]]) -> None:
    """Take targets and losses of the steps from the run's metrics, as Gearbox computes the loss itself."""
    lines = (Path(settings["scratch"]) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    before = 0
    for line in (line for line in map(json.loads, lines) if "tokens_supervised" in line):  # the last comes too late
        steps[line["step"] - 1].update(loss=line["loss"], targets=line["tokens_supervised"] - before)
        before = line["tokens_supervised"]


def smaller_or_larger(folder: Path, num_layers: int) -> Path:
    """Return a copy of a model folder without weights, with another number of layers."""
    copy = Path(settings["scratch"]) / "model"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}), encoding="utf-8")
    return copy


def end_run(steps: list[dict[str, float]]) -> None:
    """Complete the steps, and write the times of the operators of the last step if they are asked for."""
    if "profile" in settings:
        profiler.stop()
        times: dict[str, float] = {}
        for event in profiler.events():
            path = event.name
            caller = event.cpu_parent
            while caller is not None:
                path, caller = f"{path}<{caller.name}", caller.cpu_parent
            times[path] = times.get(path, 0.0) + event.self_cpu_time_total
        Path(settings["profile"]).write_text(json.dumps(times), encoding="utf-8")
    add_losses(steps)


settings = probe.start(end_run)
if "profile" in settings:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def profile_last(*_: object) -> None:
        """Begin to profile before the last step."""
        if len(probe.steps) == settings["steps"] - 1:
            profiler.start()

    probe.register_optimizer_step_post_hook(profile_last)
if settings["method"] == "qlora":
    settings["model_keys"] = {"quantize": "nf4"}
if "layers" in settings:
    settings["model"] = str(smaller_or_larger(Path(settings["model"]), settings["layers"]))
    settings["model_keys"] = {"init": "random"}
recipe = {
    "model": {"name": settings["model"], **settings["model_keys"]},
    "adapter": {"method": "none" if settings["method"] == "full" else "lora", "r": 16, "alpha": 32},
    "data": {"path": settings["chats"], "supervise": settings["supervise"]},
    "batch": {"rows": settings["rows"], "row_tokens": settings["row_tokens"], "micro_rows": settings["micro_rows"]},
    "optim": {"lr": settings["lr"]},
    "schedule": {"name": "constant"},
    "train": {"steps": settings["steps"], "seed": settings["seed"]},
    "eval": {"fraction": 0, "samples": 0},
    "save": {"every": 0},
    "run": {"dir": settings["scratch"], "name": "run"},
}
path = Path(settings["scratch"]) / "recipe.yaml"
path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML, too
sys.path.insert(0, str(ROOT / "src"))
sys.argv = ["src/train.py", str(path), *settings["overrides"]]
runpy.run_path(str(ROOT / "src" / "train.py"), run_name="__main__")
