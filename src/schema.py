"""Write recipes/schema.json, the JSON Schema of a recipe: python src/schema.py"""

from __future__ import annotations

import json

from gearbox import command
from gearbox.config import ROOT, Recipe, UserError

PATH = ROOT / "recipes" / "schema.json"


def text() -> str:
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError("usage: python src/schema.py")
    PATH.write_text(text(), encoding="utf-8")
    print(f"{PATH} is written")


if __name__ == "__main__":
    command.run(main)
