"""Splits: functions of (seed, group), no group on both sides, shares that are said as they came out."""

from __future__ import annotations

import pytest

from rlhf_engine.data import PromptOnly, group_fraction, split_by_column, split_by_group
from rlhf_engine.errors import ConfigError


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
    assert split.share == len(split.held_out) / 6000
    assert split.text() == (
        f"{len(split.train)} rows of {len(train)} groups to train on, {len(split.held_out)} of {len(held)} held out "
        f"({100 * split.share:.1f} % of rows, 20.0 % of groups asked for)"
    )


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


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_shares_that_are_none(share):
    with pytest.raises(ConfigError, match="share: expected a number between 0 and 1, got"):
        split_by_group(rows(9, 9), share=share)


@pytest.mark.parametrize("data", [rows(9, 1), []])
def test_one_side_must_not_be_empty(data):
    with pytest.raises(ConfigError, match=r"share: expected rows on both sides, got [01] groups all on one"):
        split_by_group(data, share=0.5)


# ---- by a column -----------------------------------------------------------------------------------------------------


def labelled(*pairs: tuple[str, object]) -> list[PromptOnly]:
    return [PromptOnly(prompt="p", group=g, place=f"a:{i}", columns={"split": s}) for i, (g, s) in enumerate(pairs)]


def test_parts_by_a_column():
    parts = split_by_column(labelled(("a", "test"), ("b", "train"), ("a", "test")), "split")
    assert {name: [row.place for row in part] for name, part in parts.items()} == {
        "test": ["a:0", "a:2"],
        "train": ["a:1"],
    }


def test_a_group_in_two_parts_is_refused_unless_asked_for():
    data = labelled(("a", "train"), ("b", "test"), ("a", "test"))
    with pytest.raises(ConfigError, match=r"a:2: expected group 'a' in one part, got it in 'test' and, at a:0, in 'tr"):
        split_by_column(data, "split")
    assert len(split_by_column(data, "split", disjoint=False)["test"]) == 2


@pytest.mark.parametrize("value", [None, "", 1, ["train"]])
def test_a_row_without_a_part_is_refused(value):
    with pytest.raises(ConfigError, match=r"a:0: expected a string in column 'split', got"):
        split_by_column(labelled(("a", value)), "split")
