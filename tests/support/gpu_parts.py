"""Run the parts of `make gpu` that train, each through the real launcher. Without a GPU they train on the CPU.

A part adds its figures to a dictionary as they come, and raises AssertionError if it fails.
"""

import gc
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gearbox import ROOT, filesystem
from gearbox.checkpoint.folders import list_checkpoints
from gearbox.config.gear import Gear, gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Recipe
from gearbox.launch import outcome
from gearbox.pages import run_comparison
from gearbox.pages.run_comparison import Compared
from gearbox.planning import cost, gpus
from gearbox.planning.architecture import Architecture
from gearbox.proving.runs import delete_large, launch
from gearbox.proving.settings import comparison_overrides, label
from peers import __main__ as peers
from peers import environments
from peers import figures as peer_figures
from peers.cases import GPU_CASES, SYSTEMS, Case
from support import gpu, gpu_kernels
from support.gears import model_for

RECIPE = ROOT / "recipes" / "tiny.yaml"
ARCHITECTURES = ROOT / "recipes" / "architectures"
NEAR_ADAMW = 5e-3
ADAPTERS = {"lora": ("adapter.method=lora",), "qlora": ("adapter.method=lora", "model.quantize=nf4")}
SMALLER = 0.75  # than the checkpoint of adamw: two moments of 1 byte instead of 4, besides the weight's 4
NEAR_LORA = 0.05
NEAR_HEAD = 0.05
DOCUMENT_CHARACTERS = 1000
PEER_CASE = "8b-lora"


@dataclass(frozen=True)
class Setting:
    """Define where and how long the parts train."""

    folder: Path
    num_gpus: int
    steps: int = 12
    weights_every: int = 4
    overrides: tuple[str, ...] = (
        "batch.rows=16", "batch.micro_rows=1", "optim.lr=5e-4", "adapter.r=8",
    )  # fmt: skip

    @property
    def device(self) -> str:
        return "cuda" if self.num_gpus else "cpu"

    def tolerances(self, precision: str) -> dict[str, float]:
        """Return the largest differences between gears. CPUs run every gear in fp32."""
        return run_comparison.TOLERANCES["bf16" if precision == "bf16" and self.num_gpus else "no"]

    def arguments(self, *changes: str) -> list[str]:
        """Return the recipe and its overrides."""
        given = [*self.overrides, *changes]
        fixed = comparison_overrides(load_recipe(RECIPE, given), given, self.steps, self.weights_every)
        return [str(RECIPE), *given, *fixed]


def gear_in(precision: str, name: str, ranks: int, folder: Path) -> Gear:
    """Return a shipped gear with its file, or with a variant of it in fp32, on this number of ranks."""
    path = gear_path(name)
    if precision == "fp32":
        settings = yaml.safe_load(path.read_text())
        folder.mkdir(parents=True, exist_ok=True)
        if zero := settings.get("deepspeed_config"):
            of_zero = json.loads((ROOT / zero["deepspeed_config_file"]).read_text())
            zero["deepspeed_config_file"] = str(folder / f"{name}.json")
            Path(zero["deepspeed_config_file"]).write_text(json.dumps(of_zero | {"bf16": {"enabled": False}}))
        else:
            settings["mixed_precision"] = "no"
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
    return load_gear(path, {"num_processes": str(ranks)})


def train(gear: Gear, folder: Path, arguments: list[str]) -> Path:
    """Train in a new folder, and return the run's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    problem = launch(gear, folder, arguments).problem
    assert not problem, problem
    return folder / label(gear)


def reference(setting: Setting, precision: str, model: tuple[str, ...] = ()) -> Path:
    """Return the folder of a run under `single`, of the recipe's model or another. It is trained once for all parts."""
    folder = setting.folder / (f"reference-{precision}" + "-mixture" * bool(model))
    gear = gear_in(precision, "single", 1, setting.folder / "gears")
    run = folder / label(gear)
    if outcome.read_outcome(run / "status.json").get("outcome") == "done":
        return run
    return train(gear, folder, setting.arguments(*model))


def compare(setting: Setting, run: Path, precision: str, expected: Compared, figures: dict[str, str]) -> None:
    """Compare every step of a run with a reference, within the tolerances of a precision."""
    compared = Compared(run.name, run)
    compared.compare_with(expected)
    delete_large(run)
    assert not compared.problem, compared.problem
    figures |= {name: f"{compared.largest(name)[0]:.0e}" for name in run_comparison.QUANTITIES}
    explanation = compared.explanation(setting.tolerances(precision))
    assert not explanation, explanation


def run_parity(setting: Setting, figures: dict[str, str], name: str, precision: str) -> None:
    """Train under a gear, and compare every step with single."""
    ranks = gpu.ranks_of(name, setting.num_gpus or 2)
    gear = gear_in(precision, name, ranks, setting.folder / "gears")
    figures["ranks"] = str(ranks)
    expected = Compared("single", reference(setting, precision, model_for(name)))
    run = train(gear, setting.folder / f"parity-{name}-{precision}", setting.arguments(*model_for(name)))
    compare(setting, run, precision, expected, figures)


def run_resume(setting: Setting, figures: dict[str, str], name: str) -> None:
    """Kill all processes of a run after its first checkpoint, resume it, and compare every step with single."""
    expected = Compared("single", reference(setting, "bf16"))
    gear = gear_in("bf16", name, gpu.ranks_of(name, setting.num_gpus or 1), setting.folder / "gears")
    folder = setting.folder / f"resume-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = folder / label(gear)
    arguments = ["run.resume=auto" if one == "run.resume=never" else one for one in setting.arguments()]
    command = [sys.executable, "src/launch.py", str(gear.path), f"--num_processes={gear.num_processes}", *arguments]
    log = folder / "killed.log"
    with log.open("w") as output:
        killed = subprocess.Popen(
            [*command, f"run.dir={folder}", f"run.name={run.name}"], cwd=ROOT, stdout=output, stderr=output
        )
        try:
            while killed.poll() is None and not list_checkpoints(run / "checkpoints"):
                time.sleep(0.01)
        finally:
            gpu.kill_tree(killed.pid)
            killed.wait()
    saved = [step for step, _ in list_checkpoints(run / "checkpoints")]
    assert killed.returncode == -9, f"ended with code {killed.returncode} before it could be killed; see {log}"
    assert saved and max(saved) < setting.steps, f"was killed too late, after the checkpoints {saved}"
    problem = launch(gear, folder, arguments).problem
    assert not problem, problem
    found = re.search(r"resuming from .*", (folder / f"{run.name}.log").read_text())
    assert found, f"did not resume; see {folder / run.name}.log"
    figures |= {"ranks": str(gear.num_processes), "killed after step": str(max(saved))}
    compare(setting, run, "bf16", expected, figures)


def checkpoint_bytes(run: Path) -> int:
    """Return the size of a run's last checkpoint."""
    return sum(file.stat().st_size for file in list_checkpoints(run / "checkpoints")[-1][1].rglob("*"))


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of a loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def losses(run: Path) -> list[float]:
    """Return the loss of each step."""
    return [line["loss"] for line in run_comparison.read_steps(run)]


def run_optimizer(setting: Setting, figures: dict[str, str], name: str) -> None:
    """Train with an optimizer of bitsandbytes, and compare the losses with those of adamw."""
    gear = gear_in("bf16", "single", 1, setting.folder / "gears")
    run = train(gear, setting.folder / f"optimizer-{name}", setting.arguments(f"optim.name={name}"))
    of_adamw = reference(setting, "bf16")
    difference = largest_difference(losses(run), losses(of_adamw))
    size = checkpoint_bytes(run) / checkpoint_bytes(of_adamw)
    delete_large(run)
    figures |= {"largest difference of a loss": f"{difference:.0e}", "size of the checkpoint": f"{size:.0%} of adamw's"}
    assert difference <= NEAR_ADAMW, f"the losses differ from those of adamw by {difference:.1e}"
    assert (size < SMALLER) == name.endswith("8bit"), f"the checkpoint has {size:.0%} of the size of adamw's"


def run_qlora(setting: Setting, figures: dict[str, str]) -> None:
    """Train QLoRA and LoRA on the same weights, and compare the losses."""
    gear = gear_in("bf16", "single", 1, setting.folder / "gears")
    found = {}
    for method, changes in ADAPTERS.items():
        run = train(gear, setting.folder / method, setting.arguments(*changes))
        found[method] = losses(run)
        delete_large(run)
    difference = largest_difference(found["qlora"], found["lora"])
    figures |= {"largest difference of a loss": f"{difference:.0e}"}
    figures |= {f"losses of {name}": f"{each[0]:.3f} to {each[-1]:.3f}" for name, each in found.items()}
    assert found["qlora"][-1] < found["qlora"][0], "the loss does not fall"
    assert difference <= NEAR_LORA, f"the losses differ from those of LoRA by {difference:.1%}"


def head_figures(recipe: Path) -> tuple[str, float]:
    """Return the gear and the sum in GB per GPU in the first lines of a recipe."""
    text = recipe.read_text()
    gears, sums = re.findall(r"under the gear (\w+)", text), re.findall(r"^#\s+([\d.]+) GB  in all$", text, re.M)
    assert len(gears) == len(sums) == 1, f"{recipe}: its first lines name {gears} and {sums}"
    return gears[0], float(sums[0])


def write_weights(name: str, folder: Path, device: str, **changes: int) -> Path:
    """Write random bf16 weights of an architecture, drawn on the device, with the byte tokenizer. Do it once."""
    if folder.exists():
        return folder
    settings = json.loads((ARCHITECTURES / f"{name.replace('/', '--')}.json").read_text())
    config = AutoConfig.for_model(**settings | changes)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with filesystem.atomic_folder(folder) as filled:
        model.save_pretrained(filled)
        AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny").save_pretrained(filled)
    del model
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()  # for the run, which is another process
    return folder


def write_documents(path: Path, number: int, in_pairs: bool = False) -> Path:
    """Write chats of about DOCUMENT_CHARACTERS bytes, each of which is a token, or as many pairs of them."""
    draw = random.Random(0)

    def chat() -> list[dict[str, str]]:
        answer = "".join(draw.choices("abcdefgh ", k=DOCUMENT_CHARACTERS))
        return [{"role": "user", "content": "Write."}, {"role": "assistant", "content": answer}]

    with path.open("w") as file:
        for _ in range(number):
            record = {"chosen": chat(), "rejected": chat()} if in_pairs else {"messages": chat()}
            file.write(json.dumps(record) + "\n")
    return path


def utilization(recipe: Recipe, config: dict, tokens_per_second: float, peak_rate: float) -> float:
    """Return the share of the rate of matrix products, in FLOP/s, that training one GPU's tokens uses."""
    method = "lora" if recipe.method == "dora" else recipe.method
    case = Case("", "", method, "all", recipe.batch.rows, 1, 1)
    flops = peer_figures.flops_of_a_token(config, case, context=DOCUMENT_CHARACTERS / 2, share=1)
    return flops * tokens_per_second / peak_rate


def matmul_rate(folder: Path, device: str) -> float:
    """Return the measured rate of matrix products at the sizes of a model."""
    command = [sys.executable, "benchmarks/peers/rate.py", str(folder), *(["gpu"] if device == "cuda" else [])]
    return float(subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout)


def record_mfu(device_name: str, name: str, config: dict, job: Job, seconds: float) -> None:
    """Write the share of the GPU's peak that a step of a recipe reached, for the estimates of src/plan.py."""
    kind = gpus.kind_of(device_name)
    if kind is None:
        return
    at_peak = cost.cost_of_step(Architecture.of(config), job, kind, mfu=1.0).seconds
    shares = json.loads(cost.MEASURED.read_text()) if cost.MEASURED.is_file() else {}
    shares.setdefault(kind.name, {})[name] = round(at_peak / seconds, 3)
    filesystem.atomic_write(cost.MEASURED, json.dumps(shares, indent=1, sort_keys=True) + "\n")


def run_shapes(setting: Setting, figures: dict[str, str], name: str, **changes: int) -> None:
    """Train a recipe at its sizes with random weights. Record its speed, and compare its peak with its first lines."""
    path = ROOT / "recipes" / f"{name}.yaml"
    recipe, (gear_name, head) = load_recipe(path, []), head_figures(path)
    if setting.num_gpus and (memory := torch.cuda.mem_get_info()[1] / 1e9) < head:
        pytest.skip(f"needs {head} GB on each GPU, which has {memory:.1f} GB")
    weights = write_weights(recipe.model.name, setting.folder / Path(recipe.model.name).name, setting.device, **changes)
    gear = gear_in("bf16", gear_name, gpu.ranks_of(gear_name, setting.num_gpus or 1), setting.folder / "gears")
    rate = matmul_rate(weights, setting.device)
    rows = 4 * recipe.batch.micro_rows * gear.num_processes  # few, since only the passes of a step follow from it
    documents = write_documents(setting.folder / f"{name}.jsonl", 2 * setting.steps * rows * 3, recipe.compares)
    changed = {
        "model.name": weights, "data.path": documents, "data.split": "train",
        "data.supervise": recipe.data.supervise if recipe.compares else "all",
        "batch.rows": rows, "train.steps": setting.steps, "schedule.warmup": 1, "eval.fraction": 0, "eval.every": 0,
        "eval.samples": 0, "save.every": 0,
    }  # fmt: skip
    run = train(gear, setting.folder / f"shapes-{name}", [str(path), *(f"{k}={v}" for k, v in changed.items())])
    lines = run_comparison.read_steps(run)
    delete_large(run)
    config = json.loads((weights / "config.json").read_text())
    if setting.num_gpus:
        job = Job.of(path, load_recipe(path, [f"{key}={value}" for key, value in changed.items()]), gear)
        seconds = statistics.median(b["seconds"] - a["seconds"] for a, b in pairwise(lines[1:]))
        record_mfu(torch.cuda.get_device_name(), name, config, job, seconds)
    speed = statistics.median(line["tokens_per_second"] for line in lines[2:]) / gear.num_processes
    peak = max(line["memory_peak_bytes"] for line in lines) / 1e9
    figures |= {
        "GPUs": str(gear.num_processes), "tokens/s per GPU": f"{speed:,.0f}",
        "MFU": f"{utilization(recipe, config, speed, rate):.1%} of {rate / 1e12:.3g} TFLOP/s measured",
        "peak GB": f"{peak:.1f}", "GB in the recipe": f"{head:.1f}",
    }  # fmt: skip
    assert abs(peak - head) <= NEAR_HEAD * head, f"the peak of {peak:.1f} GB is not within 5 % of {head:.1f} GB"


def run_doctor(setting: Setting, figures: dict[str, str]) -> None:
    """Run the doctor on all GPUs, and record the rates of its largest messages."""
    number = setting.num_gpus or 1
    gear = "single" if number == 1 else "ddp"
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={gear_path(gear)}"]
    done = subprocess.run(
        [*command, f"--num_processes={number}", "src/doctor.py", "--json"],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    reports = [line for line in done.stdout.splitlines() if line.startswith('{"verdict"')]
    assert reports, f"exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
    report = json.loads(reports[-1])
    for name, sizes in report.get("bandwidths", {}).items():
        figures[f"{name} GB/s"] = f"{sizes[-1]['bytes_per_second'] / 1e9:.3g}"
    odd = [f"{one['name']}: {one['text']}" for one in report["findings"] if one["colour"] != "green"]
    figures["verdict"] = f"{report['verdict']}{''.join(f'; {each}' for each in odd)}"
    assert report["verdict"] != "red", "; ".join(odd)


def run_attention(setting: Setting, figures: dict[str, str]) -> None:
    """Compare each attention with eager."""
    problems = gpu_kernels.compare_attentions(setting.device, figures)
    assert not problems, "; ".join(problems)


def run_profile(setting: Setting, figures: dict[str, str]) -> None:
    """Name the kernel of each attention. Attention by document needs a flash kernel."""
    found = gpu_kernels.profile_attentions(setting.device, setting.folder / "traces", figures)
    assert "none" not in found.values(), f"no kernel of attention in the trace: {found}"
    assert "flash" in found.get(gpu_kernels.DOCUMENTS, "flash"), f"attention by document ran {found}"


def run_peers(setting: Setting, figures: dict[str, str], name: str) -> None:
    """Train a case of benchmarks/peers once, with Gearbox or with a peer that is installed."""
    assert setting.num_gpus, "the case is too large for a CPU"
    installed = {one.environment for one in SYSTEMS.values() if environments.python_of(one.environment).exists()}
    if installed == {""} or SYSTEMS[name].environment not in installed:
        pytest.skip("not installed; benchmarks/peers --gpu installs the peers, and measures more rounds")
    case = GPU_CASES[PEER_CASE]
    material = [sys.executable, "benchmarks/peers/material.py", str(peers.MATERIAL), case.model]
    subprocess.run(material, cwd=ROOT, check=True)
    chats = json.loads((peers.MATERIAL / "chats.json").read_text())
    config = json.loads((peers.MATERIAL / case.model / "config.json").read_text())
    rate = peers.matmul_rate(case.model, gpu=True)
    sample = peers.sample(name, case, chats["pad_token"], gpu=True)
    assert "error" not in sample, sample["error"]
    flops = peer_figures.flops_of_a_token(config, case, chats["context"], share=1)
    found = peer_figures.figures(sample | {"matmul_rate": rate}, flops)
    figures |= {
        "case": case.title, "tokens/s": f"{found['wall_rate']:,.0f}", "MFU": f"{found['mfu']:.1%}",
        "peak GB": f"{found['peak_gb']:.1f}",
    }  # fmt: skip


def run_part(name: str, setting: Setting, figures: dict[str, str]) -> None:
    """Run the part of this name."""
    kind, _, rest = name.partition("-")
    if kind == "parity":
        gear, _, precision = rest.rpartition("-")
        run_parity(setting, figures, gear, precision)
        return
    runs = {
        "doctor": run_doctor, "attention": run_attention, "profile": run_profile, "qlora": run_qlora,
        "optimizer": run_optimizer, "resume": run_resume, "shapes": run_shapes, "peers": run_peers,
    }  # fmt: skip
    runs[kind](setting, figures, *([rest] if rest else []))
