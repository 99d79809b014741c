"""A worker that draws answers by past policies, and a thread in which it does so beside the learner.

In the thread one copy of the base serves learner and generator, which share nothing that changes: the generator draws
in a slot of its own, into which it copies published policies between two tokens. The gate by which layers find their
slot is a thread's own. On a GPU it has a stream of its own with the higher priority: its small kernels slip in between
the learner's large ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from rlhf_engine.errors import RolloutServerError
from rlhf_engine.generators.scheduler import Drawn, Event, GeneratorTransport, Joined, Lost
from rlhf_engine.generators.work import Snapshot, VersionStore, put
from rlhf_engine.hydra import Scores
from rlhf_engine.hydra.build import BEHAVIOUR
from rlhf_engine.rollout import PromptBatch, Rollout, SamplingConfig
from rlhf_engine.rollout.backend import Rollouts
from rlhf_engine.rollout.vllm.backend import VllmRollouts

WORKER = "generator"
_ATTEMPTS = 3  # times that answers are drawn, where the server fails meanwhile


class StoppedError(Exception):
    """The drawing was called off."""


class Worker:
    """Draws answers in the lane of `behaviour`, again from the same seeds where a server fails."""

    def __init__(
        self,
        rollouts: Rollouts,
        store: VersionStore,
        sampling: SamplingConfig,
        *,
        in_flight: bool = False,
        score: Callable[[Rollout], Scores | None] | None = None,
    ) -> None:
        """Take what draws, and the policies that may.

        With `in_flight`, answers that are being written go on with each newer policy. `score` scores the answers by
        frozen roles, unless `hurry` is set: the learner waits and does so itself. `stop` is looked at before every
        token.
        """
        self.rollouts, self._store, self._sampling = rollouts, store, sampling
        base = rollouts.model.role_backbone(BEHAVIOUR)
        self._slot, self.kernels = base.slot(BEHAVIOUR), base.kernels
        self._in_flight, self._score = in_flight, score
        self._held: Snapshot | None = None
        self.stop, self.hurry = threading.Event(), threading.Event()
        self.beat = time.monotonic()  # time at which it was last seen at work
        rollouts.look = self._look

    def __call__(self, prompts: PromptBatch, version: int) -> Rollout:
        """Answers by a version's policy. Raises StoppedError after `stop`, and what drawing raises."""
        began, self._version = time.perf_counter(), version
        rollout = self._draw(prompts, _ATTEMPTS)
        if self._score is not None and not self.hurry.is_set():
            drawn = prompts.drawn
            frozen = self._score(rollout if len(drawn) == len(prompts) else rollout.select(drawn))
            rollout = dataclasses.replace(rollout, frozen=frozen)
        rollout.stats.seconds = time.perf_counter() - began
        return rollout

    def _draw(self, prompts: PromptBatch, attempts: int) -> Rollout:
        try:
            version, write = self._look()
            if write is not None:
                write()
            self.rollouts.sync(version)
            return self.rollouts.generate(prompts, self._sampling)
        except RolloutServerError:
            self._look()
            if attempts == 1 or not isinstance(self.rollouts, VllmRollouts):
                raise
        self.rollouts.wait_for_server()
        return self._draw(prompts, attempts - 1)

    def _look(self) -> tuple[int, Callable[[], None] | None]:
        """Version of the policy that draws now, and what writes it into the slot, None where it is there."""
        self.beat = time.monotonic()
        if self.stop.is_set():
            raise StoppedError
        snapshot = self._store.newest() if self._in_flight else self._store.get(self._version)
        return snapshot.version, None if self._held is snapshot else functools.partial(self._put, snapshot)

    def _put(self, snapshot: Snapshot) -> None:
        put(snapshot, self._slot)
        self._held = snapshot


class GeneratorThread(GeneratorTransport):
    """The transport to the thread: prompts and policies go over as objects."""

    def __init__(
        self, worker: Worker, store: VersionStore, *, device: torch.device | str = "cpu", threads: int | None = None
    ) -> None:
        """Start the thread. threads: of this process's CPU threads, those that it takes from the learner."""
        self._learner_threads = torch.get_num_threads() if threads is not None else None
        if threads is not None:
            torch.set_num_threads(max(1, torch.get_num_threads() - threads))
        self._worker, self._store, self._threads = worker, store, threads
        self._device = torch.device(device)
        self._work: queue.SimpleQueue[tuple[PromptBatch, int] | None] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[Callable[[], Event | None]] = queue.SimpleQueue()
        self._began = time.monotonic()
        self._given_up = False
        self._cuda_stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name=WORKER, daemon=True)
        self._thread.start()
        self._tell(Joined(WORKER))

    def _tell(self, event: Event) -> None:
        self._notes.put(lambda: event)

    def publish(self, snapshot: Snapshot) -> int:
        self._store.add(snapshot)  # a copy goes into the generator's slot
        return snapshot.n_bytes

    def keep(self, versions: frozenset[int]) -> None:
        self._store.keep(versions)

    def submit(self, worker: str, prompts: PromptBatch, version: int) -> None:
        self._began = time.monotonic()
        self._work.put((prompts, version))

    def silent_for(self, worker: str) -> float:
        """Seconds since the last token, or since the work came."""
        return time.monotonic() - max(self._began, self._worker.beat)

    def expects_more(self) -> bool:
        return False

    def give_up(self, worker: str, cause: BaseException) -> None:
        """A thread cannot be killed: it is told to stop, and not waited for."""
        self._given_up = True
        self._worker.stop.set()
        self._tell(Lost(worker, cause))

    def close(self) -> None:
        """Ends after the token that is being drawn."""
        self._worker.stop.set()
        self._work.put(None)
        if not self._given_up:
            self._thread.join()
        self._worker.rollouts.close()
        if self._learner_threads is not None:
            torch.set_num_threads(self._learner_threads)

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # this thread's own
        while (work := self._work.get()) is not None:
            try:
                with self._stream(), self._worker.kernels.used():
                    rollout = self._worker(*work)
            except StoppedError:
                return
            except BaseException as error:  # whatever it is, the learner has to hear of it, and raises it
                self._tell(Lost(WORKER, error))
                return
            self._tell(Drawn(WORKER, rollout))

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """A block on the thread's stream, on a GPU; its work is done at the end of the block."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):
            if self._cuda_stream is None:
                self._cuda_stream = torch.cuda.Stream(priority=-1)
            with torch.cuda.stream(self._cuda_stream):
                yield
            self._cuda_stream.synchronize()
