"""Parts of algorithms without a value model: the policy-gradient loss, and the place of the KL to the reference.

With A_t constants and π the policy that drew the answers, the gradient of

    L = −(1/n) Σ_i Σ_t A_{i,t} log π(a_{i,t} | x_i, a_{i,<t})

is an unbiased estimate of −∇ E_x E_{a∼π} [f(x, a)]. The condition: E[A_t | a_{≤t}] is the rest of f from t on, less
something that does not depend on a_t (Williams, "Simple statistical gradient-following algorithms", 1992). Sums run
over a whole answer: dividing each by its own length weighs short answers more, and is the gradient of something else.

The KL penalty of f = r − β Σ_t (log π_t − log π_ref,t) enters in one of three places:

    to_go    A_t −= β Σ_{s ≥ t} KL_s    unbiased with k1 = log π − log π_ref; k3 and exact KL depend on π, and the part
                                        of the gradient that goes through them is missing
    local    A_t −= β KL_t              a departure of ReMax's released code, biased
    loss     L += β (1/n) Σ_i Σ_t k3_t  k3 = π_ref/π − 1 − log(π_ref/π), as in GRPO; biased as well

Legend: N sequences, M completion tokens packed.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from rlhf_engine.algorithms.base import LogprobAlgorithm, MicroBatch
from rlhf_engine.algorithms.sequences import k3, spread, to_go
from rlhf_engine.hydra import PackedBatch

KlIn = Literal["to_go", "local", "loss"]


def kl_penalty(kl_M: torch.Tensor, batch: PackedBatch, *, beta: float, kl_in: KlIn, gamma: float = 1.0) -> torch.Tensor:
    """Penalty that the KL subtracts from each token's advantage, [M]; 0 where it is a term of the loss."""
    if kl_in == "to_go":
        return beta * to_go(kl_M, batch, gamma=gamma)
    if kl_in == "local":
        return beta * kl_M
    if kl_in == "loss":
        return torch.zeros_like(kl_M)
    raise ValueError(f"kl_in: expected 'to_go', 'local' or 'loss', got {kl_in!r}")


def discounts(batch: PackedBatch, *, gamma: float, like: torch.Tensor) -> torch.Tensor:
    """γ^(T−t) at each token t of an answer of T, [M], so that its last token has 1."""
    if gamma == 1.0:
        return torch.ones_like(like)
    ends = spread(batch.completion_lens_N - 1, batch)
    return torch.full_like(like, gamma) ** (ends - batch.completion_position_M)


def policy_gradient_loss(
    logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    batch: PackedBatch,
    *,
    n_answers: float,
    divide_by_own_length: bool = False,
) -> torch.Tensor:
    """L, 0-d, divided by `n_answers` of the whole minibatch; divide_by_own_length as ReMax's released code."""
    weighted_M = advantages_M * logprobs_M
    if divide_by_own_length:
        weighted_M = weighted_M / spread(batch.completion_lens_N, batch)
    return -weighted_M.sum() / n_answers


class GradientLoss(NamedTuple):
    """The policy-gradient loss, and the KL term where the loss has one."""

    loss: torch.Tensor  # 0-d, their sum
    kl: torch.Tensor | None  # 0-d, (1/n) Σ k3 without a gradient


class PolicyGradient(LogprobAlgorithm):
    """L with the advantages that a derived algorithm makes, and the KL to the reference times `kl_coef`."""

    divide_by_own_length = False  # a departure of ReMax's released code, see above
    kl_coef = 0.0

    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> GradientLoss:
        assert micro.advantages_M is not None
        loss = policy_gradient_loss(
            logprobs_M,
            micro.advantages_M,
            micro.batch,
            n_answers=micro.n_answers,
            divide_by_own_length=self.divide_by_own_length,
        )
        if not self.kl_coef:
            return GradientLoss(loss, None)
        assert micro.ref_logprobs_M is not None
        kl = (k3(logprobs_M, micro.ref_logprobs_M) * micro.mask_M).sum() / micro.n_answers
        return GradientLoss(loss + self.kl_coef * kl, kl.detach())

    def more_sums(self, micro: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        if result.kl is None:
            return {}
        return {"kl_loss": result.kl * micro.n_answers / micro.n_tokens}  # per token, as elsewhere
