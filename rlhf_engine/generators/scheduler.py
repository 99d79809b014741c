"""Hands work to generators: in time, none too early, each to one that is idle, and again where one is lost.

What is learned from comes from `take`, step by step; nothing is drawn that would be too old by then, so nothing is ever
thrown away, and nothing beyond the last step is drawn at all. A step's answers are taken once: what a generator still
sends after it was given up is not looked at.

The policy after s steps is what the first s steps have made of the start. The answers of step t may be drawn as soon as
`earliest(t)` steps are done, by the policy after so many. With `newest` the policy after any later step may draw them:

    every step its own      earliest(t) = t
    n batches per policy    earliest(t) = t − t mod n              ages 0, 1, …, n−1, 0, 1, …
    staleness k             earliest(t) = max(0, t − k)            ages 0, 1, …, k, k, k, …

(Asynchronous RLHF, arXiv 2410.18252, has k = 1, and n from 1 to 64.)
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlhf_engine.config.rollout import AsyncOptions
from rlhf_engine.errors import GeneratorError
from rlhf_engine.generators.work import Snapshot, join
from rlhf_engine.rollout import PromptBatch, Rollout

SILENCE = 600.0  # seconds without a token after which a generator is given up
_LOOK = 0.2  # seconds between two looks at generators that may hang


@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """Rule for the age of answers when they are learned from."""

    max_staleness: int = 0  # steps, k above
    batches_per_policy: int = 1  # n above
    newest: bool = False  # draw by the newest policy rather than by that after `earliest` steps

    @classmethod
    def of(cls, config: AsyncOptions) -> StalenessRule:
        """The rule that a configuration describes."""
        if config.async_kind in ("off", "blocks"):
            return cls(batches_per_policy=config.max_staleness + 1 if config.is_async else 1)
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
    """Steps after which the newest policy was made that there was after `done`; the first where none is so early."""
    return max((steps for steps in known if steps <= done), default=min(known))


class Drawn(NamedTuple):
    """A generator has drawn its answers."""

    worker: str
    rollout: Rollout


class Lost(NamedTuple):
    """A generator has ended, by this cause; what it was drawing, if anything, goes to another."""

    worker: str
    cause: BaseException


class Joined(NamedTuple):
    """A generator takes work from now on, and has every policy that is held."""

    worker: str


Event = Drawn | Lost | Joined


class GeneratorTransport(Protocol):
    """Generators, each of which draws answers to one batch of prompts at a time. One thread at a time calls it."""

    _notes: queue.SimpleQueue[Callable[[], Event | None]]
    """Of what has happened; what is made of it is an event, or nothing."""

    def publish(self, snapshot: Snapshot) -> int:
        """Let every generator draw by a policy, and those that join later as well; the bytes that it sends."""

    def keep(self, versions: frozenset[int]) -> None:
        """Forget policies that will draw nothing any more: all but these."""

    def submit(self, worker: str, prompts: PromptBatch, version: int) -> None:
        """Have an idle generator draw answers, by a policy that was published."""

    def next_event(self, timeout: float) -> Event | None:
        """Wait up to `timeout` seconds for what happens next; None: nothing. May be called while other methods are."""
        until = time.monotonic() + timeout
        while True:
            self._look_after()
            try:
                note = self._notes.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return None
            if (event := note()) is not None:
                return event

    def _look_after(self) -> None:
        """Do what is due before a wait for an event."""
        return

    def silent_for(self, worker: str) -> float:
        """Seconds since a generator with work has last shown that it is at work."""

    def expects_more(self) -> bool:
        """Whether a generator is on its way, so that a `Joined` or one more `Lost` will come."""

    def give_up(self, worker: str, cause: BaseException) -> None:
        """Stop a generator for good, as far as that can be done. It is `Lost`, with this cause."""

    def close(self) -> None:
        """Stop all generators and wait until they have; without effect the second time."""


class Scheduler:
    """One for a run; `close` it. Its own thread looks after the generators."""

    def __init__(
        self,
        transport: GeneratorTransport,
        make_shares: Callable[[int, int], list[PromptBatch]],
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
        """Take what makes the prompts of (step, number of shares), the policies by steps done, the steps to draw."""
        self._transport, self._make_shares, self._rule = transport, make_shares, rule
        self._total, self._n_shares, self._timeout = total_steps, n_shares, timeout
        self._done, self._next_step = step, step
        self._after = {done: snapshot.version for done, snapshot in sorted(policies.items())}
        """Steps done → version of the policy after them."""
        self._drawn_by: dict[int, int] = {}
        self._asked = dict(drawn_by or {})
        self._hurry = hurry or threading.Event()
        self._waiting: deque[tuple[int, int]] = deque()  # shares that nobody draws yet: step, and number of the share
        self._idle: list[str] = []
        self._running: dict[str, tuple[tuple[int, int], float]] = {}  # share that a worker draws, and since when
        self._prompts: dict[int, list[PromptBatch]] = {}
        self._drawn: dict[int, dict[int, Rollout]] = {}  # prompts and answers of each step, by share
        self._busy = 0.0
        self._failure: BaseException | None = None
        self._closed = False
        for snapshot in {snapshot.version: snapshot for snapshot in policies.values()}.values():
            transport.publish(snapshot)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="scheduler", daemon=True)
        self._thread.start()

    def publish(self, done: int, snapshot: Snapshot) -> int:
        """The policy after so many steps is there, maybe one that is known already; the bytes that are sent."""
        sent = 0
        with self._changed:
            if snapshot.version not in self._after.values():
                sent = self._transport.publish(snapshot)
            self._after[done] = snapshot.version
            self._done = max(self._done, done)
            self._forget()
            self._dispatch()
        return sent

    def take(self, step: int) -> tuple[Rollout, float, int, float]:
        """The answers of a step, as soon as they are there. Raises GeneratorError if nobody is left to draw them.

        With them: seconds that the learner had to wait, the number of later steps whose answers are there, and seconds
        that all generators have been at work since the first began.
        """
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
            shares = self._drawn.pop(step)
            del self._prompts[step]
            ready = sum(self._complete(later) for later in self._drawn)
            now = time.perf_counter()
            busy = self._busy + sum(now - since for _, since in self._running.values())
        return join([shares[i] for i in range(len(shares))]), now - began, ready, busy

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

    def _complete(self, step: int) -> bool:
        return step in self._drawn and len(self._drawn[step]) == len(self._prompts[step])

    def _forget(self) -> None:
        """Policies that draw nothing any more, and that no answers waiting to be learned from are of."""
        first = newest_after(self._after, self._rule.earliest(self._done))
        drawn = {version for step, version in self._drawn_by.items() if step >= self._done}
        asked = {version for step, version in self._asked.items() if step >= self._done}
        self._after = {done: v for done, v in self._after.items() if done >= first or v in drawn | asked}
        self._drawn_by = {step: version for step, version in self._drawn_by.items() if step >= self._done}
        self._transport.keep(frozenset(self._after.values()))

    def _dispatch(self) -> None:
        """Work to generators that are idle."""
        while self._idle and not self._closed:
            task = self._next_task()
            if task is None:
                return
            worker, (step, share) = self._idle.pop(0), task
            self._running[worker] = (task, time.perf_counter())
            self._transport.submit(worker, self._prompts[step][share], self._drawn_by[step])

    def _next_task(self) -> tuple[int, int] | None:
        if not self._waiting:
            step = self._next_step
            if step >= min(self._total, self._rule.drawable(self._done)):
                return None
            version = self._asked.pop(step, None)
            if version is None:
                version = self._after[newest_after(self._after, self._rule.drawn_after(step, self._done))]
            self._drawn_by[step] = version
            self._prompts[step], self._drawn[step] = self._make_shares(step, self._n_shares), {}
            self._waiting.extend((step, share) for share in range(len(self._prompts[step])))
            self._next_step += 1
        return self._waiting.popleft()

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
        task = None
        if event.worker in self._running:
            task, since = self._running.pop(event.worker)
            self._busy += time.perf_counter() - since
        if isinstance(event, Drawn):
            if task is not None:
                self._drawn[task[0]][task[1]] = event.rollout
                self._idle.append(event.worker)
            return
        assert isinstance(event, Lost)
        if task is not None:
            self._waiting.appendleft(task)
        if event.worker in self._idle:
            self._idle.remove(event.worker)
        if not self._idle and not self._running and not self._transport.expects_more():
            self._failure = event.cause

    def _give_up_silent(self) -> None:
        for worker, ((step, share), _) in list(self._running.items()):
            silent, n_shares = self._transport.silent_for(worker), len(self._prompts[step])
            if silent > self._timeout:
                part = f", share {share + 1} of {n_shares}" if n_shares > 1 else ""
                said = f"{worker} has drawn no token of the answers of step {step + 1}{part} for {silent:.0f} seconds"
                self._transport.give_up(worker, TimeoutError(said))
