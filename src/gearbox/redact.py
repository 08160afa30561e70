"""Keeps secrets out of whatever a run writes: values of the environment whose names say what they are."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

# Hugging Face, Weights & Biases, AWS, Azure, Comet, MLflow, ... all name theirs so.
SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIAL|CONNECTION_STRING", re.I
)
MIN_LETTERS = 8  # shorter values stand in too many innocent words


def secrets() -> dict[str, str]:
    """Value to name of each secret in the environment, longest first, so that none hides a part of another."""
    named = {value: name for name, value in os.environ.items() if SECRET.search(name) and len(value) >= MIN_LETTERS}
    found = {value: name for value, name in named.items() if not Path(value).exists()}  # a folder of secrets is none
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def redact(text: str) -> str:
    """The text with each secret replaced by its variable's name."""
    for value, name in secrets().items():
        if value in text:
            text = text.replace(value, f"[{name}]")
    return text


def redacted(value: Any) -> Any:
    """A JSON-like value with every string in it redacted, keys too."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redacted(key): redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return value


class _Redacting:
    """A text stream that lets no secret through."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_streams() -> None:
    """From here on nothing that Python prints in this process carries a secret."""
    if secrets():
        sys.stdout, sys.stderr = _Redacting(sys.stdout), _Redacting(sys.stderr)
