"""The order of rows is a function of (seed, epoch); micro-batches are what fits."""

import random

import pytest

from rlhf_engine.data import batch_indices, pack, side_by_side
from rlhf_engine.data.split import epoch_order


def test_tokens_that_rows_share_count_once():
    sizes, shared = [30, 30, 30, 9, 30, 12], [(0, 25), (0, 25), (0, 25), (1, 4), (0, 25), (1, 4)]
    assert pack(sizes, max_rows=9, max_tokens=40, shared=shared) == [[0, 1, 2], [3, 4], [5]]
    assert pack(sizes, max_rows=9, max_tokens=45, shared=shared) == [[0, 1, 2, 4], [3, 5]]
    assert pack(sizes, max_rows=2, max_tokens=40, shared=shared) == [[0, 1], [2, 3], [4], [5]]
    assert pack(sizes, max_rows=9, max_tokens=40) == [[0, 3], [1], [2], [4], [5]]
    equal = [(i, 3) for i in range(6)]  # rows that share with no other
    assert pack(sizes, max_rows=9, max_tokens=40, shared=equal) == pack(sizes, max_rows=9, max_tokens=40)


def test_order_is_a_function_of_seed_and_epoch():
    assert sorted(epoch_order(9, 0, 0)) == list(range(9))
    assert epoch_order(9, 0, 0) == epoch_order(9, 0, 0)
    assert len({tuple(epoch_order(9, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_batches_walk_through_whole_epochs():
    for n, size in ((5, 3), (5, 5), (3, 7), (1, 2)):
        walked = [i for step in range(2 * n) for i in batch_indices(n, size, step, seed=4)]
        assert walked == [i for epoch in range(2 * size) for i in epoch_order(n, 4, epoch)]


def test_equal_keys_become_neighbours_where_they_first_appear():
    assert side_by_side([4, 1, 4, 2, 1, 4]) == [0, 2, 5, 1, 4, 3]
    assert side_by_side([3, 1, 2]) == [0, 1, 2]
    assert side_by_side([]) == []


def lengths(n: int, seed: int = 0) -> list[int]:
    """Mostly short, some long."""
    generator = random.Random(seed)
    return [min(512, 1 + int(generator.expovariate(1 / 60))) for _ in range(n)]


def first_fit(sizes: list[int], max_rows: int, budget: float) -> list[list[int]]:
    """The definition, in quadratic time."""
    batches: list[list[int]] = []
    for row, size in enumerate(sizes):
        homes = (b for b in batches if len(b) < max_rows and sum(sizes[i] for i in b) + size <= budget)
        home = next(homes, None)
        if home is None:
            batches.append([row])
        else:
            home.append(row)
    return batches


def test_packing_is_first_fit():
    for n in (0, 1, 2, 3, 64, 65, 300):
        sizes = lengths(n)
        for max_rows in (1, 5, 400):
            assert pack(sizes, max_rows=max_rows, max_tokens=512) == first_fit(sizes, max_rows, 512)
            # without a bound on tokens rows stay in order
            assert pack(sizes, max_rows=max_rows) == [list(range(n))[i : i + max_rows] for i in range(0, n, max_rows)]


def test_every_row_once_within_the_budget():
    sizes = lengths(1000)
    batches = pack(sizes, max_rows=1000, max_tokens=512)
    assert sorted(i for batch in batches for i in batch) == list(range(1000))
    assert max(sum(sizes[i] for i in batch) for batch in batches) <= 512
    assert len(batches) <= 1.05 * sum(sizes) / 512 + 1  # near what cannot be done better


def test_what_cannot_be_packed():
    for sizes, bounds, message in [
        ([3, 9], {"max_tokens": 8}, r"lengths\[1\]: expected at most 8 tokens, those of a micro-batch, got 9"),
        ([0], {}, r"lengths\[0\]: expected at least 1 token, got 0"),
        ([1], {"max_rows": 0}, "max_rows: expected at least 1, got 0"),
        ([1], {"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            pack(sizes, **{"max_rows": 4, **bounds})
