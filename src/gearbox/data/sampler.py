"""Choose the rows of step s as a pure function of (rows, seed, s), so that resuming replays nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gearbox.config.recipe import Recipe
from gearbox.data.batches import PackedRows
from gearbox.errors import UserError

WINDOW_STEPS = 50  # unpacked rows are sorted by length within windows of this many steps
SLOTS = 1000  # positions in a cycle; the share of a weighted source is exact to one row per cycle


class Sampler:
    """A sampler that chooses the rows of a step, position by position.

    Each group of rows has its own epochs; there is one group, unless sources have weights. An epoch is a permutation
    drawn from (seed, epoch). `shares` spreads the positions of each group evenly over the run. If `lengths` of the
    rows are given, rows of similar length come in the same step.
    """

    def __init__(
        self,
        group_sizes: list[int],
        rows_per_step: int,
        seed: int,
        shares: list[float] | None = None,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self.rows_per_step, self.seed, self.lengths = rows_per_step, seed, lengths
        self.group_sizes = group_sizes
        self.group_firsts: list[int] = np.cumsum([0, *group_sizes]).tolist()
        self._slots: list[int] = _deal_slots(shares or [1.0] * len(group_sizes)).tolist()
        """Group of each position in a cycle."""
        self._earlier = [self._slots[:slot].count(group) for slot, group in enumerate(self._slots)]
        """Number of earlier positions with the same group, for each position in a cycle."""
        self._per_cycle = [self._slots.count(group) for group in range(len(group_sizes))]
        """Number of positions of each group in a cycle."""
        self._epochs: dict[int, tuple[int, NDArray[np.int64]]] = {}
        """Current epoch of each group, and its permutation."""

    def row(self, position: int) -> int:
        """Return the row at a position, counted from the first row of the first step."""
        cycle, slot = divmod(position, len(self._slots))
        group = self._slots[slot]
        epoch, offset = divmod(cycle * self._per_cycle[group] + self._earlier[slot], self.group_sizes[group])
        return self.group_firsts[group] + int(self._permutation(group, epoch)[offset])

    def rows_of_step(self, step: int) -> list[int]:
        """Return the rows of a step, in order."""
        first = step * self.rows_per_step
        return [self.row(position) for position in range(first, first + self.rows_per_step)]

    def _permutation(self, group: int, epoch: int) -> NDArray[np.int64]:
        if self._epochs.get(group, (-1,))[0] != epoch:
            random = np.random.default_rng([self.seed, epoch, group] if group else [self.seed, epoch])
            order = random.permutation(self.group_sizes[group])
            if self.lengths is not None:
                order = self._sort_by_length(order, self.lengths[self.group_firsts[group] :], random)
            self._epochs[group] = (epoch, order)
        return self._epochs[group][1]

    def _sort_by_length(
        self, order: NDArray[np.int64], lengths: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.int64]:
        """Sort by length within each window of steps, then shuffle the steps of the window."""
        window = WINDOW_STEPS * self.rows_per_step
        ordered: list[NDArray[np.int64]] = []
        for first in range(0, len(order), window):
            rows = order[first : first + window]
            rows = rows[np.argsort(lengths[rows], kind="stable")]
            steps = [rows[i : i + self.rows_per_step] for i in range(0, len(rows), self.rows_per_step)]
            full = [step for step in steps if len(step) == self.rows_per_step]
            ordered += [full[i] for i in random.permutation(len(full))] + steps[len(full) :]
        return np.concatenate(ordered) if ordered else order


def make_sampler(recipe: Recipe, rows: PackedRows) -> Sampler:
    """Return the sampler for a recipe's training rows. Raise UserError if the weights leave a source without rows."""
    weights = [source.weight for source in recipe.data.sources]
    shares = [weight for weight in weights if weight is not None] or None
    lengths = None if rows.packing else rows.num_tokens
    return Sampler(rows.group_sizes, recipe.batch.rows, recipe.train.seed, shares, lengths)


def _deal_slots(shares: list[float]) -> NDArray[np.int64]:
    """Return the group of each position in a cycle. Each group gets its share of the positions, evenly spread."""
    if len(shares) == 1:
        return np.zeros(1, np.int64)
    exact = np.array(shares) / sum(shares) * SLOTS
    counts = np.floor(exact).astype(int)
    for group in np.argsort(counts - exact, kind="stable")[: SLOTS - counts.sum()]:
        counts[group] += 1
    if not counts.all():
        raise UserError(f"data.path: the weights {shares} give a source less than one row in {SLOTS:,}")
    positions = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(shares)), counts)[np.argsort(positions, kind="stable")]
