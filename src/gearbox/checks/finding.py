"""Define a finding, which points to a line of a file, and what a check says before the line is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gearbox.checks.marks import Marks
from gearbox.config.loader import COMMAND_LINE

Severity = Literal["problem", "hint"]
ENVIRONMENT = "environment"
KEY = re.compile(r"([\w-]+(?:\.[\w-]+)*)(?:, [\w.-]+)*(?:: | is now )")
FLAG = re.compile(r"(--[\w-]+(?:=.*?)?): ", re.S)
VARIABLE = re.compile(r"(\w+)=.* is set in the environment, ", re.S)
LINE = re.compile(r"(?::(\d+))?: ")
IN_LINE = re.compile(r"line (\d+),? column (\d+)")  # of the messages of PyYAML and json
FILE = re.compile(r"([^:]+)(?::(\d+))?: ")


class Said(NamedTuple):
    """The words of a check, as a run prints them."""

    text: str
    """`place: key: what is wrong; what to do`."""
    severity: Severity = "problem"
    """A problem stops a run at its start. A hint does not."""
    key: str = ""
    """The key to point to, if the text does not begin with one."""


@dataclass(frozen=True)
class Finding:
    """A problem or a hint, with its place."""

    file: str
    """A file, `command line` or `environment`."""
    line: int | None
    column: int | None
    key: str
    severity: Severity
    message: str
    """What is wrong and what to do, without place and key."""
    text: str
    """The line that a run prints."""

    @property
    def rest(self) -> str:
        """The key, if there is one, and the message."""
        return f"{self.key}: {self.message}" if self.key and not self.message.startswith(self.key) else self.message

    def as_json(self) -> dict[str, object]:
        """Return what --json prints of a finding."""
        names = ("file", "line", "column", "key", "severity", "message")
        return {name: getattr(self, name) for name in names}


class Locator:
    """The files that findings are about, in which it looks up the lines of keys."""

    def __init__(self, recipe: Path) -> None:
        self.recipe, self.marks = str(recipe), {str(recipe): Marks(recipe)}

    def locate(self, said: Said) -> Finding:
        """Return the finding that a check's words describe."""
        file, line, rest = self._split(said.text)
        column = None
        found = (FLAG if file == COMMAND_LINE and rest.startswith("--") else KEY).match(rest)
        key, message = (found[1], rest[found.end() :]) if found else (said.key, rest)
        if found and found[0].endswith(" is now "):
            message = rest
        elif found:
            key = found[0].removesuffix(": ")
        if file == ENVIRONMENT:
            key = rest.partition("=")[0]
        if line is None and Path(file).suffix in (".yaml", ".yml", ".json"):
            place = ".".join(filter(None, (said.key, key.partition(",")[0])))
            line, column = self._in_file(file, place, message)
        return Finding(file, line, column, key, said.severity, message, said.text)

    def _split(self, text: str) -> tuple[str, int | None, str]:
        """Return the file, the line if the text has it, and the rest."""
        for file in (self.recipe, COMMAND_LINE):
            if text.startswith(file) and (found := LINE.match(text, len(file))):
                return file, int(found[1]) if found[1] else None, text[found.end() :]
        if text.startswith("--"):
            return COMMAND_LINE, None, text
        if VARIABLE.match(text):
            return ENVIRONMENT, None, text
        if (found := FILE.match(text)) and (
            (Path(found[1]).suffix[1:].isalpha() and "/" in found[1]) or Path(found[1]).exists()
        ):
            return found[1], int(found[2]) if found[2] else None, text[found.end() :]
        return self.recipe, None, text

    def _in_file(self, file: str, key: str, message: str) -> tuple[int | None, int | None]:
        """Return line and column: those that the message has, or those of the key."""
        marks = self.marks.setdefault(file, Marks(Path(file)))
        if found := re.match("duplicate key '(.*)'; ", message):
            return marks.last(found[1]) or (None, None)
        if not key and (numbers := IN_LINE.findall(message)):
            return int(numbers[-1][0]), int(numbers[-1][1])
        return marks.of(key) or (None, None)
