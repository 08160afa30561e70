"""Guards batching: no token is lost or repeated, and documents in a row are isolated from each other."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gearbox.config.job import BatchPlan
from gearbox.rows.batches import chain_hash, fullest_rows, make_step_batch, micro_batches_of
from gearbox.rows.packing import chunk_documents, pack
from gearbox.rows.units import IGNORE_INDEX, passes_of
from support.documents import Made, random_documents

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def rows_of(members: np.ndarray, starts: np.ndarray) -> list[list[int]]:
    return [members[a:b].tolist() for a, b in pairwise(starts)]


@given(LENGTHS, st.integers(40, 64))
def test_packing_neither_loses_nor_repeats_a_document(lengths, row_tokens):
    rows = rows_of(*pack(np.array(lengths), row_tokens))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(rows) and max(sum(lengths[i] for i in row) for row in rows) <= row_tokens


@given(LENGTHS)
def test_packing_is_best_fit_longest_first(lengths):
    """Packing puts each piece into the fullest row with room for it, or into a new row if there is no room."""
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [used for used in filled if used + length <= 40]
        if fitting:
            filled.remove(max(fitting))
        filled.append((max(fitting) if fitting else 0) + length)
    rows = rows_of(*pack(np.array(lengths), 40))
    assert sorted(sum(lengths[i] for i in row) for row in rows) == sorted(filled)


@pytest.mark.parametrize("row_tokens", [512, 2048])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_a_long_tailed_set_are_full(seed, row_tokens):
    lengths = np.random.default_rng(seed).lognormal(4.5, 1.0, 5000).astype(int).clip(1, row_tokens)
    rows = rows_of(*pack(lengths, row_tokens))
    full = [sum(lengths[i] for i in row) / row_tokens >= 0.95 for row in rows]
    assert np.mean(full) > 0.99, "rows are at least 95 % full, except the last one"


@given(LENGTHS, st.integers(8, 40), st.sampled_from(["truncate", "split", "drop"]))
def test_chunking_neither_loses_nor_repeats_a_token(lengths, row_tokens, long):
    made = random_documents(lengths)
    pieces = chunk_documents(made, row_tokens, [long])
    assert pieces.length.max(initial=0) <= row_tokens
    found = {}
    num_targets = Counter()
    for document, start, length, targets in zip(
        pieces.document, pieces.start, pieces.length, pieces.targets, strict=True
    ):
        before = found.setdefault(document, [])
        assert start == max(0, len(before) - 1), "only the last token of the piece before is repeated"
        assert length > 1 or not before, "no piece is only the repeated token"
        before += made.tokens(document)[start + bool(before) : start + length].tolist()
        assert targets == made.loss_mask(document)[start + 1 : start + length].sum()
        num_targets[document] += targets
    if long == "split":
        assert [num_targets[document] for document in range(len(lengths))] == made.targets.tolist()
    for document, length in enumerate(lengths):
        kept = {"truncate": row_tokens, "split": length, "drop": length if length <= row_tokens else 0}[long]
        assert found.get(document, []) == made.tokens(document)[:kept].tolist()
    assert list(zip(pieces.document, pieces.start, strict=True)) == sorted(
        zip(pieces.document, pieces.start, strict=True)
    )


@given(LENGTHS, st.booleans())
def test_every_token_is_in_the_batches_exactly_once(lengths, packing):
    made = random_documents(lengths)
    rows = made.rows(40, packing=packing)
    seen = Counter()
    for row in range(len(rows)):
        batch = rows.batch([row])
        inside = batch["chunk_ids"] >= 0
        seen.update(zip(batch["chunk_ids"][inside].tolist(), batch["input_ids"][inside].tolist(), strict=True))
        assert rows.targets[row] == (batch["labels"] != IGNORE_INDEX).sum()
        assert rows.num_tokens[row] == inside.sum()
    assert seen == Counter((i, token) for i in range(len(made)) for token in made.tokens(i).tolist())


def test_labels_and_positions_stay_inside_their_document():
    made = random_documents([5, 7, 3, 6, 2, 9], supervised=0.6)
    rows = made.rows(16, pad_token=1)
    batch = rows.batch([*range(len(rows)), None])
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in batch.values()} == {((len(rows) + 1, 16), torch.int64)}
    for i, members in enumerate([*(rows.row(row) for row in range(len(rows))), []]):
        columns = []  # token, position, label, document
        for index in members:
            tokens, trained = made.tokens(index).tolist(), made.loss_mask(index)
            labels = [tokens[t] if trained[t] else IGNORE_INDEX for t in range(1, len(tokens))] + [IGNORE_INDEX]
            columns += zip(tokens, range(len(tokens)), labels, [index] * len(tokens), strict=True)
        columns += [(1, position, IGNORE_INDEX, -1) for position in range(16 - len(columns))]
        names = ("input_ids", "position_ids", "labels", "chunk_ids")
        assert torch.stack([batch[name][i] for name in names], 1).tolist() == [list(column) for column in columns]


def test_padding_is_recognised_by_position_not_by_token():
    """The end of turn is a target even if it is also the pad token."""
    end = 2
    made = Made([[5, 6, end], [7, end]], [[0, 1, 1], [0, 1]])
    labels = made.rows(8, pad_token=end).batch([0])["labels"]
    assert labels.tolist() == [[6, end, IGNORE_INDEX, end, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]


def test_without_packing_a_batch_is_as_wide_as_its_longest_document():
    rows = random_documents([3, 9, 5]).rows(64, packing=False)
    assert [row.tolist() for row in (rows.row(0), rows.row(1), rows.row(2))] == [[0], [1], [2]]
    assert rows.batch([0, 2])["input_ids"].shape == (2, 8)
    assert rows.batch([0, 1, None])["input_ids"].shape == (3, 16)
    assert "position_ids" not in rows.batch([0])


def test_groups_do_not_share_a_row():
    made = random_documents([4] * 10)
    rows = made.rows(16, group=np.array([0, 1] * 5))
    assert rows.group_sizes == [2, 2] and len(rows) == 4
    assert [{i % 2 for i in rows.row(row).tolist()} for row in range(4)] == [{0}, {0}, {1}, {1}]


@given(LENGTHS, st.integers(1, 90), st.integers(1, 4))
def test_passes_have_each_chunk_with_targets_exactly_once_and_undivided(lengths, max_tokens, num_rows):
    rows = random_documents(lengths).rows(40)
    batch = rows.batch([*range(min(num_rows, len(rows))), None])
    columns = zip(*(batch[name].flatten().tolist() for name in ("chunk_ids", "input_ids", "labels")), strict=True)
    chunks: dict[int, list[tuple[int, int]]] = {}
    for chunk, token, label in columns:
        chunks.setdefault(chunk, []).append((token, label))
    found: dict[int, list[tuple[int, int]]] = {}
    for one in passes_of(batch, max_tokens):
        assert {tensor.shape for tensor in one.values()} == {one["input_ids"].shape} and len(one["input_ids"]) == 1
        names = one["chunk_ids"][0].tolist()
        assert len(names) <= max_tokens or len({*names}) == 1 or -1 in names
        starts = [i for i, chunk in enumerate(names) if i == 0 or names[i - 1] != chunk]
        assert one["position_ids"][0, starts].sum() == 0 or -1 in names
        for chunk, token, label in zip(names, one["input_ids"][0].tolist(), one["labels"][0].tolist(), strict=True):
            found.setdefault(chunk, []).append((token, label))
    expected = {
        chunk: pairs for chunk, pairs in chunks.items() if chunk >= 0 and any(y != IGNORE_INDEX for _, y in pairs)
    }
    if expected:
        assert {chunk: pairs for chunk, pairs in found.items() if chunk >= 0} == expected
    else:  # one pass without targets
        assert len(passes_of(batch, max_tokens)) == 1 and all(y == IGNORE_INDEX for p in found.values() for _, y in p)


def test_passes_are_as_long_as_they_may_be():
    batch = random_documents([10, 10, 10, 7]).rows(37).batch([0])
    assert [one["input_ids"].shape[1] for one in passes_of(batch, 20)] == [20, 17]
    assert [one["input_ids"].shape[1] for one in passes_of(batch, 5)] == [10, 10, 10, 7]


def test_the_fullest_rows_have_the_most_documents():
    rows = random_documents([16, 2, 3, 4, 5, 15]).rows(16)
    chosen = fullest_rows(rows, 2)
    assert len(rows.row(chosen[0])) == 4 and fullest_rows(rows, 5)[-2:] == [None, None]


@pytest.mark.parametrize("num_rows", [1, 6, 7, 64])
@pytest.mark.parametrize("micro_rows", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_rank_gets_equal_shapes(ranks, micro_rows, num_rows):
    plan = BatchPlan.divide(num_rows, ranks, micro_rows)
    dealt = [micro_batches_of(list(range(num_rows)), rank, plan) for rank in range(ranks)]
    (shapes,) = {tuple(map(len, share)) for share in dealt}
    assert set(shapes) == {min(micro_rows, -(-num_rows // ranks))}
    assert len(shapes) * shapes[0] * ranks - num_rows < ranks * shapes[0], "no round consists of empty rows only"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_rows", [1, 4])
def test_a_short_step_has_the_shapes_of_a_full_one(ranks, micro_rows):
    plan = BatchPlan.divide(25, ranks, micro_rows)
    full, short = ([micro_batches_of(list(range(n)), rank, plan) for rank in range(ranks)] for n in (25, 2))
    assert [[len(micro) for micro in share] for share in short] == [[len(micro) for micro in share] for share in full]
    assert sorted(row for share in short for micro in share for row in micro if row is not None) == [0, 1]


def test_every_rank_counts_the_complete_step():
    rows = random_documents([5, 7, 3, 6, 2, 9, 16]).rows(16)
    row_ids = [2, 0, 1]
    shares = [make_step_batch(rows, row_ids, rank, BatchPlan.divide(3, 2, 1)) for rank in range(2)]
    assert len({(share.num_targets, share.num_tokens, tuple(share.row_ids)) for share in shares}) == 1
    micro_batches = [micro for share in shares for micro in share.micro_batches]
    assert sum(int((micro["labels"] != IGNORE_INDEX).sum()) for micro in micro_batches) == shares[0].num_targets > 0
    assert sum(int((micro["chunk_ids"] >= 0).sum()) for micro in micro_batches) == shares[0].num_tokens


def test_the_hash_chain_depends_on_the_order_of_rows():
    def chain(*steps):
        value = ""
        for row_ids in steps:
            value = chain_hash(value, row_ids)
        return value

    assert chain([1, 2], [3]) == chain([1, 2], [3])
    assert len({chain([1, 2], [3]), chain([2, 1], [3]), chain([1, 2, 3]), chain([3], [1, 2]), chain([3])}) == 5
