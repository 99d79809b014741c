"""PPO for language models: token rewards, advantages, and the clipped losses of actor and critic.

Per token t of an answer, with policy π, reference π_ref, score R of the whole answer (Hydra-RLHF, arXiv 2309.00754 §3;
PPO, arXiv 1707.06347; GAE, arXiv 1506.02438):

    r_t = −β · KL_t + [t last] · R        KL_t by k1 = log π − log π_ref, k3 = e^{−k1} − 1 + k1, or exactly
    δ_t = r_t + γ V_{t+1} − V_t           A_t = δ_t + γ λ A_{t+1}           G_t = A_t + V_t
    L   = Σ_t max(−A_t ρ_t, −A_t clip(ρ_t, 1−ε, 1+ε')) / n + c_v · ½ Σ_t max((V_t−G_t)², (clip V_t − G_t)²) / n

Rewards of turns are at their last tokens, and R is the rest.

ρ = π / π_old, and ε' is ε unless `cliprange` has a second number. With `scale_rewards` A has mean 0 and variance 1
over a rollout. `delta` bounds ρ where A_t < 0 (dual clip, arXiv 1912.09729).

Legend: N sequences, M completion tokens packed, C the longest completion ([N, C] is right-padded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rlhf_kernels.gae import gae
from rlhf_kernels.ppo_loss import explained_variance

from rlhf_engine.algorithms.base import Algorithm, Experience, Measured, MicroBatch, Term
from rlhf_engine.algorithms.sequences import k3
from rlhf_engine.hydra import PackedBatch, PolicyLoss, ValueLoss


def token_kl(
    logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor, estimator: str, exact_kl_M: torch.Tensor | None = None
) -> torch.Tensor:
    """KL per token, fp32 [M], by `k1`, `k3` (Schulman's unbiased, non-negative one) or the given exact values."""
    if estimator == "exact":
        if exact_kl_M is None:
            raise ValueError("exact_kl_M: expected the exact KL per token for estimator='exact', got None")
        return exact_kl_M
    k1 = logprobs_M - ref_logprobs_M
    if estimator == "k1":
        return k1
    if estimator == "k3":
        return k3(logprobs_M, ref_logprobs_M)
    raise ValueError(f"estimator: expected 'k1', 'k3' or 'exact', got {estimator!r}")


def token_rewards(kl_M: torch.Tensor, scores_N: torch.Tensor, batch: PackedBatch, beta: float) -> torch.Tensor:
    """r_t [M]: −β·KL_t, plus the answer's score on its last token. Raises ValueError for an answer without tokens."""
    rewards = -beta * kl_M
    return rewards.index_add(0, batch.last_completion_rows_N, scores_N.to(rewards.dtype))


def advantages(
    rewards_M: torch.Tensor, values_M: torch.Tensor, batch: PackedBatch, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantage [M], return [M]) by GAE over each answer; the last token's next value is 0."""
    mask_NC = batch.pad(torch.ones_like(rewards_M))
    advantage_NC, return_NC = gae(batch.pad(rewards_M), batch.pad(values_M), mask_NC, gamma=gamma, lam=lam)
    return batch.unpad(advantage_NC), batch.unpad(return_NC)


class Ppo(Algorithm):
    """Clipped policy loss of the actor and clipped value loss of the critic."""

    def prepare(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        assert experience.values_M is not None
        options = self.options
        rewards_M = token_rewards(experience.kl_M, experience.scores_N, experience.batch, options.beta)
        if experience.turn_rewards_M is not None:
            rewards_M = experience.rewards_M - options.beta * experience.kl_M
        advantages_M, returns_M = advantages(
            rewards_M,
            experience.values_M,
            experience.batch,
            gamma=options.gamma,
            lam=options.lam,
        )
        return replace(experience, advantages_M=advantages_M, returns_M=returns_M), {}

    def terms(self, micro: MicroBatch) -> list[Term]:
        assert micro.values_M is not None
        assert micro.returns_M is not None
        options = self.options
        value = ValueLoss(
            old_value_M=micro.values_M,
            return_M=micro.returns_M,
            mask_M=micro.mask_M,
            denom=micro.n_tokens,
            clip=options.cliprange_value,
        )
        assert micro.advantages_M is not None
        policy = PolicyLoss(
            old_logprob_M=micro.old_logprobs_M,
            advantage_M=micro.advantages_M,
            mask_M=micro.mask_M,
            denom=micro.n_tokens,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.delta,
            entropy_coef=options.entropy_coef,
            temperature=self.temperature,
        )
        return [Term(policy, 1.0), Term(value, options.vf_coef)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        measured = measure_values(results[-1])
        policy, before_M, mask_M = results[0], micro.before_logprobs_M, micro.mask_M
        measured.most["mismatch"] = ((policy.logprob - before_M) * mask_M).abs().max()
        measured.sums |= {
            "policy/loss": policy.policy_loss.detach(),
            "entropy": policy.entropy.detach(),
            "clip_ratio": policy.clip_fraction.detach(),
            "approx_kl": (k3(before_M, policy.logprob) * mask_M).sum() / micro.n_tokens,
        }
        return measured

    def summarise(self, measured: Measured) -> dict[str, float]:
        return summarise_values(measured)


_VALUE_SUMS = ("count", "sum_error", "sum_error_sq", "sum_ret", "sum_ret_sq")


def measure_values(value: Any) -> Measured:
    """Metrics of a value loss on a micro-batch. value: `ValueLossOutputs`."""
    sums = {"value/loss": value.loss.detach(), "value/clip_ratio": value.clip_fraction.detach()}
    return Measured(sums=sums | {name: getattr(value, name).detach().double() for name in _VALUE_SUMS})


def summarise_values(measured: Measured) -> dict[str, float]:
    """Metrics of a minibatch, sums turned into the explained variance and the balance of the two losses.

    value/gradient_share: v / (v + p) with v = ‖∂(vf_coef · L_V)/∂h‖ and p = ‖∂L_π/∂h‖, h the hidden states that the
    heads read, which costs no second backward pass. On the parameters of a slot that actor and critic share, the value
    loss weighs two to five times more: its gradient points the same way at every token.
    """
    rest, moments = measured.floats(), {}
    for name in _VALUE_SUMS:
        moments[name] = measured.sums[name]
        del rest[name]
    value, policy = rest.pop("hidden_grad_sq/critic", None), rest.pop("hidden_grad_sq/actor", None)
    if value is not None or policy is not None:
        value, policy = math.sqrt(value or 0.0), math.sqrt(policy or 0.0)
        rest["value/gradient_share"] = value / (value + policy) if value + policy else 0.0
    return {**rest, "value/explained_variance": float(explained_variance(**moments))}


ALGORITHM = Ppo
