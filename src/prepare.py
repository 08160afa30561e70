"""Tokenize and pack a recipe's data into a folder of shards, on one machine or on several.

Usage: python src/prepare.py RECIPE FOLDER [--part I/N] [--records N] [key.sub=value ...]

    RECIPE         a recipe file; its data.path is read in any form that a run reads
    FOLDER         the folder to write, on a disk that all machines share
    --part I/N     make each N-th shard, beginning with shard I (0 to N-1). A Slurm array gives each task its part.
    --records N    records per shard (default: 100000)
    key.sub=value  a key of the recipe to change, such as data.path=chats.jsonl; docs/recipe.md lists all keys

The shards do not depend on the number of parts. A shard that exists is not made again, so run the same command again
after an interruption. The process that finds all shards writes FOLDER/index.json. Then train with data.path=FOLDER.

Exit codes: 0 the part is done; 2 a user error.

Examples:
    python src/prepare.py recipes/tiny.yaml prepared/tiny --records 5000
    python src/prepare.py recipes/tiny.yaml prepared/tiny --records 5000 --part 1/4
"""

from __future__ import annotations

import re
from pathlib import Path

from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.launch import cli, environment

MAX_RECORDS = 10**8


def main(arguments: list[str]) -> None:
    """Write the shards of one part, and the index if all shards exist."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--part", type=part_of)
    parser.add_argument("--records", type=int, default=100_000)
    options, ours = parser.parse_known_args(arguments)
    words = [word for word in ours if "=" not in word]
    if len(words) != 2 or any(word.startswith("-") for word in words):
        parser.error("give a recipe and a folder")
    if not 1 <= options.records <= MAX_RECORDS:
        parser.error(f"--records must be 1 to {MAX_RECORDS:,}, found {options.records}")
    folder = Path(words[1])
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is not a folder; give another one")
    recipe_path, overrides = cli.split_arguments([word for word in ours if word != words[1]])
    part, num_parts = options.part or environment.part_of_slurm_array() or (0, 1)
    hints: list[str] = []
    recipe = load_recipe(recipe_path, overrides, hints.append)
    refuse_objective(recipe.train.objective)

    from gearbox.console import make_console
    from gearbox.model import loading
    from gearbox.rows.prepare import Preparation

    screen = make_console(speaks=True)
    for hint in hints:
        screen.print(f"hint: {hint}")
    if num_parts > 1:
        screen.print(f"part {part} of {num_parts}: shards {part}, {part + num_parts}, {part + 2 * num_parts}, ...")
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, recipe.run.rehearse)
    try:
        preparation = Preparation(recipe, tokenizer, folder, options.records, screen.print)
        index = preparation.write_index(preparation.make_shards(part, num_parts))
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from None
    if index is None:
        screen.print("this part is done; the last part to be done writes the index")
        return
    uses = index.uses
    screen.print(
        f"{uses.read:,} documents read = {uses.trained:,} trained + {uses.held_out:,} held out + {index.dropped}; "
        f"{uses.truncated:,} truncated, {uses.split:,} split, {uses.duplicates:,} duplicates"
    )
    rows = sum(shard.rows for shard in index.shards)
    screen.print(f"{rows:,} rows in {len(index.shards):,} shards; train with data.path={folder}")


def refuse_objective(objective: str) -> None:
    """Raise UserError for an objective that does not train on prepared shards."""
    if objective != "sft":
        raise UserError(
            f"train.objective: {objective} reads files, and no prepared shards; train with these files as data.path"
        )


def part_of(text: str) -> tuple[int, int]:
    """Return I and N of I/N."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--part: {text!r}: expected I/N with I from 0 to N-1, such as 0/4")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    cli.run(main)
