"""Guards the order of rows: each row once per epoch, in the same order on any number of ranks."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearbox.config.job import BatchPlan
from gearbox.errors import UserError
from gearbox.rows.batches import SLOTS, Sampler, chain_hash, micro_batches_of, shuffled


@given(st.integers(1, 70), st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_an_epoch_has_every_row_once_on_any_ranks_and_micro_batches(num_rows, rows_per_step, seed, by_length):
    lengths = np.arange(num_rows) * 7 % 11 if by_length else None
    order = Sampler([num_rows], rows_per_step, seed, lengths=lengths)
    num_steps = -(-2 * num_rows // rows_per_step)
    hashes = set()
    for ranks in (1, 2, 3, 4, 8):
        for micro_rows in (1, 2, 4):
            consumed, chain = [], ""
            for step in range(num_steps):
                row_ids = order.rows_of_step(step)
                plan = BatchPlan.divide(rows_per_step, ranks, micro_rows)
                shares = [micro_batches_of(row_ids, rank, plan) for rank in range(ranks)]
                dealt = [row for share in shares for micro in share for row in micro if row is not None]
                assert Counter(dealt) == Counter(row_ids)
                consumed += row_ids
                chain = chain_hash(chain, row_ids)
            for epoch in range(2):
                assert sorted(consumed[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
            hashes.add(chain)
    assert len(hashes) == 1


def test_epochs_and_seeds_have_different_permutations():
    epochs = [[Sampler([50], 1, seed).row(epoch * 50 + i) for i in range(50)] for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(map(tuple, epochs))) == 4


@pytest.mark.parametrize("shares", [None, [3.0, 1.0]])
def test_the_rows_of_a_step_depend_on_nothing_before_it(shares):
    sizes = [23] if shares is None else [23, 9]
    order = Sampler(sizes, 6, 5, shares)
    steps = [order.rows_of_step(step) for step in range(60)]
    assert Sampler(sizes, 6, 5, shares).rows_of_step(57) == steps[57] and order.rows_of_step(3) == steps[3]


@given(st.lists(st.floats(0.05, 10), min_size=2, max_size=4))
def test_weighted_sources_keep_their_share_and_have_separate_epochs(weights):
    sizes = [7, 30, 4, 11][: len(weights)]
    order = Sampler(sizes, 10, 0, weights)
    rows = [order.row(position) for position in range(SLOTS)]
    groups = np.searchsorted(np.cumsum(sizes), rows, side="right")
    for group, weight in enumerate(weights):
        share = weight / sum(weights)
        taken = np.cumsum(groups == group)
        assert np.abs(taken - share * np.arange(1, SLOTS + 1)).max() <= 2.5
        of_group = [row for row, g in zip(rows, groups, strict=True) if g == group]
        for epoch in range(len(of_group) // sizes[group]):
            assert len({*of_group[epoch * sizes[group] : (epoch + 1) * sizes[group]]}) == sizes[group]


def test_a_weight_below_one_row_per_cycle_is_refused():
    with pytest.raises(UserError, match="give a source less than one row in 1,000"):
        Sampler([5, 5], 2, 0, [1e-6, 1.0])


def test_rows_of_similar_length_come_together():
    lengths = np.random.default_rng(0).integers(1, 1000, 640)
    sorted_steps, shuffled = (Sampler([640], 8, 0, lengths=given_lengths) for given_lengths in (lengths, None))

    def padding(order):
        widths = [lengths[order.rows_of_step(step)] for step in range(80)]
        return 1 - sum(w.sum() for w in widths) / sum(8 * w.max() for w in widths)

    assert padding(sorted_steps) < 0.03 < 0.3 < padding(shuffled)
    firsts = [lengths[sorted_steps.rows_of_step(step)].mean() for step in range(50)]
    assert firsts != sorted(firsts), "short and long steps are mixed"


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 3))
def test_places_are_permuted_one_to_one(size, seed, epoch):
    order = shuffled(np.arange(size), size, (seed, epoch))
    assert sorted(order.tolist()) == list(range(size))
    some = np.array([size - 1, 0, size // 2])
    assert shuffled(some, size, (seed, epoch)).tolist() == order[some].tolist(), "each place by itself"


@pytest.mark.parametrize("size", [2**k + more for k in (4, 10, 16) for more in (-1, 0, 1)])
def test_sizes_around_a_power_of_two_are_permuted(size):
    assert len(np.unique(shuffled(np.arange(size), size, (0,)))) == size


def test_a_permutation_looks_random():
    """Test what a truly random one has: mean of each place, one fixed point, one pair of neighbours, no correlation."""
    size, count = 500, 2000
    drawn = np.stack([shuffled(np.arange(size), size, (0, epoch, 0)) for epoch in range(count)])
    deviation = np.sqrt((size**2 - 1) / 12 / count)
    assert np.abs(drawn.mean(0) - (size - 1) / 2).max() < 5 * deviation
    assert (drawn == np.arange(size)).sum(1).mean() == pytest.approx(1, abs=0.15)
    assert (np.diff(drawn) == 1).sum(1).mean() == pytest.approx(1, abs=0.15)
    between_epochs = [np.corrcoef(one, other)[0, 1] for one, other in itertools.pairwise(drawn[:300])]
    assert abs(np.mean(between_epochs)) < 0.02
    few = Counter(tuple(shuffled(np.arange(3), 3, (0, epoch)).tolist()) for epoch in range(1200))
    assert len(few) == 6 and min(few.values()) > 140
