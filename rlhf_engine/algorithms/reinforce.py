"""REINFORCE with a learned value baseline, as in PERL (arXiv 2403.10704).

PERL maximises J = E[(1−β) r(x, a) − β KL(π ‖ π_ref)], β the weight between the two. With V a learned value of the state
before each token, and no clip, no importance ratio and no generalised advantage:

    r_t = −β KL_t + [t last] (1−β) R        G_t = Σ_{s ≥ t} γ^{s−t} r_s
    L_PG = −(1/n) Σ_i Σ_t (G_{i,t} − V_{i,t}) log π(a_{i,t} | x_i, a_{i,<t})        V constant here
    L_V  = (1/n) Σ_i Σ_t ½ (V_{i,t} − G_{i,t})²

The policy gradient is unbiased for any V, because V_t does not depend on a_t; a better V only makes it vary less. Where
answers may be drawn without bound, the optimum is π* ∝ π_ref exp((1−β) r / β).
Both losses are sums over an answer. On a slot that actor and critic share, their balance is then that of single tokens,
whatever the answers' length; a mean over tokens beside a sum would fade as 1/T.

Legend: N sequences, M completion tokens packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf_engine.algorithms.base import Experience, Measured, MicroBatch, Term
from rlhf_engine.algorithms.policy_gradient import PolicyGradient
from rlhf_engine.algorithms.ppo import measure_values, summarise_values, token_rewards
from rlhf_engine.algorithms.sequences import to_go
from rlhf_engine.hydra import PackedBatch, ValueLoss


def returns(
    scores_N: torch.Tensor, kl_M: torch.Tensor, batch: PackedBatch, *, beta: float, gamma: float = 1.0
) -> torch.Tensor:
    """G [M]; A = G − V."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta: expected a number in [0, 1], the weight of the KL against the reward, got {beta}")
    return to_go(token_rewards(kl_M, (1 - beta) * scores_N, batch, beta), batch, gamma=gamma)


class Reinforce(PolicyGradient):
    """L_PG + vf_coef · L_V."""

    def prepare(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        assert experience.values_M is not None
        returns_M = returns(
            experience.scores_N, experience.kl_M, experience.batch, beta=self.options.beta, gamma=self.options.gamma
        )
        return replace(experience, advantages_M=returns_M - experience.values_M, returns_M=returns_M), {}

    def terms(self, micro: MicroBatch) -> list[Term]:
        assert micro.values_M is not None
        assert micro.returns_M is not None
        value = ValueLoss(
            old_value_M=micro.values_M, return_M=micro.returns_M, mask_M=micro.mask_M, denom=micro.n_answers
        )
        return [*super().terms(micro), Term(value, self.options.vf_coef)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        measured = measure_values(results[-1])
        measured.sums["value/loss"] *= micro.n_answers / micro.n_tokens  # per token, as elsewhere
        measured.add(super().measure(micro, results))
        return measured

    def summarise(self, measured: Measured) -> dict[str, float]:
        return {"approx_kl": 0.0, **summarise_values(measured)}


ALGORITHM = Reinforce
