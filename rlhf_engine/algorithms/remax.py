"""ReMax: REINFORCE whose baseline is the score of the policy's own greedy answer (arXiv 2310.10505).

To a prompt x belong drawn answers a, one or more, and the greedy answer ā of the same policy:

    A_t = r(x, a) − r(x, ā) − KL penalty        L = −(1/n) Σ_i Σ_t A_{i,t} log π(a_{i,t} | x_i, a_{i,<t})

No critic, no advantage estimation, no clip. ā does not depend on a, so the estimate is unbiased; where a = ā the
reward's share of the gradient is exactly 0. With a mean score near 0 the baseline can be worse than none.

The released code departs from this in four more places, here options that are off. `gamma` < 1 discounts the score
by its distance. `loss_type` "own_length" divides by it (see `policy_gradient`). `kl_in` "local" takes the KL of a token
without those after it. `clip` bounds what the baseline leaves.

Legend: N sequences, M completion tokens packed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.algorithms.policy_gradient import KlIn, PolicyGradient, discounts, kl_penalty
from rlhf_engine.algorithms.sequences import spread
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.hydra import PackedBatch


def advantages(
    scores_N: torch.Tensor,
    greedy_scores_N: torch.Tensor,
    kl_M: torch.Tensor,
    batch: PackedBatch,
    *,
    beta: float,
    kl_in: KlIn = "to_go",
    gamma: float = 1.0,
    clip: float | None = None,
) -> torch.Tensor:
    """A [M] of N drawn answers, whose prompts' greedy answers scored greedy_scores_N; ValueError for other shapes."""
    if greedy_scores_N.shape != scores_N.shape:
        raise ValueError(
            f"greedy_scores_N: expected one score per drawn answer, {list(scores_N.shape)}, got "
            f"{list(greedy_scores_N.shape)}"
        )
    gain_N = scores_N - greedy_scores_N
    if clip is not None:
        gain_N = gain_N.clamp(-clip, clip)
    gain_M = spread(gain_N, batch) * discounts(batch, gamma=gamma, like=kl_M)
    return gain_M - kl_penalty(kl_M, batch, beta=beta, kl_in=kl_in, gamma=gamma)


class ReMax(PolicyGradient):
    """ReMax with the options of its released code."""

    def __init__(self, options: AlgorithmOptions, **context: Any) -> None:
        super().__init__(options, **context)
        self.divide_by_own_length = options.chosen_loss_type == "own_length"
        self.kl_coef = options.beta if options.kl_in == "loss" else 0.0

    def prepare(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        assert experience.greedy_scores_N is not None
        options = self.options
        advantages_M = advantages(
            experience.scores_N,
            experience.greedy_scores_N,
            experience.kl_M,
            experience.batch,
            beta=options.beta,
            kl_in=options.kl_in,
            gamma=options.gamma,
            clip=options.advantage_clip,
        )
        gain_N = experience.scores_N - experience.greedy_scores_N
        return replace(experience, advantages_M=advantages_M), {"advantage_std": float(gain_N.std(correction=0))}


ALGORITHM = ReMax
