"""Numbers of texts."""

from __future__ import annotations

import pytest

from rlhf_engine.evaluation.texts import distinct, repetition, rouge


def test_repetition_is_the_share_of_three_words_said_before():
    assert repetition(["a b c d", "a b c a b c", "one two", ""]) == pytest.approx([0.0, 0.25, 0.0, 0.0])


def test_distinct_counts_over_all_answers():
    assert distinct(["a b a", "b c"], 1) == pytest.approx(3 / 5)
    assert distinct(["a b a", "b c"], 2) == pytest.approx(1.0)
    assert distinct(["a b a b"], 2) == pytest.approx(2 / 3)
    assert distinct(["one"], 2) is None


def test_rouge_by_hand():
    pytest.importorskip("rouge_score", reason="needs rouge-score")
    found = rouge(["the cat sat", "nothing"], ["the cat lay down", "else"])
    # words: 2 of 3 and 2 of 4; pairs: 1 of 2 and 1 of 3; longest common: the cat
    assert found["rouge1"] == pytest.approx([4 / 7, 0.0])
    assert found["rouge2"] == pytest.approx([2 / 5, 0.0])
    assert found["rougeL"] == pytest.approx([4 / 7, 0.0])
