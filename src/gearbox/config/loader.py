"""Load a recipe from YAML and overrides, and report every problem at once. Old keys still work."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from gearbox.config.adapter_settings import saved_adapter_settings
from gearbox.config.recipe import (
    BUILTIN_TASKS,
    LOCAL_ENDINGS,
    OLD_WARMUP,
    RESUME,
    Adapter,
    Recipe,
    Source,
    keys_of_group,
    recipe_keys,
)
from gearbox.errors import UserError, did_you_mean, nearest, one_line

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

DEFAULT_RECIPE = Path("recipes/tiny.yaml")
RawMapping = dict[str, Any]  # a parsed YAML or JSON file, not yet checked


def read_yaml(path: Path) -> RawMapping:
    """Return the mapping in a YAML file. Raise UserError for unreadable files, invalid YAML and duplicate keys."""

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    line = key_node.start_mark.line + 1
                    raise UserError(f"{path}:{line}: duplicate key {key_node.value!r}; keep one")
                seen.add(str(key_node.value))
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        raise UserError(f"{path}: no such file{did_you_mean(near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: invalid YAML: {one_line(error, None)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping of groups, such as `model:`, found {type(content).__name__}")
    return content


def load_recipe(
    path: Path, overrides: list[str] | None = None, hint: Callable[[str], None] = lambda text: None
) -> Recipe:
    """Load the recipe at `path` with `key.sub=value` overrides. Raise UserError with every problem at once.

    Call `hint` with one line for each place that uses an old key.
    """
    written = read_yaml(path)
    content = with_new_keys(written)
    old_key_places = [str(path)] if content is not written else []
    problems, overrides_use_old_key = _apply_overrides(content, overrides or [])
    if overrides_use_old_key:
        old_key_places.append("command line")
    recipe = None
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        problems += [_explain(details) for details in error.errors()]
    if recipe is not None:
        try:
            recipe = _with_saved_adapter(recipe)
        except ValueError as error:
            problems.append(str(error))
        problems += _missing_files(recipe)
    if problems or recipe is None:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    for place in old_key_places:
        hint(f"{place}: {OLD_WARMUP} is now schedule.warmup, which takes a step count or a share such as 5%")
    return recipe


def _apply_overrides(content: RawMapping, overrides: list[str]) -> tuple[list[str], bool]:
    """Apply `key.sub=value` overrides in place. Return the problems, and whether an old key was used."""
    problems = []
    uses_old_key = False
    given = {override.partition("=")[0] for override in overrides}
    for override in overrides:
        key, equals, text = override.partition("=")
        if key == OLD_WARMUP and "schedule.warmup" not in given:
            key, uses_old_key = "schedule.warmup", True
        *groups, last = key.split(".")
        if not equals or not groups:
            problems.append(f"{override!r}: overrides take the form group.key=value, such as optim.lr=1e-5")
            continue
        target = content
        for group in groups:
            if not isinstance(target.get(group), dict):
                target[group] = {}
            target = target[group]
        try:
            target[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            target[last] = text
    return problems, uses_old_key


def with_new_keys(content: RawMapping) -> RawMapping:
    """Return a recipe's content with schedule.warmup_steps renamed to schedule.warmup, or `content` itself.

    Content with both keys is returned unchanged: validation then rejects the old key.
    """
    schedule = content.get("schedule")
    if not isinstance(schedule, dict) or "warmup_steps" not in schedule or "warmup" in schedule:
        return content
    return content | {"schedule": {"warmup" if key == "warmup_steps" else key: schedule[key] for key in schedule}}


def recipe_for_manifest(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as stored in a manifest. A warm-up count keeps its old key, so older versions can resume."""
    content = recipe.model_dump(mode="json")
    schedule = content["schedule"]
    if isinstance(schedule["warmup"], int):
        schedule["warmup_steps"] = schedule.pop("warmup")
    return content


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
        hint = "; run `make smollm2` to make it" if name == "models/smollm2-135m" else ""
        problems.append(f"model.name: no such folder {name!r}{hint or '; give a folder or a Hub id such as org/model'}")
    for path in [source.path for source in recipe.data.sources]:
        problems += _missing_data("data.path", path)
    if recipe.eval.path is not None:
        problems += _missing_data("eval.path", recipe.eval.path)
    resume = recipe.run.resume
    if resume not in RESUME and not (Path(resume) / "manifest.json").is_file():
        problems.append(f"run.resume: {resume!r} is not a checkpoint folder; use one, or {', '.join(RESUME)}")
    if recipe.data.chat_template is not None and not Path(recipe.data.chat_template).is_file():
        problems.append(f"data.chat_template: no such file {recipe.data.chat_template!r}")
    return problems if not recipe.run.rehearse else [p for p in problems if not p.startswith("model.")]


def _missing_data(key: str, path: str) -> list[str]:
    """Return a problem if a data path does not exist. `key` is the recipe key that gave it."""
    if path == BUILTIN_TASKS or matches(path):
        return []
    if path.startswith("builtin:"):
        return [f"{key}: unknown built-in data {path!r}; the only built-in data is {BUILTIN_TASKS}"]
    if any(letter in path for letter in "*?["):
        return [f"{key}: no file matches {path!r}"]
    if is_local(path) or path.count("/") > 1:
        return [f"{key}: no such file {path!r}"]
    return []


def matches(path: str) -> list[Path]:
    """Return the file or folder with that name, or the sorted matches of a glob."""
    expanded = Path(path).expanduser()
    return [expanded] if expanded.exists() else [Path(p) for p in sorted(glob(str(expanded), recursive=True))]  # noqa: PTH207  a pattern with any root


def is_local(path: str) -> bool:
    """Return whether a data.path is local, not on the Hub."""
    return (
        path == BUILTIN_TASKS or path.endswith(LOCAL_ENDINGS) or path.startswith((".", "/", "~")) or bool(matches(path))
    )


def _explain(details: ErrorDetails) -> str:
    """Return a pydantic error as one line that starts with the key."""
    location = [str(part) for part in details["loc"] if isinstance(part, str | int)]
    in_source = location[:3] == ["data", "path", "list"]
    if location[:2] == ["data", "path"]:
        del location[2:3]  # pydantic's tag of the union member, which the user did not write
    key, kind = ".".join(location), details["type"]
    if kind == "extra_forbidden":
        return f"{key}: {_explain_unknown_key(location, in_source)}"
    if kind == "missing":
        return f"{key}: is required"
    message = details["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, found {details['input']!r}"


def _explain_unknown_key(location: list[str], in_source: bool) -> str:
    """Return the message for a key that the schema lacks, with the nearest known key."""
    if ".".join(location) == OLD_WARMUP:
        return "is the old name of schedule.warmup, which is also set; keep one"
    name = "warmup" if location[-1] == "warmup_steps" else location[-1]
    exact = [known for known in recipe_keys() if known.endswith(f".{name}")]
    group = Source if in_source else Recipe if len(location) == 1 else Recipe.model_fields[location[0]].annotation
    return f"unknown key{did_you_mean(exact) or nearest(name, keys_of_group(group))}"


def rehearsed(recipe: Recipe) -> Recipe:
    """Return the recipe for a rehearsal: random weights replace saved ones, and built-in tasks replace Hub data.

    A saved adapter's weights become random too.
    """
    changes: dict[str, Any] = {"model": recipe.model.model_copy(update={"init": "random"})}
    changes["adapter"] = recipe.adapter.model_copy(update={"path": None})  # its weights fit only the full-size model
    paths = [source.path for source in recipe.data.sources]
    if not all(map(is_local, paths)):
        changes["data"] = recipe.data.model_copy(update={"path": BUILTIN_TASKS, "form": "auto", "fields": {}})
    if recipe.eval.path is not None and ("data" in changes or not is_local(recipe.eval.path)):
        changes["eval"] = recipe.eval.model_copy(update={"path": None})
    return recipe.model_copy(update=changes)
