"""Check gear and recipe in a second, then train under the gear, and resume if a rank dies.

python src/launch.py GEAR [--doctor] [--flag=value of accelerate launch ...] [RECIPE] [key.sub=value ...]

For a job on several machines, run this command on each machine. Give its place in the job by flags or by
torchrun's environment variables:

    --num_machines       PET_NNODES
    --machine_rank       PET_NODE_RANK
    --main_process_ip    PET_MASTER_ADDR
    --main_process_port  PET_MASTER_PORT

Exit codes: 0 done; 2 a user error; 85 saved, run the same command to resume; 93 failed, and would fail again.
"""

from __future__ import annotations

from pathlib import Path

from gearbox.config.gear import Gear, gear_names, gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.launch import cli, supervisor
from gearbox.launch.topology import node_from_flags
from gearbox.training import resume


def main(arguments: list[str]) -> int:
    """Check gear, recipe and machines, run the doctor with --doctor, then train. Return the exit code."""
    if not arguments or arguments[0].startswith("-"):
        gears = ", ".join(gear_names())
        raise UserError(
            f"usage: python src/launch.py GEAR [--doctor] [RECIPE] [key.sub=value ...]; the gears are {gears}"
        )
    path = gear_path(arguments[0])
    flags, node = node_from_flags(launcher_flags(arguments[1:]))
    ours = [word for word in arguments[1:] if not word.startswith("--") or "." in word.partition("=")[0]]
    recipe_path, overrides = cli.split_arguments(ours)
    gear, recipe = load_both(path, flags, recipe_path, overrides)
    job = Job.of(recipe_path, recipe, gear)
    if node is None:
        resume.check_early(job)
    if node is not None and gear.num_processes % node.num_machines:
        raise UserError(f"--num_processes={gear.num_processes}: must be divisible by the {node.num_machines} machines")

    given = [f"--config_file={path}", *(f"--{name}={value}" for name, value in flags.items())]
    join_seconds = recipe.run.hang_timeout + supervisor.JOIN_SECONDS
    if "--doctor" in arguments:
        code = supervisor.supervise(given, [], supervisor.DOCTOR, node=node, join_seconds=join_seconds)
        if code:
            return code
    return supervisor.supervise(given, [str(recipe_path), *overrides], node=node, join_seconds=join_seconds)


def launcher_flags(arguments: list[str]) -> dict[str, str]:
    """Return the Accelerate flags among the arguments, by name. Raise UserError if a flag has no value."""
    flags = [argument for argument in arguments if argument.startswith("--") and argument != "--doctor"]
    if bare := [flag for flag in flags if "=" not in flag]:
        raise UserError(f"{bare[0]}: write launcher flags as {bare[0]}=VALUE")
    return dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def load_both(gear_file: Path, flags: dict[str, str], recipe_file: Path, overrides: list[str]) -> tuple[Gear, Recipe]:
    """Return the gear and the recipe. Raise UserError with the problems of both."""
    gear = recipe = None
    problems = []
    try:
        recipe = load_recipe(recipe_file, overrides)
    except UserError as error:
        problems.append(str(error))
    try:
        gear = load_gear(gear_file, flags)
    except UserError as error:
        problems.append(str(error))
    if recipe is None or gear is None:
        raise UserError("\n".join(problems))
    return gear, recipe


if __name__ == "__main__":
    cli.run(main)
