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
from typing import Any

import torch

from rlhf_engine.algorithms.base import Experience, Made, policy_sample, weighted
from rlhf_engine.algorithms.objective import Measured, MicroBatch, Term
from rlhf_engine.algorithms.policy_gradient import PolicyGradientObjective
from rlhf_engine.algorithms.policy_objective import PolicySample
from rlhf_engine.algorithms.ppo import measure_values, summarise_values, token_rewards
from rlhf_engine.algorithms.sequences import to_go
from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra import PackedBatch, ValueLoss


def returns(
    scores_N: torch.Tensor, kl_M: torch.Tensor, batch: PackedBatch, *, beta: float, gamma: float = 1.0
) -> torch.Tensor:
    """G [M]; A = G − V."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta: expected a number in [0, 1], the weight of the KL against the reward, got {beta}")
    return to_go(token_rewards(kl_M, (1 - beta) * scores_N, batch, beta), batch, gamma=gamma)


class ReinforceObjective(PolicyGradientObjective):
    """L_PG + vf_coef · L_V."""

    def __init__(
        self,
        sample: PolicySample,
        advantages_M: torch.Tensor,
        values_M: torch.Tensor,
        returns_M: torch.Tensor,
        *,
        vf_coef: float,
        train_actor: bool = True,
    ) -> None:
        """values_M: V before the update, [M]. train_actor: False while only the critic warms up."""
        super().__init__(sample, advantages_M)
        self._values_M, self._returns_M = values_M, returns_M
        self._vf_coef, self._train_actor = vf_coef, train_actor
        # a critic on the actor's slot trains its head alone until the actor may move
        self.discarded_roles = () if train_actor else ("actor",)

    def terms(self, micro: MicroBatch) -> list[Term]:
        rows = micro.rows_M
        value = ValueLoss(
            old_value_M=self._values_M[rows],
            return_M=self._returns_M[rows],
            mask_M=torch.ones(len(rows), dtype=torch.bool, device=rows.device),
            denom=float(len(micro.minibatch)),
        )
        policy = super().terms(micro) if self._train_actor else []
        return [*policy, Term(value, self._vf_coef)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        found = measure_values(results[-1])
        found.sums["value/loss"] *= len(micro.minibatch) / self.n_tokens(micro)  # per token, as elsewhere
        if self._train_actor:
            found.add(super().measure(micro, results))
        return found

    def summarise(self, measured: Measured) -> dict[str, float]:
        return {"approx_kl": 0.0, **summarise_values(measured)}


def make_objective(options: TrainConfig, experience: Experience, *, train_actor: bool = True) -> Made:
    """REINFORCE's objective for an experience."""
    assert experience.values_M is not None
    returns_M = returns(experience.scores_N, experience.kl_M, experience.batch, beta=options.beta, gamma=options.gamma)
    objective = ReinforceObjective(
        policy_sample(options, experience),
        weighted(returns_M - experience.values_M, experience),
        experience.values_M,
        returns_M,
        vf_coef=options.vf_coef,
        train_actor=train_actor,
    )
    return objective, {}
