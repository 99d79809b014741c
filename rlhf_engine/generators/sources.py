"""What the training loop asks for the answers of a step.

OwnPolicy      every step draws its own, on the very weights that train
PastPolicies   one after the other, by the policies that a rule names; what a concurrent run draws, repeated
Concurrent     generators draw the answers of later steps meanwhile
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rlhf_engine.distributed.process_group import ALONE, World
from rlhf_engine.generators.policy_store import Snapshot, VersionStore, take
from rlhf_engine.generators.scheduler import Scheduler
from rlhf_engine.generators.staleness import StalenessRule, newest_after
from rlhf_engine.generators.work import StepOrders
from rlhf_engine.generators.worker import OrderDrawer
from rlhf_engine.hydra import HydraModel
from rlhf_engine.rollout import Rollout
from rlhf_engine.rollout.backend import Rollouts
from rlhf_engine.scoring.score import FrozenScores


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """The answers of a step and who drew them."""

    rollout: Rollout
    frozen: FrozenScores | None
    """What frozen lanes say of the answers, where the generator has asked them."""
    policy: Snapshot | None
    """That drew them, where answers are drawn beside the updates; None if several had a share in an answer."""
    generate_seconds: float
    """That drawing took, whether or not the learner waited for it."""
    seconds: dict[str, float]
    """Of the learner's time, by phase."""
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class PastState:
    """What a checkpoint has to hold for a run to go on with the answers that it would have had."""

    policies: Mapping[int, Snapshot] = field(default_factory=dict)
    """Steps done → the policy after them, the present one and those that may still be needed."""
    drawn_by: Mapping[int, int] = field(default_factory=dict)
    """Step → version, of steps whose answers had been begun."""


class Source(Protocol):
    """Answers, step by step."""

    def draw(self, step: int, version: int) -> Sampled:
        """Of a step, which is the next one to learn from; version: of the present policy."""
        ...

    def learned(self, done: int, version: int) -> dict[str, float]:
        """So many steps are done, and the policy has that version. Returns metrics."""
        ...

    def state(self) -> PastState:
        """For a checkpoint of now."""
        ...

    def close(self) -> None:
        """Let go of what draws."""
        ...


class OwnPolicy:
    """Every step draws its own answers."""

    def __init__(self, rollouts: Rollouts, orders: StepOrders, world: World = ALONE) -> None:
        """world: ranks, of which this one draws its share."""
        self._rollouts, self._orders, self._world = rollouts, orders, world

    def draw(self, step: int, version: int) -> Sampled:
        """By the present policy."""
        began = time.perf_counter()
        synced = self._rollouts.sync(version)
        seconds = {"sync": time.perf_counter() - began} if synced else {}
        order = self._orders.orders(step, version, self._world.size)[self._world.rank]
        began = time.perf_counter()
        rollout = self._rollouts.generate(
            order.prompts, order.sampling, sample_ids=order.sample_ids, greedy=order.greedy
        )
        seconds["generate"] = time.perf_counter() - began
        return Sampled(
            rollout=rollout,
            frozen=None,
            policy=None,
            generate_seconds=seconds["generate"],
            seconds=seconds,
            metrics=synced,
        )

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Nothing to do."""
        return {}

    def state(self) -> PastState:
        """Nothing to remember."""
        return PastState()

    def close(self) -> None:
        """Nothing to let go of."""


class PolicyTracker:
    """Snapshots of the policy that learns, one per version."""

    def __init__(self, model: HydraModel, past: PastState, *, done: int, version: int) -> None:
        spec = model.roles["actor"]
        assert spec.slot is not None
        self._slot = model.backbone(spec.backbone).slot(spec.slot)
        self.present = take(self._slot, version)
        known = {snapshot.version: snapshot for snapshot in past.policies.values()} | {version: self.present}
        self.after = {steps: known[snapshot.version] for steps, snapshot in past.policies.items()}
        """By steps done, of when the run was taken up."""
        self.after[done] = self.present

    def now(self, version: int) -> Snapshot:
        """The present policy, whose version that is."""
        if version != self.present.version:
            self.present = take(self._slot, version)
        return self.present


class PastPolicies:
    """Draws the answers of a step when it comes, by the policy that the rule names."""

    def __init__(
        self,
        draw: OrderDrawer,
        store: VersionStore,
        tracker: PolicyTracker,
        orders: StepOrders,
        rule: StalenessRule,
        world: World = ALONE,
        *,
        threads: int | None = None,
    ) -> None:
        """world: ranks, of which this one draws its share. threads: of the CPU, those that a generator would take from
        the learner; each side has its own number here as well, because the bits of a product may depend on it.
        """
        self._draw, self._store, self._tracker, self._orders, self._rule = draw, store, tracker, orders, rule
        self._world = world
        self._threads = threads
        self._all_threads: int | None = None
        self._after = dict(tracker.after)
        for snapshot in self._after.values():
            store.add(snapshot)

    def draw(self, step: int, version: int) -> Sampled:
        """On this thread."""
        policy = self._after[newest_after(self._after, self._rule.earliest(step))]
        order = self._orders.orders(step, policy.version, self._world.size)[self._world.rank]
        began = time.perf_counter()
        with self._generator_threads():
            rollout, frozen = self._draw(order)
        seconds = time.perf_counter() - began
        return Sampled(
            rollout=rollout,
            frozen=frozen,
            policy=policy,
            generate_seconds=seconds,
            seconds={"generate": seconds},
            metrics={},
        )

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Note the policy, and forget those that no later step asks for."""
        self._after[done] = self._tracker.now(version)
        first = newest_after(self._after, self._rule.earliest(done))
        self._after = {steps: policy for steps, policy in self._after.items() if steps >= first}
        self._store.add(self._after[done])
        self._store.keep(policy.version for policy in self._after.values())
        return {}

    def state(self) -> PastState:
        """The policies of later steps."""
        return PastState(policies=dict(self._after))

    def close(self) -> None:
        """Give the learner all threads back."""
        if self._all_threads is not None:
            torch.set_num_threads(self._all_threads)
            self._all_threads = None

    @contextlib.contextmanager
    def _generator_threads(self) -> Iterator[None]:
        """Within the block the generator's threads, after it those of the learner."""
        if self._threads is None:
            yield
            return
        if self._all_threads is None:
            self._all_threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(max(1, self._all_threads - self._threads))


class Concurrent:
    """Generators draw ahead, as far as the rule lets them, while the learner learns."""

    def __init__(
        self,
        begin: Callable[[], Scheduler],
        store: VersionStore,
        tracker: PolicyTracker,
        *,
        drawn_by: Mapping[int, int],
        n_shares: int,
        mixed: bool,
    ) -> None:
        """begin: starts the generators and what hands orders to them, with the first `draw`. store: in which policies
        are kept for the learner.

        drawn_by: step → version of steps that a run had begun to draw when it was stopped. n_shares: generators, each
        of which gets a share of a step. mixed: answers may be of several policies.
        """
        self._begin, self._store, self._tracker = begin, store, tracker
        self._mixed, self._n_shares = mixed, n_shares
        self._policies = dict(tracker.after)
        self._drawn_by = dict(drawn_by)
        self._scheduler: Scheduler | None = None
        self._last: tuple[float, float] | None = None
        """When the answers before were taken, and how long generators had been at work by then."""
        for snapshot in self._policies.values():
            store.add(snapshot)

    def draw(self, step: int, version: int) -> Sampled:
        """What generators have drawn or are about to."""
        if self._scheduler is None:
            self._scheduler = self._begin()
        began = time.perf_counter()
        found = self._scheduler.take(step)
        now = time.perf_counter()
        last, busy = self._last or (began, 0.0)
        self._last = now, found.busy_seconds
        wall = now - last
        learning = wall - found.wait_seconds
        longer = max(found.generate_seconds, learning)
        metrics = {
            "async/ready_steps": float(found.ready),
            "async/generate_seconds": found.generate_seconds,
            "async/learner_utilisation": learning / wall,
            "async/generator_utilisation": min(1.0, (found.busy_seconds - busy) / wall / self._n_shares),
            "async/speedup_bound": (found.generate_seconds + learning) / longer,
            "async/speedup": (found.generate_seconds + learning) / max(wall, longer),
        }
        policy = None if self._mixed else self._store.get(found.version)
        rollout, frozen = found.answered
        made = [rollout.batch.tokens_T, rollout.logprobs_M, rollout.versions_M, *(frozen or ())]
        for tensor in made:
            if tensor is not None and tensor.is_cuda:  # made on a generator's stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return Sampled(
            rollout=rollout,
            frozen=frozen,
            policy=policy,
            generate_seconds=found.generate_seconds,
            seconds={"wait": found.wait_seconds},
            metrics=metrics,
        )

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Publish the policy."""
        snapshot = self._tracker.now(version)
        assert self._scheduler is not None
        self._store.add(snapshot)
        sent = self._scheduler.publish(done, snapshot)
        self._store.keep(self._scheduler.policies().values())
        return {"async/published_bytes": float(sent)}

    def state(self) -> PastState:
        """What may still draw, and what has begun to."""
        if self._scheduler is None:
            return PastState(policies=self._policies, drawn_by=self._drawn_by)
        policies = {done: self._store.get(version) for done, version in self._scheduler.policies().items()}
        return PastState(policies=policies, drawn_by=self._scheduler.drawn_by())

    def close(self) -> None:
        """Stop the generators."""
        if self._scheduler is not None:
            self._scheduler.close()
