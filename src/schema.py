"""Write recipes/schema.json, the JSON Schema of a recipe: python src/schema.py"""

from __future__ import annotations

import json

from gearbox import ROOT
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.launch import cli

PATH = ROOT / "recipes" / "schema.json"


def text() -> str:
    """Return the schema as it is written to the file."""
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


def main(arguments: list[str]) -> None:
    """Write the schema."""
    if arguments:
        raise UserError("usage: python src/schema.py")
    PATH.write_text(text(), encoding="utf-8")
    print(f"{PATH} is written")


if __name__ == "__main__":
    cli.run(main)
