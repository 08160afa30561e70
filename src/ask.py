"""Ask a trained model a question, and print its greedy answer.

Usage: python src/ask.py FOLDER "question" [max_new_tokens=64] [trust_remote_code=true]

    FOLDER                  a folder with a saved model or adapter; a run saves it as runs/<name>/model
    max_new_tokens=N        stop after N tokens (default: 64)
    trust_remote_code=true  run the code shipped with the model

Exit codes: 0 answered; 2 a user error.

Example:
    python src/ask.py runs/first/model "reverse abcd"
"""

from __future__ import annotations

import gearbox.launch.lifeline  # noqa: F401  isort: skip  first: the run that asks may end before this process

import os
from pathlib import Path

from gearbox.errors import UserError
from gearbox.launch import cli

MAX_NEW_TOKENS = 100_000


def main(arguments: list[str]) -> None:
    """Load the model in a folder and print its greedy answer."""
    limits = [a.partition("=")[2] for a in arguments if a.startswith("max_new_tokens=")]
    trust = "trust_remote_code=true" in arguments
    words = [a for a in arguments if not a.startswith(("max_new_tokens=", "trust_remote_code="))]
    if len(words) != 2 or not words[1].strip():
        raise UserError(f"usage: {cli.usage(__doc__)}")
    limit = limits[0] if limits else "64"
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_NEW_TOKENS:
        raise UserError(f"max_new_tokens: is {limit[:20]!r}; use a number from 1 to {MAX_NEW_TOKENS}")
    folder = Path(words[0])
    names = ("config.json", "adapter_config.json")
    if not any(os.path.exists(folder / name) for name in names):  # noqa: PTH110  Path raises for a long name
        raise UserError(f"{folder}: contains no model; a run saves its model to runs/<name>/model")

    from gearbox.model.loading import answer, load_for_answers

    print(answer(*load_for_answers(folder, trust), words[1], int(limit)))


if __name__ == "__main__":
    cli.run(main)
