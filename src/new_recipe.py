"""Write a recipe for a new model: method, gear, row length and chat template chosen from its files and your GPUs.

Usage: python src/new_recipe.py MODEL [--like RECIPE] [--gpus 2x80GB] [--data PATH] [--method METHOD] [--output FILE]

    MODEL            a folder with config.json and tokenizer, a saved adapter, or a Hub id such as org/model
    --like RECIPE    the recipe to start from (default: the one in recipes/ that is nearest by method and gear)
    --gpus 2x80GB    number and kind of GPUs (default: those of this machine, or 1x24GB if it has none)
    --data PATH      your documents, as in data.path (default: those of the recipe to start from)
    --method METHOD  full, lora, qlora or dora (default: the first of full, lora and qlora that fits)
    --output FILE    the recipe to write (default: recipes/mine.yaml)
    --force          replace FILE if it exists

It then checks the recipe under its gear, shows a document, and prints the commands to train, to rehearse and to prove.

Exit codes: 0 written and checked; 2 a user error. If a check fails, the recipe is written before.

Examples:
    python src/new_recipe.py recipes/tiny --data recipes/chats.jsonl --output mine.yaml
    python src/new_recipe.py Qwen/Qwen2.5-7B-Instruct --gpus 2x80GB --method full
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import preview
from gearbox import ROOT, filesystem, processes
from gearbox.checks import agreement
from gearbox.config.gear import gear_path, load_gear
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Recipe
from gearbox.console import Screen, make_console
from gearbox.doctor import nvidia_smi
from gearbox.errors import UserError, one_line
from gearbox.launch import cli
from gearbox.planning import new_recipe, strategy
from gearbox.planning.gpus import Gpu
from gearbox.planning.new_recipe import TITLES, Choice
from gearbox.planning.strategy import METHODS, Machines
from gearbox.reporting import recipe_draft, recipe_text

DEFAULT_GPUS = "1x24GB"
OUTPUT = Path("recipes/mine.yaml")


def main(arguments: list[str]) -> None:
    """Choose, write, check and show a recipe, and print the commands that use it."""
    options = parse(arguments)
    check_output(options.output, options.force)
    model = new_recipe.checked_name(options.model)
    gpus, note = find_gpus(options.gpus)
    named = None if options.like is None else Path(options.like)
    like = load_like(named or new_recipe.nearest_recipe("full", "fsdp"))
    given = [] if options.data is None else [f"data.path={recipe_text.scalar(options.data)}"]
    data = load_like(named or new_recipe.nearest_recipe("full", "fsdp"), given).data

    with cli.importing("transformers"):
        import transformers

        from gearbox.reporting import model_facts

    transformers.logging.set_verbosity_error()  # the checks report what matters
    objective = like.train.objective if options.data is None else model_facts.objective_for(data, like)
    like = strategy.with_values(like, "train", objective=objective)
    facts = model_facts.read(model, data, like.forms)
    methods = new_recipe.methods_from(like.method) if named else METHODS
    choice = new_recipe.choose(facts, like, gpus, options.method, methods)
    like_path = named or new_recipe.nearest_recipe(choice.method, choice.gear)
    draft = recipe_draft.compose(facts, choice, load_like(like_path), options.data, named is not None)
    recipe_draft.set_objective(draft, objective, choice.method)
    if options.data is not None and named is None:
        recipe_draft.set_rows(draft, num_rows(draft), gpus)
        like = strategy.with_values(like, "batch", rows=draft.get("batch.rows"))
        choice = new_recipe.choose(facts, like, gpus, options.method, methods)  # fewer rows in a pass need less memory
        draft.set("batch.micro_rows", choice.micro_rows, "memory, and the rows of a step")
    head = recipe_text.head_of(facts, choice, like_path.name, note)
    write(options.output, recipe_text.render(draft.content, head, options.output), options.force)

    screen = make_console(speaks=True)
    screen.print(
        f"{options.output}: {TITLES[choice.method]} on {new_recipe.described(gpus)}, under the gear {choice.gear}"
    )
    differs = "what differs from {}, and why:" if draft.changes else "nothing differs from {}"
    screen.print(differs.format(_from_here(like_path)))
    for line in recipe_text.change_lines(draft.changes.values()):
        screen.print(line)
    try:
        check(options.output, choice, screen)
        if facts.template != "unread":
            preview.main([str(options.output), "--rows", "1"])
    finally:
        for line in commands(options.output, choice):
            screen.print(line)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options. Raise UserError for any other argument."""
    parser = cli.Parser(__doc__)
    parser.add_argument("model")
    for name in ("--like", "--gpus", "--data"):
        parser.add_argument(name)
    parser.add_argument("--method", choices=[name for name in TITLES if name != "qdora"])
    parser.add_argument("--output", type=Path, default=OUTPUT if OUTPUT.parent.is_dir() else ROOT / OUTPUT)
    parser.add_argument("--force", action="store_true")
    return parser.parse_args(arguments)


def check_output(path: Path, is_forced: bool) -> None:
    """Raise UserError if the recipe cannot be written there."""
    if path.suffix not in (".yaml", ".yml") or "=" in str(path) or str(path).startswith("-"):
        raise UserError(f"--output: is {str(path)!r}; give a file that ends in .yaml, without = in its name")
    try:
        is_folder, has_parent = path.is_dir(), path.parent.is_dir()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"--output: {one_line(error, 100)}; give another file") from None
    if not has_parent:
        raise UserError(f"--output: the folder {str(path.parent)!r} does not exist; make it first")
    if is_folder or (os.path.lexists(path) and not is_forced):
        raise UserError(f"--output: {path} exists; add --force to replace it, or give another file")


def find_gpus(given: str | None) -> tuple[Machines, str]:
    """Return the GPUs to plan for, and a comment if nobody named them."""
    if given is not None:
        return new_recipe.parse_gpus(given), ""
    if count := processes.num_visible_gpus():
        try:
            memory = min(int(gpu["memory.total"]) for gpu in nvidia_smi.query_gpus(["memory.total"]))
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            problem = f"nvidia-smi does not show the GPUs of this machine ({one_line(error, 100)})"
            raise UserError(f"--gpus: {problem}; give their number and kind") from None
        machines = Machines(Gpu(f"{round(memory / 1024)}GB", memory * 2**20), count)
        return machines, "Planned for the GPUs of this machine."
    note = f"Planned for {DEFAULT_GPUS}, as this machine has no GPU and --gpus was not given."
    return new_recipe.parse_gpus(DEFAULT_GPUS), note


def load_like(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe to start from. Its model need not be on this machine, as in a rehearsal."""
    try:
        recipe = load_recipe(path, ["run.rehearse=true", *(overrides or [])])
    except UserError as error:  # data.path is the only key that a user can give here
        raise UserError(str(error).replace("command line: data.path: ", "--data: ")) from None
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"rehearse": False})})


def num_rows(draft: recipe_draft.Draft) -> int | None:
    """Return the number of rows of the data; None if they cannot be read yet, which the preview explains."""
    from gearbox.data.corpus import Builder
    from gearbox.model import loading
    from gearbox.rows import stream

    recipe = Recipe.model_validate(draft.content)
    try:
        tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, rehearse=False)
        return len(stream.load_data(recipe, tokenizer, Builder())[2].training)
    except UserError:
        return None


def write(path: Path, text: str, is_forced: bool) -> None:
    """Write the recipe in one step, once it can be loaded."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        filesystem.write(draft, text)
        load_recipe(draft)
    check_output(path, is_forced)
    try:
        filesystem.atomic_write(path, text)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror}") from None


def check(path: Path, choice: Choice, screen: Screen) -> None:
    """Check recipe, gear and weights as the start of a run does. Raise UserError with what is wrong."""
    from gearbox.model import loading
    from gearbox.model.pretrained import Pretrained

    file = gear_path(choice.gear)
    flags = {} if choice.gear == "single" else {"num_processes": str(choice.gpus.total)}
    job = agreement.job_of(path, [], (load_gear(file, flags), []))
    for hint in job.hints:
        screen.print(f"hint: {hint}")
    origin = Pretrained.of(job.recipe.model)
    if origin.folder is not None and job.recipe.model.init == "pretrained":
        loading.check_weights(origin, origin.config())


def commands(path: Path, choice: Choice) -> list[str]:
    """Return the commands that rehearse, train and prove the recipe."""
    file = gear_path(choice.gear)
    ranks = [] if load_gear(file).num_processes == choice.gpus.total else [f"--num_processes {choice.gpus.total}"]
    recipe = shlex.quote(str(path))
    train = " ".join([f"accelerate launch --config_file {_from_here(file)}", *ranks, f"src/train.py {recipe}"])
    return [
        "rehearse, without GPU and network:",
        f"  {train} run.rehearse=true",
        "train:",
        f"  {train}",
        "prove that every gear trains it the same way:",
        f"  make prove RECIPE={recipe}",
    ]


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    cli.run(main)
