"""Read old keys of recipes, overrides and manifests under their new names, and write them for older versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

RawGroups = dict[str, Any]  # the parsed content of a recipe, not yet checked


class OldKey(NamedTuple):
    """An old key and the one that replaced it."""

    old: str
    new: str
    schema: dict[str, object]
    """The JSON Schema of the old values."""
    values: dict[object, object]
    """The new value of each old value that is another one now."""
    advice: str
    """What the new key takes."""


RENAMED = (
    OldKey(
        "schedule.warmup_steps",
        "schedule.warmup",
        {"minimum": 0, "type": "integer"},
        {},
        "takes a step count or a share such as 5%",
    ),
    OldKey(
        "model.gradient_checkpointing",
        "perf.checkpointing",
        {"type": "boolean"},
        {True: "full", False: "none"},
        "takes none, selective, full or offload",
    ),
)
OLD_KEYS = {key.old: key for key in RENAMED}


def accepts(group: str) -> Callable[[RawGroups], None]:
    """Return a function that adds a group's old keys to its schema as deprecated, so that editors accept them."""

    def add(json_schema: RawGroups) -> None:
        for key in RENAMED:
            old_group, name = key.old.split(".")
            if old_group == group:
                text = f"Renamed to {key.new.removeprefix(f'{group}.')}."
                json_schema["properties"][name] = {"deprecated": True, "description": text, **key.schema}

    return add


def renamed(content: RawGroups) -> tuple[RawGroups, list[OldKey]]:
    """Return a recipe's content under new names, and the old keys that it has. The argument stays as it is.

    An old key whose new key is also set stays: validation then rejects it.
    """
    found = []
    for key in RENAMED:
        (old_group, old_name), (group, name) = key.old.split("."), key.new.split(".")
        there, here = content.get(old_group), content.get(group)
        here = {} if here is None else here
        if not isinstance(there, dict) or old_name not in there or not isinstance(here, dict) or name in here:
            continue
        found.append(key)
        value = new_value(key, there[old_name])
        if group == old_group:  # in its place
            content = content | {group: {name if old == old_name else old: v for old, v in there.items()}}
        else:
            kept = {old: v for old, v in there.items() if old != old_name}
            content = content | {old_group: kept, group: {**here, name: value}}
    return content, found


def new_value(key: OldKey, value: object) -> object:
    """Return the new value of an old key. Values that the old key did not take stay, for validation to reject."""
    return key.values.get(value, value) if isinstance(value, bool) else value


def for_manifest(content: RawGroups, defaults: RawGroups) -> RawGroups:
    """Return a recipe's content as stored in a manifest, with old keys where these say the same.

    Older versions can then resume. They do not know the group perf, so its defaults are left out.
    """
    schedule, perf = dict(content["schedule"]), dict(content["perf"])
    if isinstance(schedule["warmup"], int):
        schedule["warmup_steps"] = schedule.pop("warmup")
    if schedule["name"] != "wsd":  # unknown to older versions
        del schedule["decay"]
    perf = {name: value for name, value in perf.items() if value != defaults[name]}
    content = content | {"schedule": schedule, "perf": perf}
    if perf.get("checkpointing", "full") == "full":
        content["model"] = content["model"] | {"gradient_checkpointing": perf.pop("checkpointing", None) is not None}
    if not perf:
        del content["perf"]
    return content
