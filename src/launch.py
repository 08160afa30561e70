"""Check gear and recipe in a second, then train under the gear, and resume if a rank dies.

Usage: python src/launch.py GEAR [--doctor] [--quiet] [--flag=value of accelerate ...] [RECIPE] [key.sub=value ...]

    GEAR           the name of a file in accelerate_configs/, such as fsdp, or a path that ends in .yaml
    --doctor       check machines, links and ranks first
    --quiet        print only warnings, refusals and the last line
    --flag=value   a flag of accelerate launch, such as --num_processes=2
    RECIPE         a recipe file (default: recipes/tiny.yaml)
    key.sub=value  a key of the recipe to change, such as optim.lr=1e-5; docs/recipe.md lists all keys

For a job on several machines, run this command on each machine. Give its place in the job by flags or by
torchrun's environment variables:

    --num_machines       PET_NNODES
    --machine_rank       PET_NODE_RANK
    --main_process_ip    PET_MASTER_ADDR
    --main_process_port  PET_MASTER_PORT

Exit codes: 0 done; 2 a user error; 85 saved, run the same command to resume; 93 failed, and would fail again.

Examples:
    python src/launch.py fsdp recipes/tiny.yaml run.name=first
    python src/launch.py ddp --num_processes=2 --doctor train.steps=100
"""

from __future__ import annotations

from gearbox.checks import agreement
from gearbox.config.gear import gear_names, gear_path, is_flag, read_gear
from gearbox.config.gear_keys import BARE_FLAGS, FLAGS, SHORT_FLAGS
from gearbox.config.loader import keys_meant
from gearbox.console import make_console
from gearbox.errors import UserError, nearest
from gearbox.launch import cli, supervisor
from gearbox.launch.topology import node_from_flags
from gearbox.training import resume

# Flags of Accelerate's launcher that do not fit this command.
OWN_FLAGS = {
    "config_file": "the gear is the first argument; remove it",
    "module": "this command starts src/train.py; remove it",
    "no_python": "this command starts src/train.py; remove it",
}
TORCHRUN_FLAGS = {
    "nproc_per_node": "num_processes, the number of ranks on all machines",
    "nnodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
}


def main(arguments: list[str]) -> int:
    """Check gear, recipe and machines, run the doctor with --doctor, then train. Return the exit code."""
    quiet, arguments = ["--quiet"] * ("--quiet" in arguments), cli.without_quiet(arguments)
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"usage: {cli.usage(__doc__)}; the gears are {', '.join(gear_names())}")
    path = gear_path(arguments[0])
    given_flags = launcher_flags(arguments[1:])
    flags, node = node_from_flags(given_flags)
    recipe_path, overrides = cli.split_arguments([word for word in arguments[1:] if not word.startswith("-")])
    machines = {} if node is None else {"num_machines": str(node.num_machines)}
    job = agreement.job_of(recipe_path, overrides, read_gear(path, given_flags | flags | machines))
    recipe, gear = job.recipe, job.gear
    if node is None:
        resume.check_early(job)
    if node is not None and gear.num_processes % node.num_machines:
        raise UserError(f"--num_processes={gear.num_processes}: must be divisible by the {node.num_machines} machines")

    words = [f"--{name}" if name in BARE_FLAGS else f"--{name}={value}" for name, value in flags.items()]
    given = [f"--config_file={path}", *words]
    join_seconds = recipe.run.hang_timeout + supervisor.JOIN_SECONDS
    if "--doctor" in arguments:
        code = supervisor.supervise(given, [], supervisor.DOCTOR, node=node, join_seconds=join_seconds)
        if code:
            return code
    ranks = f"{gear.num_processes} {'rank' if gear.num_processes == 1 else 'ranks'}"
    make_console(speaks=True).print(f"starting {gear.name} on {ranks}")
    return supervisor.supervise(given, [str(recipe_path), *overrides, *quiet], node=node, join_seconds=join_seconds)


def launcher_flags(arguments: list[str]) -> dict[str, str]:
    """Return the flags of Accelerate's launcher among the arguments, by name. Raise UserError for any other flag."""
    flags: dict[str, str] = {}
    for word in arguments:
        if not word.startswith("-") or word == "--doctor":
            continue
        written, equals, value = word.partition("=")
        name = SHORT_FLAGS.get(written.removeprefix("-"), written.removeprefix("--").replace("-", "_"))
        if problem := flag_problem(name, written, value, bool(equals)):
            raise UserError(f"{word}: {problem}")
        if name in flags:
            raise UserError(f"{word}: --{name} is given twice; keep one")
        flags[name] = value if equals else "true"
    return flags


def flag_problem(name: str, written: str, value: str, has_value: bool) -> str | None:
    """Return why launch.py cannot take this flag, or None. load_gear checks the values."""
    if name in OWN_FLAGS:
        return OWN_FLAGS[name]
    if name in TORCHRUN_FLAGS:
        return f"is a flag of torchrun; use --{TORCHRUN_FLAGS[name]}"
    if not is_flag(name):
        if keys := keys_meant(name):
            return f"unknown flag; a key of the recipe has no dashes: {keys[0]}={value or 'VALUE'}"
        return f"unknown flag{nearest(name, list(FLAGS)) or '; a key of the recipe is written as key.sub=value'}"
    if name in BARE_FLAGS and has_value:
        return f"takes no value; write {written}"
    if name not in BARE_FLAGS and not has_value:
        return f"write launcher flags as {written}=VALUE"
    return None


if __name__ == "__main__":
    cli.run(main)
