"""Rule for the policy that may draw the answers of a step.

The policy after s steps is what the first s steps have made of the start. The answers of step t may be drawn as soon as
`earliest(t)` steps are done, by the policy after so many. With `newest` the policy after any later step may draw them:

    every step its own      earliest(t) = t
    n batches per policy    earliest(t) = t − t mod n              ages 0, 1, …, n−1, 0, 1, …
    staleness k             earliest(t) = max(0, t − k)            ages 0, 1, …, k, k, k, …

An answer is learned from in its step and never dropped: what would be too old is not drawn at all.
(Asynchronous RLHF, arXiv 2410.18252, has k = 1, and n from 1 to 64.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlhf_engine.config.rollout import AsyncOptions


@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """Rule for the age of answers when they are learned from."""

    max_staleness: int = 0
    """Steps, k above."""
    batches_per_policy: int = 1
    """n above."""
    newest: bool = False
    """Draw by the newest policy rather than by that after `earliest` steps."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness: expected at least 0, got {self.max_staleness}")
        if self.batches_per_policy < 1:
            raise ValueError(f"batches_per_policy: expected at least 1, got {self.batches_per_policy}")
        if self.max_staleness and self.batches_per_policy > 1:
            raise ValueError(f"batches_per_policy: expected 1 with max_staleness, got {self.batches_per_policy}")

    @classmethod
    def of(cls, config: AsyncOptions) -> StalenessRule:
        """The rule that a configuration describes."""
        if config.async_mode == "off":
            return cls(batches_per_policy=config.batches_per_policy)
        return cls(max_staleness=config.max_staleness, newest=config.async_policy != "fixed")

    def earliest(self, step: int) -> int:
        """Steps that have to be done before the answers of `step` (from 0) may be drawn."""
        return max(0, step - step % self.batches_per_policy - self.max_staleness)

    def drawable(self, done: int) -> int:
        """Answers of every step before this one may be drawn once so many steps are done."""
        block = self.batches_per_policy
        return done + self.max_staleness + 1 if block == 1 else done - done % block + block

    def drawn_after(self, step: int, done: int) -> int:
        """Steps after which the policy was that draws for `step`, where `done` are done. Raises ValueError if none."""
        earliest = self.earliest(step)
        if done < earliest:
            raise ValueError(f"step: expected one whose answers may be drawn after {done} steps, got {step}")
        return min(done, step) if self.newest else earliest


def newest_after(known: Collection[int], done: int) -> int:
    """Number of steps after which the newest policy was made that there was after `done` steps.

    The first where none is known from so early, as after a run was taken up: it is the one that the run began with.
    """
    return max((steps for steps in known if steps <= done), default=min(known))
