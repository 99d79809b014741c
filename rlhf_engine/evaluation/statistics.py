"""Statistics of an evaluation: means and win rates with intervals by prompt, length control, and best of n.

Intervals are percentile bootstraps over prompts (Efron and Tibshirani 1993, chapter 13): answers to one prompt stay
together. Legend: P prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

RESAMPLES = 2000
"""Resamples of the prompts for an interval."""
_LEVEL = 0.95
_MOST_WEIGHTS = 2**22
"""Weights that are held at once: 32 MiB."""
_PRIOR = 0.01
"""Precision of the normal prior on the two numbers of a length-controlled fit: answers that always win stay finite."""
_NEWTON_STEPS = 50


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def interval_by_prompt(
    statistic: Callable[[torch.Tensor], torch.Tensor], prompts: int, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """A statistic with every prompt once, and the middle 95 % of its resamples, those left out where it is not defined.

    The statistic is a function of weights [R, P] (float64, how often each prompt was drawn) to values [R].
    """
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, _MOST_WEIGHTS // prompts)
    parts = []
    for size in (min(at_once, resamples - done) for done in range(0, resamples, at_once)):
        drawn = torch.randint(prompts, (size, prompts), generator=generator)
        weights = torch.zeros(size, prompts, dtype=torch.float64)
        parts.append(statistic(weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))))
    value = float(statistic(torch.ones(1, prompts, dtype=torch.float64))[0])
    edges = torch.cat(parts).nanquantile(torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64))
    return Interval(value, float(edges[0]), float(edges[1]))


def mean_by_prompt(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of one number per prompt, with its interval."""
    values_P = torch.tensor(values, dtype=torch.float64)
    return interval_by_prompt(lambda w: (w @ values_P) / w.sum(1), len(values), seed=seed)


def ratio_by_prompt(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval:
    """Σ numerators / Σ denominators, one each per prompt, such as nats per token over texts of different lengths."""
    above = torch.tensor(numerators, dtype=torch.float64)
    below = torch.tensor(denominators, dtype=torch.float64)
    return interval_by_prompt(lambda w: (w @ above) / (w @ below), len(numerators), seed=seed)


def length_controlled_win_rate(
    wins: Sequence[float], longer_by: Sequence[float], prompt_of: Sequence[int], prompts: int, *, seed: int = 0
) -> Interval:
    """Win rate at equal lengths, by a logistic fit (after Dubois and others, arXiv 2404.04475, equation 2).

        P(win_i) = σ(θ + β · tanh(d_i / s))      d_i: how much longer, s: standard deviation of d

    The figure is σ(θ). θ and β have a normal prior of standard deviation 10, so that a model that always wins has
    finite numbers. The paper's term for how hard a prompt is needs many models and is left out. A comparison is won
    (1), lost (0), or anything between; `prompt_of` is the place of its prompt.
    """
    won = torch.tensor(wins, dtype=torch.float64)
    gap = torch.tensor(longer_by, dtype=torch.float64)
    spread = gap.std(correction=0)
    x = torch.tanh(gap / spread) if float(spread) > 0 else torch.zeros_like(gap)
    places = torch.tensor(prompt_of)

    def fit(weights_RP: torch.Tensor) -> torch.Tensor:
        weights = weights_RP[:, places]
        theta = torch.zeros(len(weights), 2, dtype=torch.float64)
        design = torch.stack([torch.ones_like(x), x], dim=1)
        for _ in range(_NEWTON_STEPS):
            p = torch.sigmoid(theta @ design.T)
            gradient = (weights * (won - p)) @ design - _PRIOR * theta
            curvature = weights * p * (1 - p)
            hessian = torch.einsum("rn,ni,nj->rij", curvature, design, design) + _PRIOR * torch.eye(2).double()
            step = torch.linalg.solve(hessian, gradient)
            theta = theta + step.clamp(-2.0, 2.0)
            if float(step.abs().max()) < 1e-10:
                break
        return torch.sigmoid(theta[:, 0])

    return interval_by_prompt(fit, prompts, seed=seed, resamples=RESAMPLES // 4)


class BestOf(NamedTuple):
    """Reward of the best of n answers."""

    n: int
    kl: float
    """log n − (n − 1) / n in nats: KL of the best of n from the policy (Stiennon and others, arXiv 2009.01325)."""
    reward: Interval


def best_of_n_curve(rewards: Sequence[Sequence[float]], *, seed: int = 0) -> list[BestOf]:
    """Expected reward of the best of n answers, for n = 1, 2, 4, … up to the K ≥ 1 answers that each prompt has.

    Of K answers, the mean over all sets of n is unbiased (Nakano and others, arXiv 2112.09332):

        E max_n = Σ_i C(i − 1, n − 1) / C(K, n) · r_(i)      r_(i): the i-th smallest
    """
    ordered = torch.tensor(rewards, dtype=torch.float64).sort(dim=1).values
    k = ordered.shape[1]
    sizes = [2**i for i in range(k.bit_length()) if 2**i <= k]
    curve = []
    for n in sizes if sizes[-1] == k else [*sizes, k]:
        weights = torch.tensor([math.comb(i, n - 1) / math.comb(k, n) for i in range(k)], dtype=torch.float64)
        reward = mean_by_prompt((ordered @ weights).tolist(), seed=seed)
        curve.append(BestOf(n=n, kl=math.log(n) - (n - 1) / n, reward=reward))
    return curve
