"""Provide a world of one process, for code that communicates with other ranks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class SingleProcess:
    """A world of one process."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        """Return the value in a list."""
        return [value]

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers."""
        return [int(number) for number in numbers]

    def decide(self, work: Callable[[], T]) -> T:
        """Return the result of `work`."""
        return work()

    def barrier(self) -> None:
        """Return at once."""
