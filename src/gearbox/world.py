"""Define the interface between ranks: exchange small objects, add numbers, let rank 0 decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class World(Protocol):
    """The ranks of a run, as seen by one rank. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The rank of this process, starting at 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank, on every rank."""

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over all ranks."""

    def decide(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0, and return its result or raise its UserError on every rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""


def merged(by_rank: list[dict[str, T]]) -> dict[str, T]:
    """Return the entries of all ranks in one dict, as from `gather`."""
    return {name: value for of_rank in by_rank for name, value in of_rank.items()}
