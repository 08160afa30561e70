"""Which rows belong to step s: a pure function of (data, seed, s)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gearbox.config.recipe import Recipe
from gearbox.data.batches import PackedRows
from gearbox.errors import UserError

GROUP_STEPS = 50  # steps within which rows of one document each are sorted by length
SLOTS = 1000  # the shares of weighted sources are kept to within one row of so many


class Sampler:
    """Which rows belong to step s, read position by position.

    Each group of rows (one, unless sources have weights) has its own epochs, an epoch being a permutation drawn from
    (seed, epoch); `shares` deals the positions out to the groups, evenly all along. With `lengths` of the rows, rows
    of similar length come in the same step.
    """

    def __init__(
        self,
        group_sizes: list[int],
        rows_per_step: int,
        seed: int,
        shares: list[float] | None = None,
        lengths: np.ndarray | None = None,
    ) -> None:
        self.rows_per_step, self.seed, self.lengths = rows_per_step, seed, lengths
        self.group_sizes, self.group_firsts = group_sizes, np.cumsum([0, *group_sizes]).tolist()
        self.slots = _slots(shares or [1.0] * len(group_sizes))
        self.turns = [int((self.slots[:i] == group).sum()) for i, group in enumerate(self.slots)]
        self.counts = np.bincount(self.slots, minlength=len(group_sizes))
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def row(self, position: int) -> int:
        cycle, slot = divmod(position, len(self.slots))
        group = int(self.slots[slot])
        epoch, offset = divmod(cycle * int(self.counts[group]) + self.turns[slot], self.group_sizes[group])
        return self.group_firsts[group] + int(self._permutation(group, epoch)[offset])

    def _permutation(self, group: int, epoch: int) -> np.ndarray:
        if self._epochs.get(group, (-1,))[0] != epoch:
            draw = np.random.default_rng([self.seed, epoch, group] if group else [self.seed, epoch])
            order = draw.permutation(self.group_sizes[group])
            if self.lengths is not None:
                order = self._by_length(order, self.lengths[self.group_firsts[group] :], draw)
            self._epochs[group] = (epoch, order)
        return self._epochs[group][1]

    def _by_length(self, order: np.ndarray, lengths: np.ndarray, draw: Any) -> np.ndarray:
        """Sorted within some steps' worth of rows, and those steps shuffled again."""
        window = GROUP_STEPS * self.rows_per_step
        steps = []
        for first in range(0, len(order), window):
            rows = order[first : first + window]
            rows = rows[np.argsort(lengths[rows], kind="stable")]
            cuts = [rows[i : i + self.rows_per_step] for i in range(0, len(rows), self.rows_per_step)]
            whole = [cut for cut in cuts if len(cut) == self.rows_per_step]
            steps += [whole[i] for i in draw.permutation(len(whole))] + cuts[len(whole) :]
        return np.concatenate(steps) if steps else order

    def step(self, step: int) -> list[int]:
        first = step * self.rows_per_step
        return [self.row(position) for position in range(first, first + self.rows_per_step)]


def make_sampler(recipe: Recipe, rows: PackedRows) -> Sampler:
    """The order of a recipe's rows."""
    weights = [source.weight for source in recipe.data.sources]
    shares = [weight for weight in weights if weight is not None] or None
    lengths = None if rows.packing else rows.num_tokens
    return Sampler(rows.group_sizes, recipe.batch.rows, recipe.train.seed, shares, lengths)


def _slots(shares: list[float]) -> np.ndarray:
    """The group of each position of a cycle: every group as often as its share says, spread evenly."""
    if len(shares) == 1:
        return np.zeros(1, np.int64)
    exact = np.array(shares) / sum(shares) * SLOTS
    counts = np.floor(exact).astype(int)
    for group in np.argsort(counts - exact, kind="stable")[: SLOTS - counts.sum()]:
        counts[group] += 1
    if not counts.all():
        raise UserError(f"data.path: the weights {shares} leave a source less than one row in {SLOTS:,}")
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(shares)), counts)[np.argsort(places, kind="stable")]
