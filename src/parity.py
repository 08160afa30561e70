"""Verify that gears train the same model: run a recipe under each gear, and compare every step with the first gear.

Usage: python src/parity.py [RECIPE] [--gears A,B:RANKS] [--steps N] [--weights-every K] [key.sub=value ...]

    RECIPE             a recipe file (default: recipes/tiny.yaml)
    --gears A,B:RANKS  gears to compare, the reference first (default: each engine on two ranks, or one with one GPU)
    --steps N          optimizer steps (default: 20)
    --weights-every K  compare the weights after every K-th step; each needs disk space for a checkpoint (default: 1)
    key.sub=value      a key of the recipe to change; docs/recipe.md lists all keys

ddp:2 is a gear on two ranks; ddp uses the number of ranks in its file.

Exit codes: 0 all gears are equal; 1 a gear diverges or does not run; 2 a user error.

Example:
    python src/parity.py recipes/tiny.yaml --gears single,ddp:2,fsdp:2 --steps 5
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from itertools import count
from pathlib import Path

from gearbox import processes
from gearbox.checks import agreement
from gearbox.config.gear import Gear, gear_path, load_gear
from gearbox.config.loader import load_recipe
from gearbox.config.old_keys import OLD_KEYS
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.launch import cli, outcome, supervisor

LARGE = ("checkpoints", "model", "base")  # subfolders of a run, deleted after the comparison


def main(arguments: list[str]) -> int:
    """Train under each gear, then print and write the comparison. Return the exit code."""
    options = read_arguments(arguments)
    recipe_path, overrides = cli.split_arguments(options.ours)
    gears = load_gears(options.gears.split(","))
    hints: list[str] = []
    user_recipe = load_recipe(recipe_path, overrides, hints.append)
    overrides += comparison_overrides(user_recipe, overrides, options.steps, options.weights_every)
    recipe = load_recipe(recipe_path, overrides)
    check_comparable(recipe, recipe_path)
    for gear in gears:
        agreement.job_of(recipe_path, overrides, (gear, []))

    # torch is imported from here on
    from gearbox import console
    from gearbox.distributed import engine
    from gearbox.reporting import run_comparison

    screen = console.make_console(speaks=True)
    for hint in hints:
        screen.print(f"hint: {hint}")
    folder = make_folder(Path(recipe.run.dir), f"parity-{recipe_path.stem}")
    precision = "bf16" if any(engine.precision(gear) == "bf16" for gear in gears) else "no"
    compared: list[run_comparison.Compared] = []
    try:
        for gear in gears:
            screen.print(f"{label(gear)}: {options.steps} steps, output in {folder / label(gear)}.log")
            one = run_comparison.Compared(label(gear), folder / label(gear))
            one.problem = run(gear, folder, [str(recipe_path), *overrides])
            if compared:
                one.compare_with(compared[0])
                delete_large(one.folder)
            compared.append(one)
            if compared[0].problem:
                break  # without the reference there is nothing to compare with
    except KeyboardInterrupt:
        screen.print(f"stopped; the results so far are in {folder}")
        return 130
    finally:
        for gear in gears:
            delete_large(folder / label(gear))
    tolerances = run_comparison.TOLERANCES[precision]
    screen.print(run_comparison.table(compared, tolerances))
    for one in compared:
        if text := one.explanation(tolerances):
            screen.print(f"{one.name}: {text}")
    run_comparison.write(folder / "parity.html", f"{recipe_path}, {options.steps} steps", compared, tolerances)
    screen.print(f"curves: {folder / 'parity.html'}")
    return 0 if all(one.verdict(tolerances) in ("reference", "equal") for one in compared) else 1


def read_arguments(arguments: list[str]) -> Namespace:
    """Return the options. `ours` contains the recipe and its overrides."""
    parser = cli.Parser(__doc__)
    parser.add_argument("ours", nargs="*", metavar="RECIPE, key.sub=value")
    parser.add_argument("--gears", default=default_gears())
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--weights-every", type=int, default=1)
    return parser.parse_intermixed_args(arguments)


def default_gears() -> str:
    """Return each engine on two ranks, or on one rank if the machine has one GPU."""
    return "single,fsdp:1,zero1:1,zero3:1" if processes.num_visible_gpus() == 1 else "single,ddp:2,fsdp:2,zero3:2"


def load_gears(names: list[str]) -> list[Gear]:
    """Return the gears, each with its number of ranks. Raise UserError with every problem."""
    gears, problems = [], []
    for name in names:
        stem, colon, ranks = name.partition(":")
        try:
            gears.append(load_gear(gear_path(stem), {"num_processes": ranks} if colon else {}))
        except UserError as error:
            problems.append(f"--gears: {error}")
    labels = [label(gear) for gear in gears]
    problems += [f"--gears: duplicate {name}" for name in sorted({*labels}) if labels.count(name) > 1]
    if len(names) < 2:
        problems.append(f"--gears: {names[0]}: give two or more, such as single,fsdp")
    if problems:
        raise UserError("\n".join(problems))
    return gears


def label(gear: Gear) -> str:
    """Return the name of a gear's run, with its number of ranks, such as ddp-2."""
    return f"{gear.name}-{gear.num_processes}"


def comparison_overrides(recipe: Recipe, overrides: list[str], num_steps: int, weights_every: int) -> list[str]:
    """Return the overrides that make a recipe comparable: its first steps, with checkpoints but no evaluation."""
    if num_steps < 1 or weights_every < 1:
        raise UserError(f"--steps {num_steps} --weights-every {weights_every}: both must be 1 or more")
    warmup = recipe.schedule.num_warmup_steps(recipe.train.steps or num_steps)
    warmup = min(warmup, num_steps // 4)  # so that most steps have a high learning rate
    values = {
        "train.steps": num_steps,
        "train.epochs": "null",
        "schedule.warmup": warmup,
        "schedule.decay": "20%",  # a count may not fit into so few steps
        "eval.fraction": 0,
        "eval.path": "null",
        "eval.samples": 0,
        "save.every": weights_every,
        "save.keep": max(2, -(-num_steps // weights_every)),
        "run.resume": "never",
        "run.name": "null",
    }
    for key in [override.partition("=")[0] for override in overrides]:
        if key in values or getattr(OLD_KEYS.get(key), "new", None) in values or key.startswith(("eval.", "save.")):
            raise UserError(f"{key}: the comparison sets this key; remove it (--steps N sets the length)")
    return [f"{key}={value}" for key, value in values.items()]


def check_comparable(recipe: Recipe, recipe_path: Path) -> None:
    """Raise UserError for settings that make gears differ by design."""
    problems = []
    if recipe.adapter.dropout:
        problems.append("adapter.dropout: each rank draws different random numbers; compare with adapter.dropout=0")
    if recipe.model.dropout:
        problems.append("model.dropout: each rank draws different random numbers; compare with model.dropout=false")
    if "8bit" in recipe.optim.name:
        problems.append(f"optim.name: {recipe.optim.name} rounds in blocks of a rank's shard; compare with adamw")
    if recipe.optim.master_weights == "bf16":
        problems.append("optim.master_weights: bf16 rounds every step's update; compare with fp32")
    if recipe.perf.ddp_compression != "none":
        problems.append("perf.ddp_compression: bf16 rounds the gradients under DDP; compare with none")
    if recipe.perf.float8:
        problems.append("perf.float8: rounds to 8 bits, and not every gear can; compare with false")
    if problems:
        raise UserError("\n".join(f"{recipe_path}: {problem}" for problem in problems))


def make_folder(parent: Path, name: str) -> Path:
    """Create a new folder: `name`, or name-2, name-3, ... if it exists."""
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"run.dir: {parent} cannot be written: {error.strerror}") from None
    raise AssertionError


def run(gear: Gear, folder: Path, arguments: list[str]) -> str:
    """Train under a gear in folder/<label>. Return the problem, if any. Raise KeyboardInterrupt on a stop signal."""
    flags = [f"--config_file={gear.path}", f"--num_processes={gear.num_processes}"]
    path = folder / f"{label(gear)}.log"
    with path.open("a", encoding="utf-8", buffering=1) as log:
        code = supervisor.supervise(flags, [*arguments, f"run.dir={folder}", f"run.name={label(gear)}"], output=log)
    if code in (130, outcome.EXIT_SAVED):
        raise KeyboardInterrupt
    if code == 0:
        return ""
    messages = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("gearbox: ")]
    return messages[-1].removeprefix("gearbox: ") if messages else f"exited with code {code}; see {path}"


def delete_large(run: Path) -> None:
    """Delete the large subfolders of a run."""
    for name in LARGE:
        shutil.rmtree(run / name, ignore_errors=True)


if __name__ == "__main__":
    cli.run(main)
