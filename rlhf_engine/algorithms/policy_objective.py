"""Objectives that are a loss of the actor's log-probs: every algorithm but PPO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlhf_engine.algorithms.objective import Measured, MicroBatch, Objective, Term
from rlhf_engine.hydra import LogprobLoss, PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySample:
    """Answers that a policy learns from. Nothing in it requires a gradient; M tokens of N answers."""

    batch: PackedBatch
    old_logprobs_M: torch.Tensor
    """fp32 [M], log-probs that ratios are to, from the training forward."""
    before_logprobs_M: torch.Tensor | None = None
    """fp32 [M], log π before the update, which its KL is measured from; None: `old_logprobs_M`."""
    temperature: float = 1.0
    """Of the distribution that the answers were drawn from."""
    entropy_coef: float = 0.0


class Loss(Protocol):
    """What a loss function returns."""

    @property
    def loss(self) -> torch.Tensor:
        """0-d"""
        ...


class PolicyObjective(Objective):
    """A loss of the log-probs of a minibatch's tokens."""

    def __init__(self, sample: PolicySample) -> None:
        self.batch, self.sample = sample.batch, sample

    @abstractmethod
    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> Loss:
        """The share of a micro-batch, log-probs with a gradient, in the loss of its minibatch."""

    def tell(self, micro: MicroBatch, found: Any) -> dict[str, torch.Tensor]:
        """Further sums of the algorithm's own, by metric name. found: what `loss` returned."""
        return {}

    def terms(self, micro: MicroBatch) -> list[Term]:
        output = LogprobLoss(
            loss=lambda logprobs_M: self.loss(logprobs_M, micro),
            temperature=self.sample.temperature,
            entropy_coef=self.sample.entropy_coef,
            denom=self.n_tokens(micro),
        )
        return [Term(output, 1.0)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        policy, n = results[0], self.n_tokens(micro)
        sample = self.sample
        before_M = sample.old_logprobs_M if sample.before_logprobs_M is None else sample.before_logprobs_M
        log_ratio_M = policy.logprob - before_M[micro.rows_M]
        sums = {
            "policy/loss": policy.found.loss.detach(),
            "entropy": policy.entropy.sum() / n,
            "approx_kl": (torch.expm1(log_ratio_M) - log_ratio_M).sum() / n,
        }
        return Measured(sums=sums | self.tell(micro, policy.found), most={"mismatch": log_ratio_M.abs().max()})
