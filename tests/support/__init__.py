"""Provide helpers for tests, imported as `from support.ranks import fork_ranks`; this package contains no tests."""
