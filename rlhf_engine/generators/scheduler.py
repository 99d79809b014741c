"""Hands work to generators: in time, none too early, each to one that is idle, and again where one is lost.

What is learned from comes from `take`, step by step; nothing is drawn that would be too old by then, so nothing is ever
thrown away, and nothing beyond the last step is drawn at all. A step's answers are taken once: what a generator still
sends after it was given up is not looked at.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlhf_engine.errors import GeneratorError
from rlhf_engine.generators.policy_store import Snapshot
from rlhf_engine.generators.staleness import StalenessRule, newest_after
from rlhf_engine.generators.transport import Drawn, Event, GeneratorTransport, Joined, Lost
from rlhf_engine.generators.work import WorkItem, join
from rlhf_engine.rollout import Rollout

MakeItems = Callable[[int, int, int], list[WorkItem]]
"""(step, version, shares) → work items"""
SILENCE = 600.0
"""Seconds without a token after which a generator is given up."""
_LOOK = 0.2
"""Seconds between two looks at generators that may hang."""


class Taken(NamedTuple):
    """The answers of a step, and how the generators do."""

    rollout: Rollout
    wait_seconds: float
    """Seconds that the learner had to wait."""
    ready: int
    """Steps beyond whose answers are there."""
    busy_seconds: float
    """Seconds that all generators have been at work, since the first began."""


class Scheduler:
    """One for a run; `close` it. Its own thread looks after the generators."""

    def __init__(
        self,
        transport: GeneratorTransport,
        make_items: MakeItems,
        rule: StalenessRule,
        policies: Mapping[int, Snapshot],
        *,
        step: int,
        total_steps: int,
        n_shares: int = 1,
        timeout: float = SILENCE,
        drawn_by: Mapping[int, int] | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        """policies: by steps done, those that may draw what is missing; the newest is that after `step` steps.

        step: the first one whose answers are to be drawn; total_steps: the last one is before it.

        n_shares: work items per step. timeout: seconds of silence after which a generator is given up. drawn_by: step →
        version of steps that a run had begun to draw when it was stopped. hurry: set while the learner waits.
        """
        self._transport, self._make_items, self._rule = transport, make_items, rule
        self._total, self._n_shares, self._timeout = total_steps, n_shares, timeout
        self._done, self._next_step = step, step
        self._after = {done: snapshot.version for done, snapshot in sorted(policies.items())}
        """Steps done → version of the policy after them."""
        self._drawn_by: dict[int, int] = {}
        self._asked = dict(drawn_by or {})
        self._hurry = hurry or threading.Event()
        self._waiting: deque[WorkItem] = deque()
        self._idle: list[str] = []
        self._running: dict[str, tuple[WorkItem, float]] = {}
        self._shares: dict[int, dict[int, Drawn]] = {}
        self._busy = 0.0
        self._failure: BaseException | None = None
        self._closed = False
        for snapshot in {snapshot.version: snapshot for snapshot in policies.values()}.values():
            transport.publish(snapshot)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="scheduler", daemon=True)
        self._thread.start()

    # ---- the learner's side ----------------------------------------------------------------------------------------

    def publish(self, done: int, snapshot: Snapshot) -> int:
        """The policy after so many steps is there. May be one that is known already: nothing was learned.

        Returns the bytes that are sent.
        """
        sent = 0
        with self._changed:
            if snapshot.version not in self._after.values():
                sent = self._transport.publish(snapshot)
            self._after[done] = snapshot.version
            self._done = max(self._done, done)
            self._forget()
            self._dispatch()
        return sent

    def take(self, step: int) -> Taken:
        """The answers of a step, as soon as they are there. Raises GeneratorError if nobody is left to draw them."""
        began = time.perf_counter()
        with self._changed:
            while not self._complete(step):
                if self._failure is not None:
                    cause = self._failure
                    raise GeneratorError(
                        f"no generator is left to draw the answers of step {step + 1}; the last one ended with "
                        f"{type(cause).__name__}: {cause}"
                    ) from cause
                self._hurry.set()
                self._changed.wait()
            self._hurry.clear()
            shares = self._shares.pop(step)
            ready = sum(self._complete(later) for later in self._shares)
            now = time.perf_counter()
            busy = self._busy + sum(now - since for _, since in self._running.values())
        rollout = join([shares[i].rollout for i in range(len(shares))])
        return Taken(rollout, wait_seconds=now - began, ready=ready, busy_seconds=busy)

    def policies(self) -> dict[int, int]:
        """Steps done → version, of the policies that may still draw or have drawn what is not learned from yet."""
        with self._changed:
            return dict(self._after)

    def drawn_by(self) -> dict[int, int]:
        """Step → version, of steps that are being drawn or wait to be learned from."""
        with self._changed:
            return {step: version for step, version in self._drawn_by.items() if step >= self._done}

    def close(self) -> None:
        """Stop the generators."""
        with self._changed:
            self._closed = True
        self._thread.join()
        self._transport.close()

    # ---- inside, under the lock ------------------------------------------------------------------------------------

    def _complete(self, step: int) -> bool:
        shares = self._shares.get(step, {})
        return bool(shares) and len(shares) == next(iter(shares.values())).item.n_shares

    def _forget(self) -> None:
        """Policies that no work item can name, and that no answers waiting to be learned from are of."""
        first = newest_after(self._after, self._rule.earliest(self._done))
        drawn = {version for step, version in self._drawn_by.items() if step >= self._done}
        asked = {version for step, version in self._asked.items() if step >= self._done}
        self._after = {
            done: version for done, version in self._after.items() if done >= first or version in drawn | asked
        }
        self._drawn_by = {step: version for step, version in self._drawn_by.items() if step >= self._done}
        self._transport.keep(frozenset(self._after.values()))

    def _dispatch(self) -> None:
        """Work to generators that are idle."""
        while self._idle and not self._closed:
            item = self._next_item()
            if item is None:
                return
            worker = self._idle.pop(0)
            self._running[worker] = (item, time.perf_counter())
            self._transport.submit(worker, item)

    def _next_item(self) -> WorkItem | None:
        if not self._waiting:
            step = self._next_step
            if step >= min(self._total, self._rule.drawable(self._done)):
                return None
            version = self._asked.pop(step, None)
            if version is None:
                version = self._after[newest_after(self._after, self._rule.drawn_after(step, self._done))]
            self._drawn_by[step] = version
            self._waiting.extend(self._make_items(step, version, self._n_shares))
            self._next_step += 1
        return self._waiting.popleft()

    # ---- the generators' side --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._closed:
                event = self._transport.next_event(_LOOK)
                with self._changed:
                    if event is not None:
                        self._note(event)
                    self._give_up_silent()
                    self._dispatch()
                    self._changed.notify_all()
        except BaseException as error:  # a thread's error reaches nobody unless the learner raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _note(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._idle.append(event.worker)
            return
        item = self._stop_running(event.worker)
        if isinstance(event, Drawn):
            if item is event.item:
                self._shares.setdefault(item.step, {})[item.share] = event
                self._idle.append(event.worker)
            return
        assert isinstance(event, Lost)
        if item is not None:
            self._waiting.appendleft(item)
        if event.worker in self._idle:
            self._idle.remove(event.worker)
        if not self._idle and not self._running and not self._transport.expects_more():
            self._failure = event.cause

    def _stop_running(self, worker: str) -> WorkItem | None:
        if worker not in self._running:
            return None
        item, since = self._running.pop(worker)
        self._busy += time.perf_counter() - since
        return item

    def _give_up_silent(self) -> None:
        for worker, (item, _) in list(self._running.items()):
            silent = self._transport.silent_for(worker)
            if silent > self._timeout:
                self._transport.give_up(
                    worker,
                    TimeoutError(f"{worker} has drawn no token of {item.name} for {silent:.0f} seconds"),
                )
