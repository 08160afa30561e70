"""Write the largest probabilities of a teacher at each target token, for a student to train on.

Usage: accelerate launch --config_file accelerate_configs/GEAR.yaml src/teach.py [RECIPE] model.name=TEACHER [...]
       python src/teach.py [RECIPE] model.name=TEACHER [--to FOLDER] [--top K] [key.sub=value ...] [--quiet]

    RECIPE         the student's recipe (default: recipes/tiny.yaml): the same documents, cut into rows of the same size
    model.name     the teacher, in place of the student; both have the same tokens
    --to FOLDER    the folder to write, which must not exist (default: train.teacher of the recipe)
    --top K        number of tokens to keep at each target; all others count as one (default: 64)
    key.sub=value  a key of the recipe to change; docs/recipe.md lists all keys
    --quiet        print only warnings, refusals and the last line

The second form runs the gear single. The folder has 8 x K + 4 bytes for each target. It does not depend on the packing,
on the order of the rows or on the gear. Then train the student with train.objective=distil train.teacher=FOLDER.

FOLDER appears when it is complete. Until then FOLDER.partial has the parts that are: the same command resumes from them
after a kill, also under another gear.

Exit codes of the second form: 0 done; 1 crashed; 2 a user error; 130 interrupted. Under `accelerate launch`, 0 means
done.

Example:
    python src/teach.py recipes/tiny.yaml model.name=runs/large/model model.init=pretrained --to probabilities
"""

from __future__ import annotations

import gearbox.launch.lifeline  # noqa: F401  isort: skip  first, so that this process ends with its launcher

from argparse import Namespace
from pathlib import Path

from gearbox.checks.agreement import read_job
from gearbox.config.gear import Gear
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.launch import cli, environment

MAX_TOP = 2**17
USUAL = ["train.objective=sft", "train.teacher=null"]  # the set-up of a run without a teacher


def main(arguments: list[str], gear: Gear | None = None) -> int:
    """Compute and write the probabilities. Return the exit code."""
    environment.let_segments_grow()  # before torch is imported
    options = read_arguments(arguments)
    folder = folder_of(options)
    job = read_job([*options.ours, *USUAL], gear)
    cli.show_job(job)
    with cli.importing("torch"):
        from gearbox.checkpoint.train_state import TrainState
        from gearbox.console import format_bytes
        from gearbox.generation import teaching
        from gearbox.training import session
        from gearbox.training.run_folder import Run

    job, data = session.prepare_data(job)
    session.refuse_prepared(job.recipe, data)
    world = session.join(job, data)
    with teaching.new_folder(folder, world) as made:
        with cli.status("loading the teacher"):
            engine = session.build_engine(job, data, world, Run(made, TrainState()))
        session.check_engine(engine, data)
        rows = session.choose_rows(engine, data)
        facts = teaching.write(engine, [rows.training, rows.held_out], data.tokenizer, made, options.top)
    num_bytes = format_bytes(sum(file.bytes for file in facts.files.values()))
    world.screen.print_always(
        f"{folder}: {facts.top} probabilities of each of {facts.num_targets:,} targets, {num_bytes}; train with "
        f"train.objective=distil train.teacher={folder}"
    )
    return 0


def read_arguments(arguments: list[str]) -> Namespace:
    """Return the options. `ours` contains the recipe and its overrides."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--to")
    parser.add_argument("--top", type=int, default=64)
    options, ours = parser.parse_known_args(cli.without_quiet(arguments))
    options.ours = ours
    if not 1 <= options.top <= MAX_TOP:
        raise UserError(f"--top: must be 1 to {MAX_TOP:,}, found {options.top}")
    return options


def folder_of(options: Namespace) -> Path:
    """Return the folder to write. Raise UserError if none is given, or if it exists."""
    given = options.to
    if given is None:
        given = load_recipe(*cli.split_arguments(options.ours)).train.teacher
    if not given:
        raise UserError("--to: is missing, and the recipe has no train.teacher; give the folder to write")
    folder = Path(given)
    if folder.exists() or folder.is_symlink():
        from gearbox.generation.teaching import is_started  # which imports torch

        if is_started(folder):
            return folder
        raise UserError(f"--to: {folder} exists; delete it, or give another folder")
    return folder


if __name__ == "__main__":
    cli.run(main, diverts=True)
