"""Splits are functions of (seed, group); the order of rows and how they are packed into micro-batches."""

import random

import pytest

from rlhf_engine.data import PromptOnly, Tally, batch_indices, load_rows, pack, side_by_side, split_by_group
from rlhf_engine.data.split import epoch_order, group_fraction
from rlhf_engine.errors import ConfigError
from tests.data.texts import write_lines


def rows(n: int, groups: int) -> list[PromptOnly]:
    return [PromptOnly(prompt=f"p{i}", group=f"g{i % groups}", place=f"a:{i}", columns={"i": i}) for i in range(n)]


def test_no_group_is_on_both_sides_and_no_row_is_lost():
    data = rows(6000, 2000)
    parts = split_by_group(data, share=0.2, seed=3)
    train, held = ({row.group for row in part} for part in parts)
    assert not train & held
    assert len(train | held) == 2000
    assert sorted(row.columns["i"] for part in parts for row in part) == list(range(6000))
    assert [row.columns["i"] for row in parts[0]] == sorted(row.columns["i"] for row in parts[0])
    # 2,000 coins of probability 0.2: four standard deviations are 0.036
    assert abs(len(held) / 2000 - 0.2) < 0.036


def test_a_row_s_side_depends_on_seed_and_group_alone():
    few, many, other = (
        {r.group for r in split_by_group(some, share=0.5, seed=seed)[1]}
        for some, seed in ((rows(40, 40), 0), (rows(400, 400)[::-1], 0), (rows(40, 40), 1))
    )
    assert few == many & {f"g{i}" for i in range(40)}
    assert other != few
    # the same on every machine and in every version
    assert group_fraction("g0", 0) == 0.8850880431687225
    assert group_fraction("\ud800", 0) < 1  # half a surrogate pair is a group, too


def test_a_larger_share_holds_out_what_a_smaller_one_does():
    small, large = (split_by_group(rows(99, 99), share=share)[1] for share in (0.1, 0.4))
    assert {r.group for r in small} < {r.group for r in large}


def test_shares_that_are_none():
    for data in (rows(9, 1), []):
        with pytest.raises(ConfigError, match=r"expected a share that leaves groups on both sides, got 0.5 with [01]"):
            split_by_group(data, share=0.5)


def load_pairs(path, *pairs: tuple[str, str]):
    write_lines(path, *({"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs))
    return load_rows(path, Tally(source=str(path)), kinds=("preference", "implicit_preference"))


def test_answers_to_one_question_are_one_group_however_much_they_share(tmp_path):
    """What two answers begin with in common differs from pair to pair of one question."""
    questions = [
        (f"Q: number {i}?\nA: {a}", f"Q: number {i}?\nA: {b}")
        for i in range(50)
        for a, b in (("The sky is blue", "The sky is green"), ("clear", "It is"), ("It is so grey", "It is so blue"))
    ]
    found = load_pairs(tmp_path / "a.jsonl", *questions)
    assert len({row.prompt for row in found}) == 150
    assert [row.group for row in found] == [f"Q: number {i}?" for i in range(50) for _ in range(3)]
    asked = [{row.prompt.split("?")[0] for row in part} for part in split_by_group(found, share=0.3)]
    assert not asked[0] & asked[1]
    inline = load_pairs(
        tmp_path / "b.jsonl", ("Sky? It is so blue", "Sky? It is so green"), ("Sky? It is", "Sky? No"),
        ("Sea? Blue", "Sea? Red"), ("Sky? It was", "Sky? It will"),
    )  # fmt: skip
    assert [row.group for row in inline] == ["Sky?", "Sky?", "Sea?", "Sky?"]


def test_a_column_of_groups_is_taken_as_it_is(tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path, *({"chosen": f"Sky? {i} a", "rejected": f"Sky? {i} b", "id": i} for i in range(3)))
    found = load_rows(path, Tally(source=str(path)), kinds=("implicit_preference",), group_column="id")
    assert [row.group for row in found] == ["0", "1", "2"]


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


def test_what_cannot_be_packed():
    for sizes, bounds, message in [
        ([3, 9], {"max_tokens": 8}, r"lengths\[1\]: expected at most 8 tokens, those of a micro-batch, got 9"),
        ([0], {}, r"lengths\[0\]: expected at least 1 token, got 0"),
        ([1], {"max_rows": 0}, "max_rows: expected at least 1, got 0"),
        ([1], {"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            pack(sizes, **{"max_rows": 4, **bounds})
