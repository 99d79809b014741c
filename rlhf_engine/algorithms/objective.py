"""What an update follows the gradient of: objectives, made of losses that the model computes.

Denominators are those of a whole minibatch, so that micro-batches add up to its exact gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rlhf_engine.hydra import Output, PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Answers of one forward and backward, and where they come from."""

    batch: PackedBatch
    indices: Sequence[int]
    """Their places among all answers."""
    rows_M: torch.Tensor
    """int64 [M], places of their tokens among those of all answers."""
    minibatch: Sequence[int]
    """Places of all answers of the minibatch, over which means are taken, whichever process they are learned in."""


class Term(NamedTuple):
    """A loss that the model computes, and its weight in what is minimised."""

    output: Output
    """Its result has a `loss`."""
    weight: float


@dataclass(kw_only=True)
class Measured:
    """What micro-batches tell beside their gradients, by name; 0-d tensors."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Shares of the minibatch's numbers, which add up."""
    most: dict[str, torch.Tensor] = field(default_factory=dict)
    """Numbers of which the largest counts."""

    def add(self, other: Measured) -> None:
        """Take in those of another micro-batch."""
        for name, share in other.sums.items():
            self.sums[name] = self.sums[name] + share if name in self.sums else share
        for name, value in other.most.items():
            self.most[name] = torch.maximum(self.most[name], value) if name in self.most else value

    def floats(self) -> dict[str, float]:
        """All of them on the host."""
        return {name: float(value) for name, value in (self.sums | self.most).items()}


class Objective(ABC):
    """What an update follows the gradient of, over the answers of one rollout."""

    batch: PackedBatch
    answers_per_unit: int = 1
    """So many answers next to each other stay together in a micro-batch."""
    discarded_roles: tuple[str, ...] = ()
    """Roles whose gradients are thrown away."""

    @abstractmethod
    def terms(self, micro: MicroBatch) -> list[Term]:
        """The losses of a micro-batch, over denominators of the whole minibatch."""

    @abstractmethod
    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        """What the results of the terms, in their order, tell. `mismatch` is the largest difference of a token's
        log-prob to that before the update, `approx_kl` the mean of ratio − 1 − log ratio per token."""

    def n_tokens(self, micro: MicroBatch) -> float:
        """Completion tokens of the whole minibatch."""
        lengths = self.batch.completion_lens
        return float(sum(lengths[i] for i in micro.minibatch))

    def summarise(self, measured: Measured) -> dict[str, float]:
        """Metrics of a whole minibatch."""
        return measured.floats()
