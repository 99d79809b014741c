"""GRPO: PPO's clipped loss with the group's own mean as baseline (arXiv 2402.03300; variants as in TRL).

For k answers to each prompt with scores r_i, m their mean and s their standard deviation (divided by k − 1):

    A_i = (r_i − m) / (s + 10⁻⁴)       scale_rewards = group
    A_i = r_i − m                       scale_rewards = none, arXiv 2503.20783
    ℓ_{i,t} = max(−A_i ρ_{i,t}, −A_i clip(ρ_{i,t}, 1−ε, 1+ε)) + β k3_{i,t}       ρ_t = π / π_old of token t

    grpo       L = (1/n) Σ_i (1/T_i) Σ_t ℓ_{i,t}        every answer counts the same
    bnpo       L = Σ_i Σ_t ℓ_{i,t} / Σ_i T_i              every token counts the same
    dr_grpo    L = Σ_i Σ_t ℓ_{i,t} / (n · T_max)          T_max: max_completion_length, a constant

With `none`, `dr_grpo` and β = 0 the first update's gradient is RLOO's times (k−1) / (k T_max); division by s or by T_i
makes it that of something else.

Legend: N sequences in groups of one prompt, M completion tokens packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from rlhf_engine.algorithms.base import Experience, Made, policy_sample, weighted
from rlhf_engine.algorithms.objective import MicroBatch
from rlhf_engine.algorithms.policy_gradient import k3
from rlhf_engine.algorithms.policy_objective import PolicyObjective, PolicySample
from rlhf_engine.algorithms.sequences import group_sizes, group_sums, spread
from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra import PackedBatch

LossType = Literal["grpo", "bnpo", "dr_grpo"]
ScaleRewards = Literal["group", "none"]
_EPS = 1e-4


def advantages(scores_N: torch.Tensor, groups_N: torch.Tensor, *, scale_rewards: ScaleRewards) -> torch.Tensor:
    """A [N]. Raises ValueError for an answer that is alone in its group."""
    size_N = group_sizes(groups_N)
    if (size_N == 1).any():
        raise ValueError("groups_N: expected at least two answers per prompt, got one")
    centred_N = scores_N - group_sums(scores_N, groups_N) / size_N
    if scale_rewards == "none":
        return centred_N
    if scale_rewards == "group":
        return centred_N / ((group_sums(centred_N.square(), groups_N) / (size_N - 1)).sqrt() + _EPS)
    raise ValueError(f"scale_rewards: expected 'group' or 'none', got {scale_rewards!r}")


def token_weights(batch: PackedBatch, *, loss_type: LossType, max_completion_length: int) -> torch.Tensor:
    """Weight of each token in L, fp32 [M], without the 1/denominator that `denominator` gives."""
    if loss_type == "grpo":
        lengths = torch.tensor(batch.completion_lens, dtype=torch.float32, device=batch.device)
        return spread(1 / lengths, batch)
    if loss_type == "dr_grpo":
        return torch.full((batch.n_completion_tokens,), 1 / max_completion_length, device=batch.device)
    if loss_type == "bnpo":
        return torch.ones(batch.n_completion_tokens, device=batch.device)
    raise ValueError(f"loss_type: expected 'grpo', 'bnpo' or 'dr_grpo', got {loss_type!r}")


def denominator(lengths: Sequence[int], *, loss_type: LossType) -> float:
    """What the weighted sum over a minibatch is divided by: its tokens, or its answers. lengths: of its answers."""
    return float(sum(lengths)) if loss_type == "bnpo" else float(len(lengths))


class TokenLoss(NamedTuple):
    """A loss of ratios of tokens."""

    loss: torch.Tensor
    """0-d"""
    kl_M: torch.Tensor
    """k3 [M], without a gradient"""
    clipped_M: torch.Tensor
    """bool [M], whether the clip decided"""


def clipped_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    ref_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    weights_M: torch.Tensor,
    *,
    denom: float,
    beta: float,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """L over a part of a minibatch, whose denominator is `denom`."""
    ratio_M = (logprobs_M - old_logprobs_M).exp()
    plain_M = -advantages_M * ratio_M
    clipped_M = -advantages_M * ratio_M.clamp(1 - clip_low, 1 + clip_high)
    kl_M = k3(logprobs_M, ref_logprobs_M)
    loss_M = torch.maximum(plain_M, clipped_M) + beta * kl_M
    return TokenLoss(
        loss=(weights_M * loss_M).sum() / denom, kl_M=kl_M.detach(), clipped_M=(clipped_M > plain_M).detach()
    )


class GrpoObjective(PolicyObjective):
    """L of one of the three kinds."""

    def __init__(
        self,
        sample: PolicySample,
        advantages_M: torch.Tensor,
        ref_logprobs_M: torch.Tensor,
        *,
        loss_type: LossType,
        max_completion_length: int,
        beta: float,
        clip_low: float,
        clip_high: float,
    ) -> None:
        super().__init__(sample)
        self._advantages_M, self._ref_logprobs_M = advantages_M, ref_logprobs_M
        self._weights_M = token_weights(sample.batch, loss_type=loss_type, max_completion_length=max_completion_length)
        self._loss_type, self._beta, self._clip = loss_type, beta, (clip_low, clip_high)

    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> TokenLoss:
        rows = micro.rows_M
        lengths = [self.batch.completion_lens[i] for i in micro.minibatch]
        return clipped_loss(
            logprobs_M,
            self.sample.old_logprobs_M[rows],
            self._ref_logprobs_M[rows],
            self._advantages_M[rows],
            self._weights_M[rows],
            denom=denominator(lengths, loss_type=self._loss_type),
            beta=self._beta,
            clip_low=self._clip[0],
            clip_high=self._clip[1],
        )

    def tell(self, micro: MicroBatch, found: Any) -> dict[str, torch.Tensor]:
        n = self.n_tokens(micro)
        return {"clip_ratio": found.clipped_M.sum() / n, "kl_loss": found.kl_M.sum() / n}


def make_objective(options: TrainConfig, experience: Experience, *, train_actor: bool = True) -> Made:
    """GRPO's objective for an experience."""
    advantages_N = advantages(experience.scores_N, experience.groups_N, scale_rewards=options.scale_rewards)
    objective = GrpoObjective(
        policy_sample(options, experience),
        weighted(spread(advantages_N, experience.batch), experience),
        experience.ref_logprobs_M,
        loss_type=options.chosen_loss_type,  # type: ignore[arg-type]
        max_completion_length=options.max_completion_length,
        beta=options.beta,
        clip_low=options.cliprange,
        clip_high=options.cliprange,
    )
    return objective, {"advantage_std": float(advantages_N.std(correction=0))}
