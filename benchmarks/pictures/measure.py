"""Run everything that the pictures show, on this machine, and write down the figures."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# First: support.environment sets variables that torch reads.
from support import environment  # noqa: F401  isort: skip

import pytest
import torch
import transformers
import yaml

from gearbox import ROOT
from gearbox.checkpoint.folders import list_checkpoints
from gearbox.config.gear import gear_names, gear_path, load_gear
from gearbox.config.loader import load_recipe
from gearbox.data import corpus
from gearbox.distributed import engine
from gearbox.launch.outcome import read_outcome
from gearbox.metrics import metrics_file
from gearbox.model import loading
from gearbox.pages import run_comparison
from gearbox.pages.run_data import COLUMNS
from gearbox.rows import arranged, batches
from gearbox.rows.batches import PackedRows
from pictures import records
from support import ranks
from support.battery import machine
from support.faults import TrainState, at_step, count_steps, kill, patch_step
from support.held import at_second_step, held

RECIPE = "recipes/tiny.yaml"
# The recipe's own rate of 2e-3 amplifies rounding. There, on one device, one weight that starts one bit off changes the
# loss by 1e-3 within 75 steps, and by 0.9 within 200. `nudged` measures the same at the rate below.
SLOW = "optim.lr=5e-4"
PARITY_GEARS = ("single:1", "ddp:2", "fsdp:2", "zero3:2", "pp:2")
PARITY_STEPS = 200
MEMORY_GEARS = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp")
RESUME_STEPS = 120
KILLS = (("ddp", 47), ("zero3", 88), ("fsdp", None))  # each gear, and the step in which all its ranks are killed
REPORT_GEAR = "fsdp"
NO_EVALUATION = ("eval.every=0", "eval.fraction=0", "eval.samples=0")
MAX_DOCUMENTS = 7  # in the row that is drawn: as many colours are distinct for colour-blind readers
PATIENCE = 1500  # seconds for the longest run; other jobs may share the machine


def measure(names: list[str]) -> None:
    """Measure these parts, and keep the figures of the others."""
    ranks.TIMEOUT = PATIENCE
    found = records.read()
    with pytest.MonkeyPatch.context() as patch:
        ranks.skip_loading_back(patch)
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                started = time.monotonic()
                record = PARTS[name](Path(folder), patch)
            found[name] = {"made": f"{time.strftime('%Y-%m-%d')}: {machine()}", **record}
            records.write(found)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def run(gear: str, folder: Path, *overrides: str, num_ranks: int | None = None) -> ranks.Outcome:
    """Train the recipe under a gear on warm forked ranks."""
    return ranks.run_ranks(gear, [RECIPE, f"run.dir={folder}", *overrides], folder, num_ranks)


def succeeded(outcome: ranks.Outcome) -> ranks.Outcome:
    """Return the outcome of a run, which has to have succeeded."""
    assert set(outcome.codes) == {0}, outcome.output
    return outcome


def parity(folder: Path, patch: pytest.MonkeyPatch, num_steps: int = PARITY_STEPS) -> records.Record:
    """Return each step's loss under each gear, by src/parity.py; and on one device with one weight nudged."""
    every = max(1, num_steps // 2)
    options = ["--gears", ",".join(PARITY_GEARS), "--steps", str(num_steps), "--weights-every", str(every)]
    arguments = ["src/parity.py", RECIPE, *options, SLOW]
    command = [sys.executable, *arguments, f"run.dir={folder}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = {}
    for gear in PARITY_GEARS:
        steps = run_comparison.read_steps(folder / f"parity-{Path(RECIPE).stem}" / gear.replace(":", "-"))
        losses[gear.partition(":")[0]] = [step["loss"] for step in steps]
    settings = (folder / f"parity-{Path(RECIPE).stem}" / "single-1" / "resolved.yaml").read_text()
    warmup = yaml.safe_load(settings)["schedule"]["warmup"]
    return {
        "command": " ".join(["python", *arguments]),
        "tolerance": run_comparison.TOLERANCES["no"]["loss"],
        "losses": losses,
        "nudged": nudged(folder, patch, f"train.steps={num_steps}", f"schedule.warmup={warmup}"),
    }


def nudged(folder: Path, patch: pytest.MonkeyPatch, *overrides: str) -> list[float]:
    """Return the losses on one device after one weight was changed by one rounding, before the first step."""

    def nudge(step) -> None:
        *_, norm = (parameter for parameter in step.model.parameters() if parameter.dim() == 1)
        with torch.no_grad():
            norm[0] = torch.nextafter(norm[0], torch.tensor(torch.inf))

    with patch.context() as here:
        patch_step(here, at_step(1, nudge))
        return succeeded(run("single", folder, *NO_EVALUATION, SLOW, "save.every=0", *overrides)).losses


def resume(folder: Path, patch: pytest.MonkeyPatch) -> records.Record:
    """Return the losses of a run that is killed and resumed under another gear, and those of an undisturbed run."""
    given = (f"train.steps={RESUME_STEPS}", SLOW, "save.every=20", *NO_EVALUATION)
    reference = succeeded(run("single", folder, *given, "run.name=undisturbed")).losses
    segments = []
    for gear, step in KILLS:
        saved = [step for step, _ in list_checkpoints(folder / "killed" / "checkpoints")]
        first = max(saved, default=0)
        with patch.context() as here:
            count_steps(here)
            patch_step(here, lambda _, step=step: kill() if TrainState.now == step else None)
            outcome = run(gear, folder, *given, "run.name=killed", "run.resume=auto", num_ranks=2)
        assert set(outcome.codes) == ({-9} if step else {0}), outcome.output
        lines = outcome.lines("loss")
        segments.append({
            "gear": gear, "ranks": 2, "resumed_from": first, "killed_in": step,
            "losses": [line["loss"] for line in lines if line["step"] > first],
        })  # fmt: skip
    return {
        "recipe": RECIPE, "overrides": list(given), "undisturbed": reference, "resumed": outcome.losses,
        "segments": segments,
    }  # fmt: skip


def memory(folder: Path, patch: pytest.MonkeyPatch) -> records.Record:
    """Return the bytes that each rank holds, per trained weight, in the precision that the gear has on a GPU."""
    gears = {}
    with patch.context() as here:
        here.setattr(engine, "precision", lambda gear: gear.precision)  # on a CPU it is fp32
        for gear in MEMORY_GEARS:
            given = (*NO_EVALUATION, "train.steps=2", "save.every=0", f"run.name={gear}")
            found = at_second_step(here, folder, held, lambda gear=gear, given=given: run(gear, folder, *given))
            gears[gear] = found
    num_weights = gears["single"][0]["trained"] // 4  # in fp32
    return {"recipe": RECIPE, "num_weights": num_weights, "gears": gears}


def packing(folder: Path, patch: pytest.MonkeyPatch) -> records.Record:
    """Return a row of the recipe's data, and which tokens have an influence on the output at each of its tokens."""
    recipe = load_recipe(ROOT / RECIPE, [])
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, recipe.run.rehearse)
    quiet = corpus.Builder(tell=lambda _: None)
    documents, evaluated = corpus.load_corpora(recipe, tokenizer, quiet)
    rows = arranged.split_and_pack(recipe, documents, evaluated, tokenizer, recipe.data.packing, quiet).training
    number = most_varied_row(rows)
    batch = rows.batch([number])
    chunks = rows.row(number).tolist()
    order = batches.make_sampler(recipe, rows)
    step = next(step for step in range(len(rows)) if number in order.rows_of_step(step))
    return {
        "recipe": RECIPE,
        "row": number,
        "num_rows": len(rows),
        "step": step + 1,
        "tokens": [tokenizer.decode([token]) for token in batch["input_ids"][0].tolist()],
        "documents": [chunks.index(chunk) if chunk >= 0 else -1 for chunk in batch["chunk_ids"][0].tolist()],
        "supervised": [flag for chunk in chunks for flag in rows.chunk(chunk)[1].tolist()],
        "influence": influence(batch, Path(ROOT / recipe.model.name)),
    }


def most_varied_row(rows: PackedRows) -> int:
    """Return the first of the rows with few documents that have the most different tokens."""
    few = [number for number in range(len(rows)) if len(rows.row(number)) <= MAX_DOCUMENTS]
    return max(few, key=lambda number: (len(rows.batch([number])["input_ids"].unique()), -number))


def influence(batch: dict[str, torch.Tensor], model_folder: Path) -> list[tuple[int, int]]:
    """Return the first and last token that the output at each token depends on, by the model's gradients."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    outputs = model(inputs_embeds=embedded, position_ids=batch["position_ids"], use_cache=False).logits[0]
    ranges = []
    for output in outputs:
        (gradient,) = torch.autograd.grad(output.sum(), embedded, retain_graph=True)
        seen = gradient[0].abs().sum(-1).nonzero().flatten().tolist()
        assert seen == list(range(seen[0], seen[-1] + 1)), f"not one range of tokens: {seen}"
        ranges.append((seen[0], seen[-1]))
    return ranges


def report(folder: Path, patch: pytest.MonkeyPatch, *overrides: str) -> records.Record:
    """Return what the report of a run of the recipe shows, the files of its folder, and all gears by engine."""
    outcome = succeeded(run(REPORT_GEAR, folder / "runs", *overrides))
    lines = metrics_file.read(outcome.folder / "metrics.jsonl").good
    columns = {}  # by key: a step's names would take more room than its figures
    for key in COLUMNS:
        columns[key] = [[line["step"], float(f"{line[key]:.6g}")] for line in lines if line.get(key) is not None]
    facts = (outcome.folder / "run.json").read_text().replace(f"{folder}/", "")
    answers = metrics_file.read(outcome.folder / "answers.jsonl").good
    status = read_outcome(outcome.folder / "status.json")
    recipe = yaml.safe_load((ROOT / RECIPE).read_text())
    engines: dict[str, list[str]] = {}
    for name in gear_names():
        engines.setdefault(load_gear(gear_path(name)).engine, []).append(name)
    return {
        "recipe": RECIPE,
        "gear": REPORT_GEAR,
        "run": f"runs/{outcome.folder.name}",
        "files": sorted(path.name + "/" * path.is_dir() for path in outcome.folder.iterdir()),
        "settings": {group: values for group, values in recipe.items() if isinstance(values, dict)},
        "engines": engines,
        "facts": json.loads(facts),
        "answers": answers,
        "status": {"outcome": status["outcome"], "text": "", "time": status["time"]},
        "metrics": {key: points for key, points in columns.items() if points},
    }


PARTS = {"packing": packing, "memory": memory, "parity": parity, "resume": resume, "report": report}
