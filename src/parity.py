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

from argparse import Namespace
from itertools import count
from pathlib import Path

from gearbox import processes
from gearbox.checks import agreement
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.launch import cli
from gearbox.proving.runs import delete_large, launch
from gearbox.proving.settings import comparison_overrides, incomparable, label, load_gears


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
    from gearbox.pages import run_comparison

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
            one.problem = launch(gear, folder, [str(recipe_path), *overrides]).problem
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


def check_comparable(recipe: Recipe, recipe_path: Path) -> None:
    """Raise UserError for settings that make gears differ by design."""
    if problems := [
        f"{recipe_path}: {one.key}: {one.why}; compare with {one.key}={one.value}" for one in incomparable(recipe)
    ]:
        raise UserError("\n".join(problems))


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


if __name__ == "__main__":
    cli.run(main)
