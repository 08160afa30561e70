"""Find the line and column of a key in a YAML or JSON file."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path

import yaml

from gearbox.config.loader import YAML_ERRORS, read_text
from gearbox.config.old_keys import OLD_KEYS
from gearbox.errors import UserError

Mark = tuple[int, int]  # line and column, from 1
JSON_TOKEN = re.compile(r'(?P<key>"(?:[^"\\\n]|\\.)*")(?=\s*:)|"(?:[^"\\\n]|\\.)*"|[{}\[\],]')


class Marks:
    """The places of the keys of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, key: str) -> Mark | None:
        """Return the place of a dotted key, or of the nearest group around it that the file has."""
        earlier = [old.old for old in OLD_KEYS.values() if old.new == key]
        return next((mark for name in (key, *earlier) if (mark := self._exact(name))), None) or self._group(key)

    def last(self, name: str) -> Mark | None:
        """Return the last place in a JSON file of a key that ends with this name."""
        return next((mark for key, mark in reversed(self._in_json.items()) if f".{key}".endswith(f".{name}")), None)

    def _exact(self, key: str) -> Mark | None:
        return self._in_json.get(key) if self.path.suffix == ".json" else self._in_yaml(key.split("."))

    def _group(self, key: str) -> Mark | None:
        while "." in key:
            key = key.rpartition(".")[0]
            if mark := self._exact(key):
                return mark
        return None

    @cached_property
    def _text(self) -> str:
        try:
            return read_text(self.path)
        except (OSError, UserError):
            return ""

    @cached_property
    def _in_json(self) -> dict[str, Mark]:
        """The place of each key; the last one of a key that is repeated."""
        marks: dict[str, Mark] = {}
        path: list[str | int] = []
        line, start = 1, 0
        for token in JSON_TOKEN.finditer(self._text):
            word = token[0]
            if word in "{[":
                path.append(0 if word == "[" else "")
            elif word in "}]":
                path = path[:-1]
            elif word == "," and path and isinstance(path[-1], int):
                path[-1] += 1
            elif token["key"] and path:
                try:
                    path[-1] = str(json.loads(word))
                except ValueError:
                    continue
                line, start = line + self._text.count("\n", start, token.start()), token.start()
                marks.pop(name := ".".join(map(str, path)), None)
                marks[name] = line, start - self._text.rfind("\n", 0, start)
        return marks

    @cached_property
    def _root(self) -> yaml.Node | None:
        try:
            return yaml.compose(self._text, yaml.SafeLoader)  # libyaml crashes on deep nesting
        except YAML_ERRORS:
            return None

    def _in_yaml(self, keys: list[str]) -> Mark | None:
        node, mark = self._root, None
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                found = [(name, value) for name, value in node.value if name.value == key]
            elif isinstance(node, yaml.SequenceNode) and key.isdecimal():
                found = [(item, item) for item in node.value[int(key) :][:1]]
            else:
                found = []
            if not found:
                return None
            name, node = found[0]
            mark = name.start_mark.line + 1, name.start_mark.column + 1
        return mark
