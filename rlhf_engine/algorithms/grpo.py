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
from typing import Any, Literal

import torch

from rlhf_engine.algorithms.base import Experience, Made, policy_sample, weighted
from rlhf_engine.algorithms.objective import Measured, MicroBatch, Objective, Term
from rlhf_engine.algorithms.policy_gradient import k3
from rlhf_engine.algorithms.policy_objective import PolicySample
from rlhf_engine.algorithms.sequences import group_sizes, group_sums, spread
from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra import PackedBatch, PolicyLoss

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


class GrpoObjective(Objective):
    """L of one of the three kinds, by the fused loss: token weights are its mask, k3 its KL term.

    With an entropy bonus the entropy of a token is weighed and divided as ℓ of that token is.
    """

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
        self.batch, self.sample = sample.batch, sample
        self._advantages_M, self._ref_logprobs_M = advantages_M, ref_logprobs_M
        self._weights_M = token_weights(sample.batch, loss_type=loss_type, max_completion_length=max_completion_length)
        self._loss_type, self._longest = loss_type, max_completion_length
        self._beta, self._clip = beta, (clip_low, clip_high)

    def terms(self, micro: MicroBatch) -> list[Term]:
        rows, sample = micro.rows_M, self.sample
        lengths = [self.batch.completion_lens[i] for i in micro.minibatch]
        loss = PolicyLoss(
            old_logprob_M=sample.old_logprobs_M[rows],
            advantage_M=self._advantages_M[rows],
            mask_M=self._weights_M[rows],
            denom=denominator(lengths, loss_type=self._loss_type),
            clip_low=self._clip[0],
            clip_high=self._clip[1],
            ref_logprob_M=self._ref_logprobs_M[rows],
            kl="k3",
            kl_coef=self._beta,
            entropy_coef=sample.entropy_coef,
            temperature=sample.temperature,
        )
        return [Term(loss, 1.0)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        (found,), rows, n = results, micro.rows_M, self.n_tokens(micro)
        old_M, before_M = self.sample.old_logprobs_M[rows], self.sample.before_logprobs_M
        before_M = old_M if before_M is None else before_M[rows]
        # the op's statistics are weighed as the loss is; these are means over tokens, as other algorithms'
        advantages_M, ratio_M = self._advantages_M[rows], (found.logprob - old_M).exp()
        clipped_M = advantages_M * ratio_M.clamp(1 - self._clip[0], 1 + self._clip[1]) < advantages_M * ratio_M
        sums = {
            "policy/loss": found.policy_loss.detach() + self._beta * found.kl.detach(),
            "entropy": found.entropy.detach() * self._to_mean(micro),
            "approx_kl": k3(before_M, found.logprob).sum() / n,
            "clip_ratio": clipped_M.sum() / n,
            "kl_loss": k3(found.logprob, self._ref_logprobs_M[rows]).sum() / n,
        }
        return Measured(sums=sums, most={"mismatch": (found.logprob - before_M).abs().max()})

    def _to_mean(self, micro: MicroBatch) -> float:
        """The denominator over the sum of the minibatch's weights: 1 where L is a weighted mean over tokens."""
        if self._loss_type != "dr_grpo":
            return 1.0
        return len(micro.minibatch) * self._longest / self.n_tokens(micro)


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
