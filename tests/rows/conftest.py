"""Give each test of rows/ a separate cache."""

from support.corpora import cache

__all__ = ["cache"]
