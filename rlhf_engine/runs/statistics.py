"""Statistics of an evaluation: means and ratios with intervals by prompt, and best of n; means over runs.

Intervals by prompt are percentile bootstraps (Efron and Tibshirani 1993, chapter 13): answers to one prompt stay
together. Legend: P prompts, R resamples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import bootstrap, t

RESAMPLES = 2000  # resamples of the prompts for an interval
_MOST_WEIGHTS = 2**22  # weights that are held at once: 32 MiB


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def interval_by_prompt(statistic: Callable[[torch.Tensor], torch.Tensor], prompts: int, *, seed: int = 0) -> Interval:
    """A statistic of weights [R, P] → [R] with every prompt once, and the middle 95 % of its resamples."""

    def of_places(places: np.ndarray, axis: int = -1) -> np.ndarray:
        places_RP = torch.from_numpy(np.atleast_2d(places))
        weights_RP = torch.zeros(places_RP.shape, dtype=torch.float64)
        values = statistic(weights_RP.scatter_add_(1, places_RP, torch.ones_like(weights_RP))).numpy()
        return values if places.ndim > 1 else values[0]

    value = float(of_places(np.arange(prompts)))
    if prompts == 1:  # nothing to resample
        return Interval(value, value, value)
    drawn = bootstrap(
        (np.arange(prompts),), of_places, vectorized=True, n_resamples=RESAMPLES,
        batch=max(1, _MOST_WEIGHTS // prompts), method="percentile", rng=np.random.default_rng(seed),
    )  # fmt: skip
    low, high = np.nanquantile(drawn.bootstrap_distribution, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def mean_of_runs(values: Sequence[float]) -> Interval:
    """Mean of one number per run, of two runs or more, with its interval by Student's t."""
    mean, n = statistics.fmean(values), len(values)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def mean_by_prompt(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of one number per prompt, with its interval."""
    return ratio_by_prompt(values, [1.0] * len(values), seed=seed)


def ratio_by_prompt(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval:
    """Σ numerators / Σ denominators, one each per prompt, such as nats per token over texts of different lengths."""
    above, below = (torch.tensor(values, dtype=torch.float64) for values in (numerators, denominators))
    return interval_by_prompt(lambda weights: (weights @ above) / (weights @ below), len(numerators), seed=seed)


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
