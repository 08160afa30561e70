"""Check everything that can be checked in a second, then train under a gear. Exit code 2 for the user's mistakes.

python src/launch.py GEAR [--flag=value of accelerate launch ...] [RECIPE] [key.sub=value ...]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from gearbox import command
from gearbox.config import ROOT, UserError, accumulation, load_recipe, nearest
from gearbox.gear import check_against, load_gear


def main(arguments: list[str]) -> int:
    gears = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"usage: python src/launch.py GEAR [RECIPE] [key.sub=value ...]; the gears: {', '.join(gears)}")
    path = Path(arguments[0])
    if path.suffix != ".yaml":
        if arguments[0] not in gears:
            hint = nearest(arguments[0], gears)
            raise UserError(f"{arguments[0]}: there is no such gear{hint or '; the gears: ' + ', '.join(gears)}")
        path = ROOT / "accelerate_configs" / f"{arguments[0]}.yaml"
    flags = [argument for argument in arguments[1:] if argument.startswith("--")]
    ours = [argument for argument in arguments[1:] if not argument.startswith("--")]
    if bare := [flag for flag in flags if "=" not in flag]:
        raise UserError(f"{bare[0]}: write the launcher's flags as {bare[0]}=VALUE")

    recipe_path, overrides = command.split_arguments(ours)
    problems = []
    recipe = gear = None
    try:
        recipe = load_recipe(recipe_path, overrides)
    except UserError as error:
        problems.append(str(error))
    try:
        gear = load_gear(path, dict(flag.removeprefix("--").split("=", 1) for flag in flags))
    except UserError as error:
        problems.append(str(error))
    if recipe is None or gear is None:
        raise UserError("\n".join(problems))
    check_against(
        gear, recipe, recipe_path, *accumulation(recipe.batch.rows, gear.num_processes, recipe.batch.micro_rows)
    )
    return launch([f"--config_file={path}", *flags, str(ROOT / "src" / "train.py"), str(recipe_path), *overrides])


def launch(arguments: list[str]) -> int:
    """Run `accelerate launch` with these arguments, hand SIGTERM on, and return the exit code of the run."""
    with tempfile.TemporaryDirectory() as folder:
        refusal = Path(folder) / "refusal"
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *arguments],
            env=os.environ | {command.REFUSAL_FILE: str(refusal)},
        )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the launcher too, which ends the ranks
        code = process.wait()
        if refusal.is_file():
            print(refusal.read_text(encoding="utf-8"), file=sys.stderr)
            return command.EXIT_USER_ERROR
        return code


if __name__ == "__main__":
    command.run(main)
