"""Prove a recipe: train, resume, export and reload it under every gear, and write a page and a badge.

Usage: python src/prove.py [RECIPE] [--gears A,B:RANKS] [--page PATH] [key.sub=value ...]

    RECIPE             a recipe file (default: recipes/tiny.yaml)
    --gears A,B:RANKS  gears to run, the reference first (default: all gears, single first)
    --page PATH        the page to write, with the badge next to it (default: runs/proof-RECIPE/proof.md)
    key.sub=value      a key of the recipe to change; docs/recipe.md lists all keys

The recipe is rehearsed: random weights in a narrow copy of its model. A killed command resumes after the gears that are
done. A gear has the number of ranks in its file, unless the command names another one, such as ddp:2.

Exit codes: 0 every gear ran or refused the recipe with a reason; 1 a gear failed; 2 a user error.

Example:
    python src/prove.py recipes/tiny.yaml --gears single,fsdp
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path

from gearbox import filesystem
from gearbox.config.gear import gear_names
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.launch import cli
from gearbox.proving import settings


def main(arguments: list[str]) -> int:
    """Prove a recipe, and write the page and the badge. Return the exit code."""
    options = read_arguments(arguments)
    recipe_path, overrides = cli.split_arguments(options.ours)
    hints: list[str] = []
    recipe = load_recipe(recipe_path, overrides, hints.append)
    gears = settings.load_gears(options.gears.split(","))
    fixed = settings.comparison_overrides(recipe, overrides, settings.STEPS, settings.STEPS // 2)
    folder = Path(recipe.run.dir) / f"proof-{recipe_path.stem}"
    page_path = Path(options.page) if options.page else folder / "proof.md"
    check_page(page_path)
    if "run.rehearse" in recipe.given and not recipe.run.rehearse:
        raise UserError("run.rehearse: a proof is always a rehearsal; remove it")
    settings.prepare_imports()

    with cli.importing("torch"):
        import train
        from gearbox.console import make_console
        from gearbox.proving import page, prover

    screen = make_console(speaks=True)
    for hint in hints:
        screen.print(f"hint: {hint}")
    changes = settings.changes_of_proof(recipe, gears, prover.row_tokens(recipe))
    overrides += [*fixed, *(f"{one.key}={one.value}" for one in changes), "run.rehearse=true"]
    request = prover.Request(
        recipe_path, load_recipe(recipe_path, overrides), [str(recipe_path), *overrides], changes, gears, folder
    )
    with prover.locked(folder):
        try:
            proof = prover.Prover(request, train.main, screen).prove()
        except KeyboardInterrupt:
            screen.print("stopped; the same command resumes after the gears that are done")
            raise
        if not proof.of("ran") and not proof.of("failed"):
            raise UserError(f"{recipe_path}: no gear runs it: {proof.gears[0].problems[0]}")
        picture = page.write(proof, page_path)
    screen.print(f"{page.headline(proof)}; page: {page_path}; badge: {picture}")
    for line in page.paste(proof, page_path, picture):
        screen.print(f"  {line}")
    return 1 if proof.of("failed") else 0


def check_page(path: Path) -> None:
    """Raise UserError if the page cannot be written, or if it or its badge would replace another file."""
    if path.suffix != ".md":
        raise UserError(f"--page: {path}: give a file that ends in .md")
    for place, begin in ((path, "# Proof of "), (path.with_suffix(".svg"), "<svg ")):
        if place.exists() and not (place.is_file() and place.read_bytes().startswith(begin.encode())):
            raise UserError(f"--page: {place} exists, and it was not written by this command; give another name")
    try:
        filesystem.make_folder(path.parent)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"--page: {path} cannot be written: {error.strerror}; give another place") from None


def read_arguments(arguments: list[str]) -> Namespace:
    """Return the options. `ours` contains the recipe and its overrides."""
    names = gear_names()
    parser = cli.Parser(__doc__)
    parser.add_argument("ours", nargs="*", metavar="RECIPE, key.sub=value")
    parser.add_argument("--gears", default=",".join(sorted(names, key=lambda name: name != "single")))
    parser.add_argument("--page", default="")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    cli.run(main)
