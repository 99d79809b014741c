"""Algorithms whose loss is any function of the log-probs of an answer's tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rlhf_engine.algorithms.base import Algorithm, Measured, MicroBatch, Term
from rlhf_engine.hydra import LogprobLoss


class Loss(Protocol):
    """Result of a loss function."""

    @property
    def loss(self) -> torch.Tensor:
        """The loss, 0-d."""
        ...


class LogprobAlgorithm(Algorithm):
    """A loss of log-probs, with an entropy bonus that is a mean over tokens."""

    @abstractmethod
    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> Loss:
        """The share of a micro-batch in the loss of its minibatch. logprobs_M: with a gradient."""

    def more_sums(self, micro: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        """Further sums of the algorithm's own, by metric. result: what `loss` returned."""
        return {}

    def terms(self, micro: MicroBatch) -> list[Term]:
        output = LogprobLoss(
            loss=lambda logprobs_M: self.loss(logprobs_M, micro),
            temperature=self.temperature,
            entropy_coef=self.options.entropy_coef,
            denom=micro.n_tokens,
            mask_M=micro.mask_M,
        )
        return [Term(output, 1.0)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        policy, n = results[0], micro.n_tokens
        log_ratio_M = (policy.logprob - micro.before_logprobs_M) * micro.mask_M
        sums = {
            "policy/loss": policy.result.loss.detach(),
            "entropy": (policy.entropy * micro.mask_M).sum() / n,
            "approx_kl": (torch.expm1(log_ratio_M) - log_ratio_M).sum() / n,
        }
        return Measured(sums=sums | self.more_sums(micro, policy.result), most={"mismatch": log_ratio_M.abs().max()})
