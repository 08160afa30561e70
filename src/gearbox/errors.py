"""UserError, errors in one line, and the nearest known word for a misspelt one."""

from __future__ import annotations

import difflib


class UserError(Exception):
    """An error that the user can fix. Its text is shown as it is, without a traceback."""


def one_line(error: BaseException, limit: int | None = 300) -> str:
    """Return the error's text in one line, its first `limit` characters. Libraries' errors can be pages long."""
    return " ".join(str(error).split())[:limit]


def one_line_with_type(error: BaseException, limit: int = 300) -> str:
    """Return the error's type, and its text in one line: for errors whose text alone may say little."""
    return f"{type(error).__name__}: {one_line(error, limit)}"


def did_you_mean(near: list[str]) -> str:
    """Return `; did you mean 'lr'?` for the first of these words, or an empty string where there are none."""
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(word: str, known: list[str]) -> str:
    """Return `; did you mean 'lr'?` for the known word that is most like this one, or an empty string."""
    return did_you_mean(difflib.get_close_matches(word, known, 1, 0.6))
