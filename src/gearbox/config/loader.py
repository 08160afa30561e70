"""Load a recipe from YAML and overrides, and report every problem at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from pydantic import ValidationError

from gearbox.config.adapter_settings import saved_adapter_settings
from gearbox.config.old_keys import OLD_KEYS, OldKey, for_manifest, new_value, renamed
from gearbox.config.other_names import FIRST_KEYS, advice_on_key, advice_on_value, key_of
from gearbox.config.recipe import (
    BUILTIN,
    LOCAL_ENDINGS,
    ONE_OF,
    RESUME,
    Adapter,
    Perf,
    Recipe,
)
from gearbox.config.recipe_values import Group, Source, listed
from gearbox.errors import UserError, did_you_mean, nearest, one_line, shown
from gearbox.filesystem import read_limited

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

DEFAULT_RECIPE = Path("recipes/tiny.yaml")
COMMAND_LINE = "command line"  # the place of what is not in the recipe's file
RawMapping = dict[str, Any]  # a parsed YAML or JSON file, not yet checked
MAX_BYTES = 2**20  # of a file of settings
FORMS_RUN = "python src/launch.py single recipes/tiny.yaml data.path=builtin:forms run.name=tiny-forms"
MAKERS = {"models/smollm2-135m": "make smollm2", "runs/tiny-forms/model": FORMS_RUN}
"""The command that makes each model folder that a shipped recipe names."""


# PyYAML also raises other errors, such as TypeError for a list as a key.
YAML_ERRORS = (yaml.YAMLError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class DatesAsText(yaml.SafeLoader):
    """A loader that reads dates as text, because no key takes a date and a name may be one."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_text(path: Path) -> str:
    """Return the text of a file of settings. Raise UserError if it cannot be read, but FileNotFoundError if missing."""
    try:
        return read_limited(path, MAX_BYTES).decode()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: {error}; save it as UTF-8") from None


def read_yaml(path: Path) -> RawMapping:
    """Return the mapping in a YAML file. Raise UserError for unreadable files, invalid YAML and duplicate keys."""

    class UniqueKeyLoader(DatesAsText):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    line = key_node.start_mark.line + 1
                    raise UserError(f"{path}:{line}: duplicate key {key_node.value!r}; keep one")
                seen.add(str(key_node.value))
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(read_text(path), UniqueKeyLoader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        raise UserError(f"{path}: no such file{did_you_mean(near)}") from None
    except YAML_ERRORS as error:
        raise UserError(f"{path}: invalid YAML: {one_line(error, None)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping of groups, such as `model:`, found {type(content).__name__}")
    return content


class RecipeRead(NamedTuple):
    """The result of reading a recipe."""

    recipe: Recipe | None
    """The recipe without its wrong keys; None if too little of it is right."""
    problems: list[str]
    hints: list[str]
    """A line for each place that uses an old key, and for each key of the file that gives way."""


def load_recipe(
    path: Path, overrides: list[str] | None = None, hint: Callable[[str], None] = lambda text: None
) -> Recipe:
    """Load the recipe at `path` with `key.sub=value` overrides. Raise UserError with every problem at once.

    Call `hint` with each hint of `RecipeRead`.
    """
    recipe, problems, hints = read_recipe(path, overrides or [])
    if recipe is None or problems:
        raise UserError("\n".join(problems))
    for line in hints:
        hint(line)
    return recipe


def read_recipe(path: Path, overrides: list[str]) -> RecipeRead:
    """Read the recipe at `path` with `key.sub=value` overrides."""
    try:
        written = read_yaml(path)
    except UserError as error:
        return RecipeRead(None, [str(error)], [])
    content, old_keys = renamed(written)
    old_places = [(str(path), key) for key in old_keys]
    in_file = deepcopy(content)
    given = Given.apply(content, overrides)
    old_places += [(COMMAND_LINE, key) for key in given.old_keys]
    recipe, problems = _checked(content, given.keys)
    of_file = _checked(in_file, frozenset())[1] if overrides else problems
    places = [path if problem in of_file else COMMAND_LINE for problem in problems]
    lines = [f"{COMMAND_LINE}: {problem}" for problem in given.problems]
    lines += [f"{place}: {problem}" for place, problem in zip(places, problems, strict=True)]
    hints = [f"{place}: {key.old} is now {key.new}, which {key.advice}" for place, key in old_places]
    hints += [f"{COMMAND_LINE}: {replaced} of {path}" for replaced in given.replaced]
    return RecipeRead(recipe, lines, hints)


def _checked(content: RawMapping, given: frozenset[str]) -> tuple[Recipe | None, list[str]]:
    """Return the recipe with the right keys of this content, if they are enough, and every problem."""
    problems = []
    try:
        recipe = Recipe.model_validate(content, context=given)
    except ValidationError as error:
        problems = [_explain(details) for details in error.errors()]
        try:
            recipe = Recipe.model_validate(_without(content, error.errors()), context=given)
        except ValidationError:
            return None, problems
        return recipe, problems + _missing_files(recipe)
    try:
        recipe = _with_saved_adapter(recipe)
    except ValueError as error:
        problems.append(str(error))
    return recipe, problems + _missing_files(recipe)


def _without(content: RawMapping, errors: list[ErrorDetails]) -> RawMapping:
    """Return the content without the keys that pydantic rejects."""
    content = deepcopy(content)
    for details in errors:
        place, keys = content, [str(part) for part in details["loc"]]
        if not keys:  # of a check of the whole recipe, whose message begins with the key
            keys = details["msg"].removeprefix("Value error, ").partition(":")[0].split(".")
        while keys[1:] and isinstance(place.get(keys[0]), dict):
            place = place[keys.pop(0)]
        if details["type"] != "missing":
            place.pop(keys[0], None)
    return content


def located(line: str, recipe: Recipe, path: Path) -> str:
    """Return a line that starts with a key, prefixed with the place that gives the key: command line or recipe."""
    key = re.split("[:,]", line, maxsplit=1)[0]
    return f"{COMMAND_LINE if key in recipe.given else path}: {line}"


@dataclass
class Given:
    """The keys that the command line gives, and what came of applying them to a recipe."""

    keys: frozenset[str]
    problems: list[str] = field(default_factory=list)
    """Overrides that cannot be read."""
    replaced: list[str] = field(default_factory=list)
    """Pairs of keys of which only one may be set: the new key and the one that it replaces."""
    old_keys: list[OldKey] = field(default_factory=list)

    @classmethod
    def apply(cls, content: RawMapping, overrides: list[str]) -> Given:
        """Apply `key.sub=value` overrides in place."""
        pairs = [override.partition("=") for override in overrides]
        given = cls(frozenset(key for key, _, _ in pairs))
        for key, equals, text in pairs:
            value = value_of(text)
            if (old := OLD_KEYS.get(key)) is not None and old.new not in given.keys:
                key, value = old.new, new_value(old, value)
                given.old_keys += [old] if old not in given.old_keys else []
            *groups, last = key.split(".")
            if not equals or not last or (not groups and isinstance(value, dict)):
                form = "overrides take the form group.key=value, such as optim.lr=1e-5"
                given.problems.append(f"{key + equals + text!r}: {form}")
                continue
            target = content
            for group in groups:
                if not isinstance(target.get(group), dict):
                    target[group] = {}
                target = target[group]
            target[last] = value
        given.keys |= {old.new for old in given.old_keys}
        for key, other in (ONE_OF, ONE_OF[::-1]):
            if key in given.keys and other not in given.keys:
                given._replace(content, key, other)
        return given

    def _replace(self, content: RawMapping, key: str, other: str) -> None:
        """Remove a key of the file that may not be set together with a key of the command line."""
        group, name = key.split(".")
        keys = content[group]
        if not isinstance(keys, dict) or keys.get(name) is None:  # a later override may set the group itself
            return
        if keys.pop(other.removeprefix(f"{group}."), None) is not None:
            self.replaced.append(f"{key} replaces {other}")


def value_of(text: str) -> object:
    """Return the value of an override, read as YAML, or its text if it is no YAML."""
    try:
        return yaml.load(text, DatesAsText)
    except YAML_ERRORS:
        return text


def recipe_for_manifest(recipe: Recipe) -> RawMapping:
    """Return the recipe as stored in a manifest."""
    return for_manifest(recipe.model_dump(mode="json"), Perf().model_dump())


def _with_saved_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe with the settings of the adapter at adapter.path. Raise ValueError if they conflict."""
    path = recipe.adapter.path
    if path is not None and Path(path).is_dir():
        recipe = recipe.model_copy(update={"adapter": saved_adapter_settings(recipe.adapter, Path(path))})
    elif path is not None and recipe.adapter.method == "none":
        raise ValueError(
            f"adapter.path: {path!r} is not a local folder; for a Hub adapter, also set adapter.method to lora or dora"
        )
    given = [key for key in Adapter.model_fields if key in recipe.adapter.model_fields_set and key != "path"]
    if given and path is None and "method" not in given:
        raise ValueError(
            f"adapter.{given[0]}: is set without adapter.method, so all weights would be trained; set adapter.method: "
            "lora, dora or none"
        )
    if recipe.model.quantize and recipe.adapter.method == "none":
        raise ValueError(
            "model.quantize: freezes the weights and needs an adapter; set adapter.method: lora, or quantize: null"
        )
    return recipe


def _missing_files(recipe: Recipe) -> list[str]:
    """Return a problem for each local path that does not exist. A name such as `org/model` may be on the Hub."""
    problems = []
    name = recipe.model.name
    looks_local = name.startswith((".", "/", "~", "models/", "recipes/", "runs/"))
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            problems.append(f"model.name: the folder {name!r} has no config.json")
    elif looks_local or name.count("/") > 1:
        hint = f"first run `{MAKERS[name]}`" if name in MAKERS else "give a folder or a Hub id such as org/model"
        problems.append(f"model.name: no such folder {name!r}; {hint}")
    for key, paths in (("data.path", recipe.data.path), ("eval.path", recipe.eval.path or [])):
        for source in listed(paths):
            problems += _missing_data(key, source.path)
    resume = recipe.run.resume
    if resume not in RESUME and not (Path(resume) / "manifest.json").is_file():
        problems.append(f"run.resume: {resume!r} is not a checkpoint folder; use one, or {', '.join(RESUME)}")
    if recipe.data.chat_template is not None and not Path(recipe.data.chat_template).is_file():
        problems.append(f"data.chat_template: no such file {recipe.data.chat_template!r}")
    return problems if not recipe.run.rehearse else [p for p in problems if not p.startswith("model.")]


def _missing_data(key: str, path: str) -> list[str]:
    """Return a problem if a data path cannot be read. `key` is the recipe key that gave it."""
    if path in BUILTIN or is_url(path):
        return []
    if found := matches(path):
        odd = [file for file in found if not (file.is_file() or file.is_dir())]  # such as a pipe
        return [f"{key}: {odd[0]} is {_kind(odd[0])}; give a file or a folder"] if odd else []
    if path.startswith("builtin:"):
        return [f"{key}: unknown built-in data {path!r}; the built-in data are {', '.join(BUILTIN)}"]
    if any(letter in path for letter in "*?["):
        return [f"{key}: no file matches {path!r}"]
    if "," in path:
        parts = ", ".join(part.strip() for part in path.split(",") if part.strip())
        return [f"{key}: no such file {path!r}; write a list as {key}='[{parts}]'"]
    if is_local(path) or path.count("/") > 1:
        return [f"{key}: no such file {path!r}"]
    return []


def _kind(path: Path) -> str:
    """Return what a path is that is neither file nor folder."""
    return "not a regular file" if path.exists() else "a link that leads nowhere"


def matches(path: str) -> list[Path]:
    """Return the file or folder with that name, or the sorted matches of a glob."""
    expanded = Path(path).expanduser()
    return [expanded] if expanded.exists() else [Path(p) for p in sorted(glob(str(expanded), recursive=True))]  # noqa: PTH207  a pattern with any root


def is_url(path: str) -> bool:
    """Return whether a data.path is a URL."""
    return "://" in path


def is_local(path: str) -> bool:
    """Return whether a data.path is local, not on the Hub."""
    return (
        path in BUILTIN
        or path.endswith(LOCAL_ENDINGS)
        or path.startswith((".", "/", "~", "file://"))
        or bool(matches(path))
    )


def _explain(details: ErrorDetails) -> str:
    """Return a pydantic error as one line that starts with the key."""
    location = [str(part) for part in details["loc"] if isinstance(part, str | int)]
    in_source = location[1:3] == ["path", "list"]
    if location[1:2] == ["path"]:
        del location[2:3]  # pydantic's tag of the union member, which the user did not write
    key, kind, value = ".".join(location), details["type"], details["input"]
    if kind == "extra_forbidden":
        return f"{key}: {_explain_unknown_key(location, in_source, value)}"
    if kind == "missing":
        return f"{key}: is required"
    message = details["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{key}: {message}" if key else message
    if kind == "model_type" and key in FIRST_KEYS:
        first = f"{key}.{FIRST_KEYS[key]}"
        is_plain = value is not None and not isinstance(value, list | bool)
        advice = (advice_on_value(first, value) or f"; use {first}: {value}") if is_plain else ""
        return f"{key}: is a group of keys, found {shown(value)}{advice}"
    advice = advice_on_value(key, value)
    if not advice and isinstance(value, str) and value.endswith(","):
        advice = "; remove the comma"
    return f"{key}: {message[0].lower()}{message[1:]}, found {shown(value)}{advice}"


def _explain_unknown_key(location: list[str], in_source: bool, value: object) -> str:
    """Return the message for a key that the schema lacks, with the key that is meant or the nearest one."""
    if (old := OLD_KEYS.get(".".join(location))) is not None:
        return f"is the old name of {old.new}, which is also set; keep one"
    name = location[-1]
    group = Source if in_source else Recipe if len(location) == 1 else Recipe.model_fields[location[0]].annotation
    meant = did_you_mean(keys_meant(name)) or advice_on_key(name, value)
    return f"unknown key{meant or nearest(name, keys_of_group(group))}"


def recipe_keys() -> list[str]:
    """Return every key of the schema, as group.key."""
    return [f"{group}.{key}" for group, field in Recipe.model_fields.items() for key in keys_of_group(field.annotation)]


def keys_of_group(annotation: object) -> list[str]:
    """Return the keys of a group, given its type. Any other type has no keys."""
    if isinstance(annotation, type) and issubclass(annotation, Group | Source):
        return list(annotation.model_fields)
    return []


def keys_meant(name: str) -> list[str]:
    """Return the recipe's keys or groups with this name, or the one that other trainers call so."""
    exact = [known for known in [*recipe_keys(), *Recipe.model_fields] if f".{known}".endswith(f".{name}")]
    return exact or [*filter(None, [key_of(name)])]
