"""CISPO: policy gradients with clipped importance weights, in which no token loses its gradient (arXiv 2506.13585).

For k answers to each prompt, with A_i of GRPO and ρ_t = π / π_old of token t,

    w_{i,t} = min(ρ_{i,t}, 1 + ε')             a constant: its gradient is stopped
    L       = −Σ_i Σ_t w_{i,t} A_i log π(a_{i,t} | x_i, a_{i,<t}) / Σ_i T_i + β Σ_i Σ_t k3_{i,t} / Σ_i T_i

PPO's clip takes a token's gradient away where its ratio has left [1−ε, 1+ε']. Here such a token goes on teaching, with
a bounded weight. There is no lower bound: a small ratio is a small weight. The paper leaves β at 0. In TRL's loss type
`cispo`, `epsilon_high` is 1 + ε'.

Legend: N answers in groups of one prompt, M completion tokens packed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlhf_engine.algorithms import grpo
from rlhf_engine.algorithms.base import Experience, LogprobAlgorithm, MicroBatch
from rlhf_engine.algorithms.sequences import k3, spread


class CispoLoss(NamedTuple):
    """L of a micro-batch, and what it was made of."""

    loss: torch.Tensor  # 0-d
    kl: torch.Tensor  # 0-d, Σ k3, without a gradient
    n_clipped: torch.Tensor  # 0-d, tokens whose weight is 1 + ε'


class Cispo(LogprobAlgorithm):
    """CISPO with the advantages of GRPO."""

    def prepare(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        advantages_N = grpo.advantages(
            experience.scores_N, experience.groups_N, scale_rewards=self.options.scale_rewards
        )
        prepared = replace(experience, advantages_M=spread(advantages_N, experience.batch))
        return prepared, {"advantage_std": float(advantages_N.std(correction=0))}

    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> CispoLoss:
        assert micro.advantages_M is not None
        assert micro.ref_logprobs_M is not None
        bound = 1 + self.options.clip_high
        ratio_M = (logprobs_M.detach() - micro.old_logprobs_M).exp()
        policy = (ratio_M.clamp(max=bound) * micro.advantages_M * logprobs_M * micro.mask_M).sum()
        kl = (k3(logprobs_M, micro.ref_logprobs_M) * micro.mask_M).sum()
        loss = (self.options.beta * kl - policy) / micro.n_tokens
        return CispoLoss(loss, kl.detach(), ((ratio_M > bound) & micro.mask_M).sum())

    def more_sums(self, micro: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        return {"clip_ratio": result.n_clipped / micro.n_tokens, "kl_loss": result.kl / micro.n_tokens}


ALGORITHM = Cispo
