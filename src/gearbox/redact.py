"""Keep secrets out of a run's output: the values of environment variables with names like TOKEN or PASSWORD."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO, TypeVar, cast

T = TypeVar("T")

# Words in the variables of Hugging Face, Weights & Biases, AWS, Azure, Comet, MLflow and others.
SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIAL|CONNECTION_STRING", re.I
)
MIN_LETTERS = 8  # shorter values occur in too many other words


def secrets() -> dict[str, str]:
    """Return the environment's secrets by value, longest first, so that no secret is replaced only in part."""
    named = {value: name for name, value in os.environ.items() if SECRET.search(name) and len(value) >= MIN_LETTERS}
    found = {value: name for value, name in named.items() if not Path(value).exists()}  # a path to secrets is public
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def redact(text: str) -> str:
    """Return the text with each secret replaced by its variable name in brackets."""
    for value, name in secrets().items():
        if value in text:
            text = text.replace(value, f"[{name}]")
    return text


def redacted(value: T) -> T:
    """Return a JSON-like value with every string redacted, including keys. Tuples become lists, as in JSON."""
    if isinstance(value, str):
        return cast(T, redact(value))
    if isinstance(value, dict):
        return cast(T, {redacted(key): redacted(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return cast(T, [redacted(item) for item in value])
    return value


class _Redacting:
    """A text stream that redacts secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def guard_streams() -> None:
    """Redact everything that Python prints in this process from now on."""
    if secrets():
        sys.stdout, sys.stderr = _Redacting(sys.stdout), _Redacting(sys.stderr)
