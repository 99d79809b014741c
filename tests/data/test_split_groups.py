"""Splits: functions of (seed, group), no group on both sides."""

import pytest

from rlhf_engine.data import PromptOnly, Tally, load_rows, split_by_group
from rlhf_engine.data.split import group_fraction
from rlhf_engine.errors import ConfigError
from tests.data.texts import write_lines


def rows(n: int, groups: int) -> list[PromptOnly]:
    return [PromptOnly(prompt=f"p{i}", group=f"g{i % groups}", place=f"a:{i}", columns={"i": i}) for i in range(n)]


def test_no_group_is_on_both_sides_and_no_row_is_lost():
    data = rows(6000, 2000)
    split = split_by_group(data, share=0.2, seed=3)
    train, held = ({row.group for row in part} for part in (split.train, split.held_out))
    assert not train & held
    assert len(train | held) == 2000
    assert sorted(row.columns["i"] for row in [*split.train, *split.held_out]) == list(range(6000))
    assert [row.columns["i"] for row in split.train] == sorted(row.columns["i"] for row in split.train)
    # 2,000 coins of probability 0.2: four standard deviations are 0.036
    assert abs(len(held) / 2000 - 0.2) < 0.036


def test_a_row_s_side_depends_on_seed_and_group_alone():
    few, many = split_by_group(rows(40, 40), share=0.5), split_by_group(rows(400, 400)[::-1], share=0.5)
    assert {r.group for r in few.held_out} == {r.group for r in many.held_out} & {f"g{i}" for i in range(40)}
    assert {r.group for r in split_by_group(rows(40, 40), share=0.5, seed=1).held_out} != {
        r.group for r in few.held_out
    }
    # the same on every machine and in every version
    assert group_fraction("g0", 0) == 0.8850880431687225
    assert group_fraction("\ud800", 0) < 1  # half a surrogate pair is a group, too


def test_a_larger_share_holds_out_what_a_smaller_one_does():
    small, large = (split_by_group(rows(99, 99), share=share) for share in (0.1, 0.4))
    assert {r.group for r in small.held_out} < {r.group for r in large.held_out}


def test_shares_that_are_none():
    for share in (0, 1, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="share: expected a number between 0 and 1, got"):
            split_by_group(rows(9, 9), share=share)
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
    split = split_by_group(found, share=0.3)
    asked = [{row.prompt.split("?")[0] for row in part} for part in (split.train, split.held_out)]
    assert not asked[0] & asked[1]
    inline = load_pairs(
        tmp_path / "b.jsonl",
        ("Sky? It is so blue", "Sky? It is so green"),
        ("Sky? It is", "Sky? No"),
        ("Sea? Blue", "Sea? Red"),
        ("Sky? It was", "Sky? It will"),
    )
    assert [row.group for row in inline] == ["Sky?", "Sky?", "Sea?", "Sky?"]


def test_a_column_of_groups_is_taken_as_it_is(tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path, *({"chosen": f"Sky? {i} a", "rejected": f"Sky? {i} b", "id": i} for i in range(3)))
    found = load_rows(path, Tally(source=str(path)), kinds=("implicit_preference",), group_column="id")
    assert [row.group for row in found] == ["0", "1", "2"]
