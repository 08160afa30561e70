"""Write the JSON Schema of a recipe, and the reference pages of recipes and gears.

Usage: python src/schema.py

It writes recipes/schema.json and docs/recipe.md from src/gearbox/config/recipe.py, and docs/gear-keys.md from
gear_keys.py of that folder.

Exit codes: 0 written; 2 a user error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gearbox import ROOT
from gearbox.config.gear_keys import FAMILIES, FLAGS, GEAR, ZERO_JSON, Key, Table
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.launch import cli

SCHEMA = ROOT / "recipes" / "schema.json"
REFERENCE = ROOT / "docs" / "recipe.md"
INTRODUCTION = [
    "# Recipe reference",
    "",
    "A recipe defines what to train. Any key can also be set on the command line, as `group.key=value`:",
    "",
    "```bash",
    "python src/preview.py recipes/tiny.yaml data.supervise=last --rows 1",
    "```",
    "",
    """`recipes/tiny.yaml` sets every key. Your own recipe sets the required keys and those that differ from the
defaults. `make schema` writes this page and `recipes/schema.json` from `src/gearbox/config/recipe.py`, which
defines each key.""",
    "",
    "## In your editor",
    "",
    """The first line of each recipe, `# yaml-language-server: $schema=schema.json`, points to that schema. Install the
YAML extension of VS Code, or `yaml-language-server` for Neovim, Helix, Emacs or Zed. The editor then completes
keys, shows what each key means, and underlines misspelt keys and wrong values. Keep the line when you copy a
recipe. If you save the copy in another folder, write the path to the schema, such as
`$schema=../gearbox/recipes/schema.json`.""",
    "",
]
READ_NEXT = [
    "## Read next",
    "",
    "- [Your data](data.md): sources, formats, which tokens are trained, packing",
    "- [Methods](methods.md): full, LoRA, DoRA and QLoRA training",
    "- [Which strategy fits](parallelism.md): what the gear decides, and what the recipe decides",
]
GEAR_REFERENCE = ROOT / "docs" / "gear-keys.md"
GEAR_INTRODUCTION = """# Keys and flags of a gear

```bash
python src/launch.py ddp --num_processes=2
```

A gear is an Accelerate config file. Under ZeRO it also has a JSON file for DeepSpeed. A flag of `accelerate launch`
overrides the file. `src/launch.py` takes the same flags, as `--flag=value`.

Accelerate and DeepSpeed ignore many keys that they do not use. A run ignores none. Each key and each flag is one of
these:

- **honoured**: its value decides how the run starts or trains.
- **refused**: the run does not do this. Any value but those in the table ends in one line, with what to do instead.
- **without effect**: it changes nothing that the run computes.

Files of `accelerate config` work, for plain data parallelism and for FSDP version 2. A gear for ZeRO names a JSON
file, because the questions about ZeRO cover only a part of it. Variables by which Accelerate would change a run, such
as `ACCELERATE_DYNAMO_BACKEND`, are refused too.

`make schema` writes this page from `src/gearbox/config/gear_keys.py`. The tests compare that file with Accelerate and
DeepSpeed, so a new key of a new version fails a test.
"""
GEAR_READ_NEXT = """## Read next

- [Which strategy fits](parallelism.md): choose a gear
- [Recipe reference](recipe.md): the keys that decide what to train
- [Troubleshooting](troubleshooting.md): messages and what to change
"""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "minItems": "items ≥"}
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false", "null": "null"}
Schema = dict[str, Any]  # a part of a JSON Schema


def schema() -> str:
    """Return the text of the JSON Schema file."""
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


def values(key: Schema) -> str:
    """Return the values that a key takes, in Markdown, such as `integer ≥ 1` or `` `adamw`, `adamw_8bit` ``."""
    if choices := key.get("enum", [key["const"]] if "const" in key else []):
        return ", ".join(f"`{choice}`" for choice in choices)
    if parts := key.get("anyOf", key.get("oneOf")):
        return " or ".join(dict.fromkeys(values(part) for part in parts))
    if "$ref" in key:
        return f"[{key['$ref'].split('/')[-1].lower()}](#{key['$ref'].split('/')[-1].lower()})"
    if key.get("type") == "array":
        return "pair of numbers" if "prefixItems" in key else f"list of {values(key['items']).replace(' or ', ' and ')}"
    if key.get("type") == "object":
        return "mapping"
    bounds = [f"{sign} {key[bound]:g}" for bound, sign in BOUNDS.items() if bound in key]
    return " ".join([TYPES[key["type"]], *bounds])


def table(group: Schema) -> Iterator[str]:
    """Yield the lines of a group's table: key, values, default, meaning. Deprecated keys are left out."""
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for name, key in group["properties"].items():
        if key.get("deprecated"):
            continue
        default = "required" if name in group.get("required", []) else f"`{json.dumps(key['default'])}`"
        meaning = " ".join(key["description"].split())
        meaning = re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", meaning).replace("|", "\\|")
        yield f"| `{name}` | {values(key)} | {default} | {meaning} |"


def reference() -> str:
    """Return the reference page: one table for each group of keys, in the order of the recipe."""
    recipe = Recipe.model_json_schema()
    groups = {name: key["$ref"].split("/")[-1] for name, key in recipe["properties"].items()}
    lines = [*INTRODUCTION]
    for name in [*groups, "source"]:
        group = recipe["$defs"][groups.get(name, "Source")]
        lines += [f"## {name}", "", " ".join(group["description"].split()), "", *table(group), ""]
    return "\n".join([*lines, *READ_NEXT, ""])


def key_rows(table: Table, group: str = "") -> Iterator[tuple[str, Key]]:
    """Yield each key of a gear's file with its groups, and what it does."""
    for name, key in table.items():
        if isinstance(key, Key):
            yield group + name, key
        else:
            yield from key_rows(key, f"{group}{name}.")


def key_table(rows: dict[str, Key]) -> list[str]:
    """Return the lines of a table of keys. Up to 8 keys that do the same share a line."""
    names: dict[Key, list[str]] = {}
    for name, key in rows.items():
        names.setdefault(key, []).append(f"`{name}`")
    lines = ["| key | effect | values | meaning, or what decides instead |", "|---|---|---|---|"]
    for key, same in sorted(names.items(), key=lambda row: row[0].effect):
        for i in range(0, len(same), 8):
            lines.append(f"| {', '.join(same[i : i + 8])} | {key.effect} | {key.values.text} | {key.text} |")
    return lines


def gear_reference() -> str:
    """Return the reference page of gears: keys of the file, keys of the JSON, and flags."""
    flags = FLAGS | {f"{start}*": key for start, key in FAMILIES.items()}
    parts = {
        "Keys of the gear": dict(key_rows(GEAR)),
        "Keys of the ZeRO JSON": dict(key_rows(ZERO_JSON)),
        "Flags of the launcher": {f"--{name}": key for name, key in flags.items()},
    }
    lines = [line for title, rows in parts.items() for line in (f"## {title}", "", *key_table(rows), "")]
    return "\n".join([GEAR_INTRODUCTION, *lines, GEAR_READ_NEXT])


def main(arguments: list[str]) -> None:
    """Write the three files."""
    if arguments:
        raise UserError(f"usage: {cli.usage(__doc__)}")
    for path, text in ((SCHEMA, schema()), (REFERENCE, reference()), (GEAR_REFERENCE, gear_reference())):
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    cli.run(main)
