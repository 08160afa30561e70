"""Define UserError, one-line error texts, and suggestions for misspelt words."""

from __future__ import annotations

import difflib
import reprlib

MAX_SHOWN = 200  # letters of a wrong value


class UserError(Exception):
    """An error that the user can fix. Its text is shown without a traceback."""


def one_line(error: BaseException, limit: int | None = 300) -> str:
    """Return the first `limit` characters of the error's text on one line. Library errors can span pages."""
    return " ".join(str(error).split())[:limit]


def one_line_with_type(error: BaseException, limit: int = 300) -> str:
    """Return the error's type and its text on one line, for errors whose text may not explain enough."""
    return f"{type(error).__name__}: {one_line(error, limit)}"


def shown(value: object) -> str:
    """Return a short text of any value from a file, even of one that refers to itself, or holds itself many times."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = MAX_SHOWN
    return short.repr(value)[:MAX_SHOWN]


def did_you_mean(near: list[str]) -> str:
    """Return `; did you mean 'lr'?` for the first of these words, or an empty string if the list is empty."""
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(word: str, known: list[str]) -> str:
    """Return `; did you mean 'lr'?` for the closest known word, or an empty string."""
    return did_you_mean(difflib.get_close_matches(word, known, 1, 0.6))
