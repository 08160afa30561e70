"""What a rank may ask of the others: exchange small objects, add numbers, let rank 0 decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class World(Protocol):
    """All ranks of a run, as one of them sees them. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def gather(self, value: T) -> list[T]:
        """Return the object of each rank, by rank, on every rank."""

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over all ranks."""

    def decide(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 and return its result on every rank; its UserError is raised on every rank too."""

    def barrier(self) -> None:
        """Wait for all ranks."""
