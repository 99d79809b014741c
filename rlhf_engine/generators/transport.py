"""Interface that carries work items and policies to generators, and answers back.

The scheduler talks to generators through a `GeneratorTransport` alone, wherever they are: a thread beside the
learner, processes on this machine or on others. Generators draw one work item at a time. Whatever becomes of one is
an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlhf_engine.generators.policy_store import Snapshot
from rlhf_engine.generators.work import WorkItem
from rlhf_engine.rollout import Rollout


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """A generator has drawn the answers of a work item."""

    worker: str
    """Name of the generator."""
    item: WorkItem
    """Work item that was drawn."""
    rollout: Rollout
    """Answers of the work item."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lost:
    """A generator has ended; its work item, if it had one, has to be drawn by another."""

    worker: str
    """Name of the generator."""
    cause: BaseException
    """Error that ended it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """A generator takes work from now on, and has every policy that is held."""

    worker: str
    """Name of the generator."""


Event = Drawn | Lost | Joined


class GeneratorTransport(Protocol):
    """Generators, as the scheduler sees them. Its methods are called by one thread at a time."""

    def publish(self, snapshot: Snapshot) -> int:
        """Let every generator draw by a policy, and those that join later as well; the bytes that it sends.

        Nobody writes into the snapshot any more.
        """
        ...

    def keep(self, versions: frozenset[int]) -> None:
        """Forget policies that no work item will name any more: all but these."""
        ...

    def submit(self, worker: str, item: WorkItem) -> None:
        """Have an idle generator draw a work item, by a policy that was published."""
        ...

    def next_event(self, timeout: float) -> Event | None:
        """Wait up to `timeout` seconds for what happens next; None: nothing. May be called while other methods are."""
        ...

    def silent_for(self, worker: str) -> float:
        """Seconds since a generator with work has last shown that it is at work."""
        ...

    def expects_more(self) -> bool:
        """Whether a generator is on its way, so that a `Joined` or one more `Lost` will come."""
        ...

    def give_up(self, worker: str, cause: BaseException) -> None:
        """Stop a generator for good, as far as that can be done. It is `Lost`, with this cause."""
        ...

    def close(self) -> None:
        """Stop all generators and wait until they have; without effect the second time."""
        ...
