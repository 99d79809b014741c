"""Which policy draws for which step."""

from __future__ import annotations

import pytest

from rlhf_engine.generators.scheduler import StalenessRule, newest_after


def ages(rule: StalenessRule, steps: int) -> list[int]:
    """Of the answers of each step when it learns from them, policies one update apart."""
    return [step - rule.drawn_after(step, rule.earliest(step)) for step in range(steps)]


def test_one_batch_ahead_is_one_update_behind_but_for_the_first():
    assert ages(StalenessRule(max_staleness=1), 6) == [0, 1, 1, 1, 1, 1]
    assert ages(StalenessRule(max_staleness=3), 6) == [0, 1, 2, 3, 3, 3]


def test_batches_of_one_policy_grow_old_together():
    assert ages(StalenessRule(batches_per_policy=4), 9) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert ages(StalenessRule(), 4) == [0, 0, 0, 0]


@pytest.mark.parametrize("rule", [StalenessRule(), StalenessRule(max_staleness=2), StalenessRule(batches_per_policy=3)])
def test_drawable_is_the_inverse_of_earliest(rule):
    for done in range(12):
        allowed = [step for step in range(done, 40) if rule.earliest(step) <= done]
        assert allowed == list(range(done, rule.drawable(done)))


def test_the_newest_policy_is_taken_where_it_may_be():
    rule = StalenessRule(max_staleness=3, newest=True)
    assert [rule.drawn_after(5, done) for done in (2, 3, 4, 5)] == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="after 1 steps"):
        rule.drawn_after(5, 1)


def test_a_policy_from_before_the_run_was_taken_up_is_the_oldest_one_known():
    assert [newest_after({4: "a", 7: "b"}, done) for done in (2, 4, 6, 7, 9)] == [4, 4, 4, 7, 7]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_staleness": -1}, "max_staleness"),
        ({"batches_per_policy": 0}, "batches_per_policy"),
        ({"max_staleness": 1, "batches_per_policy": 2}, "batches_per_policy"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        StalenessRule(**options)
