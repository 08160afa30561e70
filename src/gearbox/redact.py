"""Keep secrets out of a run's output: the values of environment variables with names like TOKEN or PASSWORD.

The password of a URL is removed too. Three cases are not recognized: a secret that is written in two parts, one that
is shortened, and one that a library prints without Python.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO, TypeVar, cast
from urllib.parse import quote

T = TypeVar("T")

# Parts of the names of variables of Hugging Face, Weights & Biases, AWS, Azure, Comet, MLflow, databases and others.
# PWD and OLDPWD are folders.
SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|(?<!BY)(?<!COM)PASS(?!THR|IV|E[SDN]|AGE|ING)|(?!^PWD$)(?<!^OLD)PWD|CRED(?!IT)"
    r"|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION|MASTER|ACCOUNT|SHARED|AUTH|SERVICE|SSH)_?KEY|CONNECTION_STRING"
    r"|DATABASE_URL|(DB|POSTGRES\w*|MYSQL|MONGO\w*|REDIS|AMQP|RABBITMQ|BROKER)_UR[IL]|(^|_)DSN$|WEBHOOK|COOKIE"
    r"|AUTHORIZATION|JWT",
    re.I,
)
MIN_LETTERS = 8  # shorter values occur in too many other words
WORDS = {"disabled", "required", "optional", "password", "username", "localhost", "anonymous", "undefined", "changeme"}
MIN_LETTERS_OF_LINE = 20  # of a key that has several lines
URL_PASSWORD = re.compile(r"""(?P<user>\w://[^\s/:@"'<>]*):[^\s/"'<>]+@""")
URL_TOKEN = re.compile(r"""(?P<scheme>\w://)[^\s/:@"'<>]{20,}@""")  # shorter ones are names of users


def secrets() -> dict[str, str]:
    """Return the environment's secrets by value, longest first, so that no secret is replaced only in part.

    Each secret is there in plain and as JSON, Python, HTML and URLs write it.
    """
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        if not SECRET.search(name) or len(value) < MIN_LETTERS or value.lower() in WORDS or _is_public(value):
            continue
        for one in {value, *(line for line in value.splitlines() if len(line) >= MIN_LETTERS_OF_LINE)}:
            as_json = (json.dumps(one, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
            for written in (one, *as_json, repr(one)[1:-1], html.escape(one), quote(one, safe=""), quote(one)):
                found[written] = name
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def _is_public(value: str) -> bool:
    """Return True for a number such as a limit, and for the path of an existing file, which may contain the secret."""
    try:
        return (value.replace(".", "").isdecimal() and len(value) < 12) or Path(value).exists()
    except OSError:  # too long for a path, as many tokens are
        return False


def redact(text: str, found: dict[str, str] | None = None) -> str:
    """Return the text with each secret replaced by its variable name in brackets, and without passwords in URLs.

    `found` is what `secrets` returned, if the caller has many texts.
    """
    for value, name in (secrets() if found is None else found).items():
        if value in text:
            text = text.replace(value, f"[{name}]")
    if "://" in text:
        text = URL_PASSWORD.sub(r"\g<user>:[password]@", text)
        text = URL_TOKEN.sub(r"\g<scheme>[token]@", text)
    return text


def redacted(value: T, found: dict[str, str] | None = None) -> T:
    """Return a JSON-like value with every string redacted, including keys. Tuples become lists, as in JSON."""
    found = secrets() if found is None else found  # once: it takes longer than redacting a string
    if isinstance(value, str):
        return cast(T, redact(value, found))
    if isinstance(value, dict):
        return cast(T, {redacted(key, found): redacted(item, found) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return cast(T, [redacted(item, found) for item in value])
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


def guarded(stream: TextIO) -> TextIO:
    """Return a stream that redacts what it writes to another."""
    return cast(TextIO, _Redacting(stream))


def guard_streams() -> None:
    """Redact everything that Python prints in this process from now on. A stream that the caller closed takes all."""
    sys.stdout, sys.stderr = (
        guarded(stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")) for stream in (sys.stdout, sys.stderr)
    )
