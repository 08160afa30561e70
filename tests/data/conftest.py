"""Give each test of data/ a separate cache."""

from support.corpora import cache

__all__ = ["cache"]
