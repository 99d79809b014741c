"""Statistics of an evaluation: means and win rates with intervals by prompt, length control, and best of n.

Intervals are percentile bootstraps over prompts (Efron and Tibshirani 1993, chapter 13): answers to one prompt stay
together. Legend: P prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import bootstrap

RESAMPLES = 2000
"""Resamples of the prompts for an interval."""
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

    def of_places(places: np.ndarray, axis: int = -1) -> np.ndarray:
        places_RP = torch.from_numpy(np.atleast_2d(places))
        weights_RP = torch.zeros(places_RP.shape, dtype=torch.float64)
        values = statistic(weights_RP.scatter_add_(1, places_RP, torch.ones_like(weights_RP))).numpy()
        return values if places.ndim > 1 else values[0]

    value = float(of_places(np.arange(prompts)))
    if prompts == 1:  # nothing to resample
        return Interval(value, value, value)
    drawn = bootstrap(
        (np.arange(prompts),),
        of_places,
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, _MOST_WEIGHTS // prompts),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = np.nanquantile(drawn.bootstrap_distribution, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def mean_by_prompt(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of one number per prompt, with its interval."""
    return ratio_by_prompt(values, [1.0] * len(values), seed=seed)


def ratio_by_prompt(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval:
    """Σ numerators / Σ denominators, one each per prompt, such as nats per token over texts of different lengths."""
    above, below = (torch.tensor(values, dtype=torch.float64) for values in (numerators, denominators))
    return interval_by_prompt(lambda weights: (weights @ above) / (weights @ below), len(numerators), seed=seed)


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


def best_of_n_curve(rewards: Sequence[Sequence[float]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Expected reward of the best of n answers, for n = 1, 2, 4, … up to the K ≥ 1 answers that each prompt has.

    Of K answers, the mean over all sets of n is unbiased (Nakano and others, arXiv 2112.09332):

        E max_n = Σ_i C(i − 1, n − 1) / C(K, n) · r_(i)      r_(i): the i-th smallest

    kl is that of the best of n from the policy, log n − (n − 1) / n nats (Stiennon and others, arXiv 2009.01325).
    """
    ordered = torch.tensor(rewards, dtype=torch.float64).sort(dim=1).values
    k = ordered.shape[1]
    curve = []
    for n in sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k}):
        weights = torch.tensor([math.comb(i, n - 1) / math.comb(k, n) for i in range(k)], dtype=torch.float64)
        reward = mean_by_prompt((ordered @ weights).tolist(), seed=seed)
        curve.append({"n": n, "kl": math.log(n) - (n - 1) / n, "reward": list(reward)})
    return curve
