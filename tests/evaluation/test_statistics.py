"""Statistics of evaluations, beside enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest
import torch

from rlhf_engine.evaluation.statistics import best_of_n_curve, mean_by_prompt, ratio_by_prompt


def test_interval_of_a_mean_has_its_width_and_covers_what_it_should():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(120):
        values = generator.normal(0.3, 1.0, size=80)
        found = mean_by_prompt(values.tolist(), seed=trial)
        assert found.value == pytest.approx(values.mean(), abs=1e-12)
        covered += found.low <= 0.3 <= found.high
        # normal theory: 1.96 standard errors to either side
        assert (found.high - found.low) == pytest.approx(2 * 1.96 * values.std() / math.sqrt(80), rel=0.12)
    assert 103 <= covered <= 119  # 114 expected; percentile intervals of 80 rows are a little short


def test_one_prompt_has_no_width_and_equal_values_have_none():
    assert tuple(mean_by_prompt([2.0])) == (2.0, 2.0, 2.0)
    assert tuple(mean_by_prompt([0.5] * 7)) == (0.5, 0.5, 0.5)


def test_ratio_is_of_sums_and_not_a_mean_of_ratios():
    found = ratio_by_prompt([10.0, 1.0], [100.0, 1.0])
    assert found.value == pytest.approx(11 / 101)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(1.0)


def test_best_of_n_is_the_mean_over_all_sets():
    rewards = [[0.1, 2.0, -1.0, 0.7, 0.7], [3.0, 1.0, 2.0, 5.0, 4.0]]
    curve = best_of_n_curve(rewards)
    assert [best["n"] for best in curve] == [1, 2, 4, 5]
    for best in curve:
        sets = [np.mean([max(chosen) for chosen in itertools.combinations(row, best["n"])]) for row in rewards]
        assert best["reward"][0] == pytest.approx(np.mean(sets), abs=1e-12)
        assert best["kl"] == pytest.approx(math.log(best["n"]) - (best["n"] - 1) / best["n"])


def test_kl_of_best_of_n_is_that_of_the_distribution_of_the_best():
    # of 500 answers with different rewards: the best of n is answer i with probability (i/m)^n − ((i − 1)/m)^n
    m, n = 500, 4
    i = torch.arange(1, m + 1, dtype=torch.float64)
    p = (i / m) ** n - ((i - 1) / m) ** n
    kl = float((p * (p * m).log()).sum())
    (formula,) = [best["kl"] for best in best_of_n_curve([[0.0] * n]) if best["n"] == n]
    assert kl == pytest.approx(formula, abs=5e-3)
