"""Sources of a step's answers, for the training loop.

OwnPolicy      every step draws its own, on the very weights that train
PastPolicies   one after the other, by the policies that a rule names; what a concurrent run draws, repeated
Concurrent     generators draw the answers of later steps meanwhile
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rlhf_engine.generators.policy_store import Snapshot, VersionStore, take
from rlhf_engine.generators.scheduler import Scheduler
from rlhf_engine.generators.served import ServedWorker
from rlhf_engine.generators.staleness import StalenessRule, newest_after
from rlhf_engine.generators.work import StepPrompts
from rlhf_engine.generators.worker import Worker
from rlhf_engine.hydra import HydraModel
from rlhf_engine.rollout import Rollout
from rlhf_engine.rollout.backend import Rollouts


@dataclass(frozen=True, kw_only=True, eq=False)
class PastState:
    """Past policies and unfinished draws in a checkpoint, so that a resumed run draws the same answers."""

    policies: Mapping[int, Snapshot] = field(default_factory=dict)
    """Steps done → the policy after them, the present one and those that may still be needed."""
    drawn_by: Mapping[int, int] = field(default_factory=dict)
    """Step → version, of steps whose answers had been begun."""


Lap = Callable[[str], None]
"""Called with the name of a phase at its end."""
Hold = Callable[[Snapshot], dict[str, float]]
"""Puts a policy where the learner scores answers by it, and checks that a server draws by it; metrics by name."""


class AnswerSource(Protocol):
    """Answers, step by step."""

    def draw(self, step: int, version: int, lap: Lap) -> tuple[Rollout, dict[str, float]]:
        """Draw the answers of step `step` (from 0), the next one to learn from; also metrics by name.

        `version` is the present policy's. `lap` is called with the name of a phase at its end.
        """
        ...

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Note that `done` steps are done, and publish the policy that they made; metrics by name."""
        ...

    def state(self) -> PastState:
        """State for a checkpoint that is written now."""
        ...

    def close(self) -> None:
        """Let go of what draws."""
        ...


class OwnPolicy:
    """Every step draws its own answers."""

    def __init__(self, rollouts: Rollouts, prompts: StepPrompts) -> None:
        self._rollouts, self._prompts = rollouts, prompts

    def draw(self, step: int, version: int, lap: Lap) -> tuple[Rollout, dict[str, float]]:
        """Draw by the present policy."""
        synced = self._rollouts.sync(version)
        if synced:
            lap("sync")
        (item,) = self._prompts.items(step, version)
        began = time.perf_counter()
        rollout = self._rollouts.generate(
            item.prompts.prompts, item.sampling, sample_ids=item.prompts.sample_ids, greedy=item.prompts.greedy
        )
        lap("generate")
        stats = dataclasses.replace(rollout.stats, seconds=time.perf_counter() - began)
        return dataclasses.replace(rollout, stats=stats), synced

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Do nothing: the next draw is by the weights that train."""
        return {}

    def state(self) -> PastState:
        """Nothing to remember."""
        return PastState()

    def close(self) -> None:
        """Nothing to let go of."""


class PolicyTracker:
    """Snapshots of the policy that learns, one per version."""

    def __init__(self, model: HydraModel, past: PastState, *, done: int, version: int) -> None:
        """Snapshot the present policy beside the past ones, those of the checkpoint that the run goes on from."""
        spec = model.roles["actor"]
        assert spec.slot is not None
        self._slot = model.backbone(spec.backbone).slot(spec.slot)
        self.present = take(self._slot, version)
        known = {snapshot.version: snapshot for snapshot in past.policies.values()} | {version: self.present}
        self.after = {steps: known[snapshot.version] for steps, snapshot in past.policies.items()}
        """Policies by steps done, from when the run was taken up."""
        self.after[done] = self.present

    def now(self, version: int) -> Snapshot:
        """Snapshot of the present policy, taken once per version."""
        if version != self.present.version:
            self.present = take(self._slot, version)
        return self.present


class PastPolicies:
    """Draws the answers of a step when it comes, by the policy that the rule names."""

    def __init__(
        self,
        worker: Worker | ServedWorker,
        store: VersionStore,
        tracker: PolicyTracker,
        prompts: StepPrompts,
        rule: StalenessRule,
        *,
        hold: Hold,
        threads: int | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Take what draws. `hold` puts the policy that drew where the learner scores by it.

        `threads` are those of the CPU that a generator would take from the learner; None: all. Each side has its own
        number here as well, because the bits of a product may depend on it. `end` lets go of what draws.
        """
        self._end = end
        self._worker, self._store, self._tracker, self._prompts, self._rule = worker, store, tracker, prompts, rule
        self._hold, self._threads = hold, threads
        self._all_threads: int | None = None
        self._after = dict(tracker.after)
        for snapshot in self._after.values():
            store.add(snapshot)

    def draw(self, step: int, version: int, lap: Lap) -> tuple[Rollout, dict[str, float]]:
        """Draw on this thread, by the policy that the rule names rather than by `version`."""
        policy = self._after[newest_after(self._after, self._rule.earliest(step))]
        (item,) = self._prompts.items(step, policy.version)
        with self._generator_threads():
            rollout = self._worker(item)
        lap("generate")
        return rollout, self._hold(policy) if rollout.frozen is None else {}

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
        """Give the learner all threads back, and let go of what draws."""
        self._end()
        if self._all_threads is not None:
            torch.set_num_threads(self._all_threads)
            self._all_threads = None

    @contextlib.contextmanager
    def _generator_threads(self) -> Iterator[None]:
        """A block with the generator's threads, after which the learner has its own."""
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
        hold: Hold,
    ) -> None:
        """Take what begins the generators (with the first `draw`), and how far the run was.

        `drawn_by` has the version of each step that a run had begun to draw when it was stopped. Each of `n_shares`
        generators gets a share of a step. `mixed` answers may be of several policies. `hold` puts the policy that drew
        where the learner scores by it.
        """
        self._begin, self._store, self._tracker = begin, store, tracker
        self._mixed, self._n_shares, self._hold = mixed, n_shares, hold
        self._policies = dict(tracker.after)
        self._drawn_by = dict(drawn_by)
        self._scheduler: Scheduler | None = None
        self._last: tuple[float, float] | None = None
        """Time at which the answers before were taken, and how long generators had been at work by then."""
        for snapshot in self._policies.values():
            store.add(snapshot)

    def draw(self, step: int, version: int, lap: Lap) -> tuple[Rollout, dict[str, float]]:
        """Take what generators have drawn or are about to; the metrics say how busy they and the learner were."""
        if self._scheduler is None:
            self._scheduler = self._begin()
        began = time.perf_counter()
        rollout, waited, ready, busy_seconds = self._scheduler.take(step)
        lap("wait")
        now = time.perf_counter()
        last, busy = self._last or (began, 0.0)
        self._last = now, busy_seconds
        wall, drawing = now - last, rollout.stats.seconds
        learning = wall - waited
        longer = max(drawing, learning)
        metrics = {
            "async/ready_steps": float(ready),
            "async/generate_seconds": drawing,
            "async/learner_utilisation": learning / wall,
            "async/generator_utilisation": min(1.0, (busy_seconds - busy) / wall / self._n_shares),
            "async/speedup_bound": (drawing + learning) / longer,
            "async/speedup": (drawing + learning) / max(wall, longer),
        }
        if not self._mixed and rollout.frozen is None:
            metrics |= self._hold(self._store.get(rollout.policy_version))
        scores = [] if rollout.frozen is None else [x for _, x in rollout.frozen.items()]
        supports = [] if rollout.batch.supports is None else [rollout.batch.supports.words]
        for tensor in (rollout.batch.tokens_T, rollout.logprobs_M, rollout.versions_M, *supports, *scores):
            if tensor.is_cuda:  # made on a generator's stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return rollout, metrics

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Publish the policy; the bytes that were sent are `async/published_bytes`."""
        snapshot = self._tracker.now(version)
        assert self._scheduler is not None
        self._store.add(snapshot)
        sent = self._scheduler.publish(done, snapshot)
        self._store.keep(self._scheduler.policies().values())
        return {"async/published_bytes": float(sent)}

    def state(self) -> PastState:
        """Policies that may still draw, and versions that steps have begun to be drawn by."""
        if self._scheduler is None:
            return PastState(policies=self._policies, drawn_by=self._drawn_by)
        policies = {done: self._store.get(version) for done, version in self._scheduler.policies().items()}
        return PastState(policies=policies, drawn_by=self._scheduler.drawn_by())

    def close(self) -> None:
        """Stop the generators."""
        if self._scheduler is not None:
            self._scheduler.close()
