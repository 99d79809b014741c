"""Backends of a training run's rollouts: the two calls that it makes, and the backend that draws them here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.rollout.engine import EngineOptions
from rlhf_engine.rollout.generate import generate
from rlhf_engine.rollout.request import Rollout, SamplingConfig


class Rollouts(Protocol):
    """Draws answers of the policy as it was at the last `sync`."""

    def sync(self, policy_version: int) -> dict[str, float]:
        """Draw from the model's present weights from now on, which are this version; metrics of having got there.

        Without effect where the version is drawn from already.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        role: str = "actor",
        sample_ids: Sequence[int] | None = None,
        greedy: Sequence[bool] | None = None,
    ) -> Rollout:
        """One answer per prompt, as `rollout.generate` draws them."""
        ...

    def close(self) -> None:
        """Give back what the run has put elsewhere; a later `sync` puts it there again."""
        ...


class LocalRollouts:
    """Draws in this process, on the very weights that train."""

    def __init__(self, model: HydraModel, options: EngineOptions | None = None) -> None:
        self.model, self.options = model, options
        self.policy_version = 0

    def sync(self, policy_version: int) -> dict[str, float]:
        """Nothing to send: only the version's number is new."""
        self.policy_version = policy_version
        return {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        role: str = "actor",
        sample_ids: Sequence[int] | None = None,
        greedy: Sequence[bool] | None = None,
    ) -> Rollout:
        """`rollout.generate`."""
        return generate(
            self.model,
            prompts,
            sampling,
            role=role,
            sample_ids=sample_ids,
            greedy=greedy,
            policy_version=self.policy_version,
            options=self.options,
        )

    def close(self) -> None:
        """Nothing has gone elsewhere."""
