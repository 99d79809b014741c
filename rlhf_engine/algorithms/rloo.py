"""RLOO: REINFORCE whose baseline is the mean of the other answers to the same prompt (arXiv 2402.14740).

For k answers to each prompt, with the KL to the reference taken from the score of a whole answer:

    R_i = r(x, a_i) − β Σ_t KL_{i,t}        A_i = R_i − (1/(k−1)) Σ_{j≠i} R_j

    vanilla    L = −(1/n) Σ_i A_i log π(a_i)            log π(a) = Σ_t log π(a_t | x, a_<t)
    proximal   L = (1/n) Σ_i max(−A_i ρ_i, −A_i clip(ρ_i, 1−ε, 1+ε))     ρ_i = π(a_i) / π_old(a_i)

With `advantage_level` turn, R and its baseline are of what is earned from a turn on, less β times the KL from there.
The baseline is over the answers that have such a turn. Where there is one alone, A is that of whole answers. This is
for `vanilla`.

The ratio is of the whole answer, not of tokens. The gradient is that of E[R] with k1 = log π − log π_ref; k3 and exact
KL depend on π, and the part of the gradient that goes through them is missing.

Legend: N sequences in groups of one prompt, M completion tokens packed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlhf_engine.algorithms.base import Experience, MicroBatch
from rlhf_engine.algorithms.policy_gradient import PolicyGradient
from rlhf_engine.algorithms.sequences import group_sizes, group_sums, sequence_sums, spread, turn_advantages
from rlhf_engine.hydra import PackedBatch


def returns(scores_N: torch.Tensor, kl_M: torch.Tensor, batch: PackedBatch, *, beta: float) -> torch.Tensor:
    """R [N]."""
    return scores_N - beta * sequence_sums(kl_M, batch)


def leave_one_out(returns_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """A [N]. Raises ValueError for an answer that is alone in its group."""
    others_N = group_sizes(groups_N) - 1
    if (others_N == 0).any():
        raise ValueError("groups_N: expected at least two answers per prompt, got one")
    return returns_N - (group_sums(returns_N, groups_N) - returns_N) / others_N


class SequenceLoss(NamedTuple):
    """A loss of ratios of whole answers."""

    loss: torch.Tensor  # 0-d
    ratio_N: torch.Tensor  # ρ [N], without a gradient
    clipped_N: torch.Tensor  # bool [N], whether the clip decided


def proximal_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_N: torch.Tensor,
    batch: PackedBatch,
    *,
    n_answers: float,
    clip_low: float,
    clip_high: float,
) -> SequenceLoss:
    """The proximal L. n_answers: the n of the whole minibatch, so that parts of it add up."""
    ratio_N = sequence_sums(logprobs_M - old_logprobs_M, batch).exp()
    plain_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return SequenceLoss(
        loss=torch.maximum(plain_N, clipped_N).sum() / n_answers,
        ratio_N=ratio_N.detach(),
        clipped_N=(clipped_N > plain_N).detach(),
    )


class Rloo(PolicyGradient):
    """RLOO; `loss_type` says whether the ratio of whole answers is clipped."""

    def prepare(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        batch = experience.batch
        returns_N = returns(experience.scores_N, experience.kl_M, batch, beta=self.options.beta)
        advantages_N = leave_one_out(returns_N, experience.groups_N)
        advantages_M = spread(advantages_N, batch)
        if self.options.advantage_level == "turn":
            rewards_M = experience.rewards_M - self.options.beta * experience.kl_M
            advantages_M = turn_advantages(rewards_M, experience.groups_N, batch, leave_one_out)
        return replace(experience, advantages_M=advantages_M), {"advantage_std": float(advantages_N.std(correction=0))}

    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> Any:
        if self.options.chosen_loss_type == "vanilla":
            return super().loss(logprobs_M, micro)
        assert micro.advantages_M is not None
        return proximal_loss(
            logprobs_M,
            micro.old_logprobs_M,
            micro.advantages_M[micro.batch.last_completion_rows_N],  # the same at every token of an answer
            micro.batch,
            n_answers=micro.n_answers,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
        )

    def more_sums(self, micro: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        if self.options.chosen_loss_type == "vanilla":
            return super().more_sums(micro, result)
        n = micro.n_answers
        return {"clip_ratio": result.clipped_N.sum() / n, "ratio": (result.ratio_N * micro.keep_N).sum() / n}


ALGORITHM = Rloo
