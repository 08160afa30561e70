"""Show what a recipe trains on: its first documents with their supervised text, and its counts.

Usage: python src/preview.py [RECIPE] [--rows N] [--json] [key.sub=value ...]

    RECIPE         a recipe file (default: recipes/tiny.yaml)
    --rows N       number of documents to show, or of pairs (default: 5)
    --json         print each document in file order, before packing, as JSON with input_ids and supervised (0 or 1);
                   answers that are compared also have label: 1 for chosen or good, 0 for rejected or bad
    key.sub=value  a key of the recipe to change, such as data.path=chats.jsonl; docs/recipe.md lists all keys

Exit codes: 0 shown; 2 a user error.

Examples:
    python src/preview.py recipes/tiny.yaml data.supervise=last --rows 1
    python src/preview.py recipes/tiny.yaml --json
"""

from __future__ import annotations

import json
import os
import sys

from gearbox.config.job import rehearsed
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.launch import cli


def main(arguments: list[str]) -> None:
    """Print a recipe's first documents and its counts, or every document as JSON."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options, ours = parser.parse_known_args(arguments)
    recipe_path, overrides = cli.split_arguments(ours)
    hints: list[str] = []
    recipe = load_recipe(recipe_path, overrides, hints.append)

    from gearbox.console import make_console
    from gearbox.data.corpus import Builder
    from gearbox.model import loading
    from gearbox.reporting import plan, preview
    from gearbox.rows import stream
    from gearbox.rows.streamed_rows import PreparedCorpus

    if recipe.run.rehearse:
        recipe = rehearsed(recipe)
    screen = make_console(speaks=True, stderr=options.json)
    for hint in hints:
        screen.print(f"hint: {hint}")
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, recipe.run.rehearse)
    documents, _, rows = stream.load_data(recipe, tokenizer, Builder(tell=screen.print))
    if options.json:
        if isinstance(documents, PreparedCorpus):
            raise UserError(f"--json: lists the records of files, but {recipe.data.path} has prepared shards")
        try:
            for line in preview.lines(documents, rows, recipe):
                print(json.dumps(line))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    preview.show(screen, preview.first_documents(rows.training, tokenizer, options.rows, recipe))
    plan.show_lines(screen, plan.data_facts(recipe, documents, rows, tokenizer))


if __name__ == "__main__":
    cli.run(main)
