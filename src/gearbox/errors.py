"""UserError, and the nearest known word for a misspelt one."""

from __future__ import annotations

import difflib


class UserError(Exception):
    """A mistake that the user can mend. Its text is shown as it is, without a traceback."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text as one line, cut to `limit` characters."""
    return " ".join(str(error).split())[:limit]


def did_you_mean(near: list[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'lr'?`, or an empty string where nothing is near."""
    return did_you_mean(difflib.get_close_matches(word, known, 1, 0.6))
