"""GRPO: PPO's clipped loss with the group's own mean as baseline (arXiv 2402.03300; variants as in TRL).

For k answers to each prompt with scores r_i, m their mean and s their standard deviation (divided by k − 1):

    A_i = (r_i − m) / (s + 10⁻⁴)       scale_rewards = group
    A_i = r_i − m                       scale_rewards = none, arXiv 2503.20783

With `advantage_level` turn the tokens of turn k have the A of G_k, the score that is earned from this turn on, among
the answers that have such a turn; where there is one alone, that of its whole score. Then
    ℓ_{i,t} = max(−A_i ρ_{i,t}, −A_i clip(ρ_{i,t}, 1−ε, 1+ε')) + β k3_{i,t}      ρ_t = π / π_old of token t

    grpo       L = (1/n) Σ_i (1/T_i) Σ_t ℓ_{i,t}        every answer counts the same
    dapo       L = Σ_i Σ_t ℓ_{i,t} / Σ_i T_i              every token counts the same, arXiv 2503.14476
    dr_grpo    L = Σ_i Σ_t ℓ_{i,t} / (n · T_max)          T_max: max_completion_length, a constant

With `none`, `dr_grpo` and β = 0 the first update's gradient is RLOO's times (k−1) / (k T_max); division by s or by T_i
makes it that of something else.

Legend: N sequences in groups of one prompt, M completion tokens packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch

from rlhf_engine.algorithms.base import Algorithm, Experience, Measured, MicroBatch, Term
from rlhf_engine.algorithms.sequences import group_sizes, group_sums, k3, spread, turn_advantages
from rlhf_engine.hydra import PackedBatch, PolicyLoss

LossType = Literal["grpo", "dapo", "dr_grpo"]
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
    """Weight of each token in L, fp32 [M], without 1/n (`dapo`: 1/Σ_i T_i)."""
    if loss_type == "grpo":
        return spread(1 / batch.completion_lens_N.float(), batch)
    if loss_type == "dr_grpo":
        return torch.full((batch.n_completion_tokens,), 1 / max_completion_length, device=batch.device)
    if loss_type == "dapo":
        return torch.ones(batch.n_completion_tokens, device=batch.device)
    raise ValueError(f"loss_type: expected 'grpo', 'dapo' or 'dr_grpo', got {loss_type!r}")


class Grpo(Algorithm):
    """GRPO by the fused loss: token weights are its mask, k3 its KL term, and its entropies are weighed as ℓ."""

    def prepare(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        scale, groups_N, batch = self.options.scale_rewards, experience.groups_N, experience.batch
        advantages_N = advantages(experience.scores_N, groups_N, scale_rewards=scale)
        advantages_M = spread(advantages_N, batch)
        if self.options.advantage_level == "turn":
            of_group = partial(advantages, scale_rewards=scale)
            advantages_M = turn_advantages(experience.rewards_M, groups_N, batch, of_group)
        return replace(experience, advantages_M=advantages_M), {"advantage_std": float(advantages_N.std(correction=0))}

    def terms(self, micro: MicroBatch) -> list[Term]:
        assert micro.advantages_M is not None
        weights_M = token_weights(
            micro.batch, loss_type=self._loss_type, max_completion_length=self.max_completion_length
        )
        loss = PolicyLoss(
            old_logprob_M=micro.old_logprobs_M,
            advantage_M=micro.advantages_M,
            mask_M=weights_M * micro.mask_M,
            denom=micro.n_tokens if self._loss_type == "dapo" else micro.n_answers,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
            dual_clip=self.options.delta,
            ref_logprob_M=micro.ref_logprobs_M,
            kl="k3",
            kl_coef=self.options.beta,
            entropy_coef=self.options.entropy_coef,
            temperature=self.temperature,
        )
        return [Term(loss, 1.0)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        (loss,), n = results, micro.n_tokens
        assert micro.advantages_M is not None
        assert micro.ref_logprobs_M is not None
        before_M, mask_M = micro.before_logprobs_M, micro.mask_M
        # the op's statistics are weighed as the loss is; these are means over tokens, as other algorithms'
        ratio_M = (loss.logprob - micro.old_logprobs_M).exp()
        bounded_M = ratio_M.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
        clipped_M = micro.advantages_M * bounded_M < micro.advantages_M * ratio_M
        sums = {
            "policy/loss": loss.policy_loss.detach() + self.options.beta * loss.kl.detach(),
            "entropy": loss.entropy.detach() * self._to_mean(micro),
            "approx_kl": (k3(before_M, loss.logprob) * mask_M).sum() / n,
            "clip_ratio": (clipped_M & mask_M).sum() / n,
            "kl_loss": (k3(loss.logprob, micro.ref_logprobs_M) * mask_M).sum() / n,
        }
        return Measured(sums=sums, most={"mismatch": ((loss.logprob - before_M) * mask_M).abs().max()})

    @property
    def _loss_type(self) -> LossType:
        return cast(LossType, self.options.chosen_loss_type)

    def _to_mean(self, micro: MicroBatch) -> float:
        """The denominator over the sum of the minibatch's weights: 1 where L is a weighted mean over tokens."""
        if self._loss_type != "dr_grpo":
            return 1.0
        return micro.n_answers * self.max_completion_length / micro.n_tokens


ALGORITHM = Grpo
