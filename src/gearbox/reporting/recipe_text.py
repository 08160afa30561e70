"""Write a recipe as a commented file, and show how it differs from another one."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path

import yaml

from gearbox import ROOT
from gearbox.config.loader import DatesAsText, RawMapping
from gearbox.console import printable
from gearbox.planning.new_recipe import TITLES, Choice, ModelFacts, described
from gearbox.reporting.recipe_draft import Change, about_template, about_weights

SCHEMA = ROOT / "recipes" / "schema.json"
GROUPS = (
    "model",
    "perf",
    "adapter",
    "data",
    "batch",
    "optim",
    "schedule",
    "train",
    "preference",
    "eval",
    "save",
    "run",
)
MAX_COLUMNS, MAX_SHOWN = 120, 60
GB, MB = 10**9, 10**6
MAX_PLAIN = 10**6  # a larger number is shorter with an exponent
# Text that YAML 1.1 and 1.2 may both read as text without quotes.
PLAIN = r"[A-Za-z_/.~][A-Za-z0-9_./~%+:-]*|[0-9.]+%"


def render(content: RawMapping, head: Iterable[str], path: Path) -> str:
    """Return the file of a recipe: the line for editors, the head as comments, and a line for each group."""
    schema = os.path.relpath(SCHEMA, path.parent.resolve())
    lines = [f"# yaml-language-server: $schema={schema}", "", *(f"# {line}".rstrip() for line in head), ""]
    for group in GROUPS:
        if keys := content.get(group):
            line = f"{group}: {scalar(keys)}"
            block = [f"{group}:", *(f"  {key}: {scalar(value)}" for key, value in keys.items())]
            lines += [line] if len(line) <= MAX_COLUMNS else block
    return "\n".join(lines) + "\n"


def scalar(value: object) -> str:
    """Return a value on one line of YAML. YAML 1.1 and 1.2 read the same, except for numbers such as 1e-5."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(key)}: {scalar(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(scalar, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        if value.is_integer() and abs(value) < MAX_PLAIN:  # a key that takes 3.0 also takes 3
            return str(int(value))
        return format(Decimal(repr(value)).normalize(), "e") if 0 < value < 1e-2 else repr(value)
    if not isinstance(value, str):
        return str(value)
    if re.fullmatch(PLAIN, value) and value[-1] != ":" and yaml.load(value, DatesAsText) == value:
        return value
    return str(yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf"))).rstrip("\n")


def head_of(facts: ModelFacts, choice: Choice, like: str, note: str) -> Iterator[str]:
    """Yield the comments at the head of a recipe: what it trains where, its memory, its template, and notes."""
    what = f"{TITLES[choice.method]} of {shown(facts.name)} ({facts.sizes}) on {described(choice.gpus)}, under the gear"
    yield from _wrapped(f"{what} {choice.gear}. Made by src/new_recipe.py like {like}.")
    yield ""
    yield from memory_lines(choice)
    yield ""
    for text in (about_template(facts), about_weights(facts), choice.note, facts.note, note):
        yield from _wrapped(text)


def memory_lines(choice: Choice) -> Iterator[str]:
    """Yield what takes memory on each GPU, and the sum."""
    unit, name = (GB, "GB") if sum(size for size, _ in choice.memory) >= GB // 10 else (MB, "MB")
    parts = [(round(size / unit, 1), text) for size, text in choice.memory]
    yield "Memory per GPU:" if choice.gpus.total > 1 else "Memory:"
    yield from (f"{size:5.1f} {name}  {text}" for size, text in parts if size)
    yield f"{sum(size for size, _ in parts):5.1f} {name}  in all"


def change_lines(changes: Iterable[Change]) -> list[str]:
    """Return a line for each key: the values before and after, and the reason."""
    rows = [(one.key, f"{_brief(one.before)} -> {_brief(one.after)}", one.reason) for one in changes]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [f"  {key:<{widths[0]}}  {values:<{widths[1]}}  {reason}" for key, values, reason in rows]


def shown(name: str) -> str:
    """Return a name for a comment: on one line, without control characters, and short."""
    text = printable(name).replace("\n", "\\n")
    return text if len(text) <= MAX_SHOWN else f"...{text[-MAX_SHOWN:]}"


def _brief(value: object) -> str:
    return shown(scalar(value))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(printable(text), MAX_COLUMNS - len("# "), break_long_words=False, break_on_hyphens=False)
