"""Workers that draw the answers of a work item, and a thread that does so beside the learner.

A `Worker` draws on a model, a `ServedWorker` on a vLLM server, each by the policy that the item names. In the thread
one copy of the base serves learner and generator, which share nothing that changes: the generator draws in a slot of
its own, into which it copies published policies between two tokens. The gate by which layers find their slot is a
thread's own. On a GPU it has a stream of its own with the higher priority: its small kernels slip in between the
learner's large ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from rlhf_engine.errors import RolloutServerError
from rlhf_engine.generators.scheduler import Drawn, Event, GeneratorTransport, Joined, Lost
from rlhf_engine.generators.work import Snapshot, VersionStore, WorkItem, put
from rlhf_engine.hydra import HydraModel, Scores
from rlhf_engine.policy.build import BEHAVIOUR
from rlhf_engine.rollout import EngineOptions, Request, Rollout, RolloutEngine
from rlhf_engine.rollout.generate import collect
from rlhf_engine.rollout.vllm.backend import VllmRollouts

WORKER = "generator"
_PAUSE = 1.0  # seconds before a server that has failed is looked for again
_ATTEMPTS = 3  # times that a work item is drawn, where the server fails meanwhile


class StoppedError(Exception):
    """The drawing was called off."""


class Worker:
    """Draws work items in the lane of `behaviour`, one at a time."""

    def __init__(
        self,
        model: HydraModel,
        store: VersionStore,
        options: EngineOptions | None = None,
        *,
        in_flight: bool = False,
        score: Callable[[Rollout], Scores | None] | None = None,
    ) -> None:
        """Take a model and the policies that may draw.

        With `in_flight`, answers that are being written go on with each newer policy. `score` scores the answers by
        frozen roles, unless `hurry` is set: the learner waits and does so itself. `stop` is looked at before every
        token.
        """
        self._model, self._options, self._store = model, options, store
        self._slot = model.role_backbone(BEHAVIOUR).slot(BEHAVIOUR)
        self._in_flight, self._score = in_flight, score
        self._held: Snapshot | None = None
        self.stop, self.hurry = threading.Event(), threading.Event()
        self.beat = time.monotonic()  # time at which it was last seen at work

    def __call__(self, item: WorkItem) -> Rollout:
        """The answers of a work item. Raises StoppedError after `stop`, and what drawing raises."""
        began, prompts = time.perf_counter(), item.prompts
        self.beat = time.monotonic()
        self._hold(self._store.newest() if self._in_flight else self._store.get(item.version))
        requests = [
            Request(prompt=prompt, sample_id=sample_id, role=BEHAVIOUR, greedy=greedy)
            for prompt, sample_id, greedy in zip(prompts.prompts, prompts.sample_ids, prompts.greedy, strict=True)
        ]
        engine = RolloutEngine(self._model, item.sampling, requests, options=self._options)
        answers = []
        while not engine.finished:
            if self.stop.is_set():
                raise StoppedError(item.name)
            if self._in_flight:
                self._hold(self._store.newest())
            assert self._held is not None
            engine.policy_version = self._held.version
            answers += engine.step()
            self.beat = time.monotonic()
        rollout = collect(requests, answers, engine.backbone.device, stats=engine.stats)
        frozen = None
        if self._score is not None and not self.hurry.is_set():
            drawn = prompts.drawn
            frozen = self._score(rollout if len(drawn) == len(prompts) else rollout.select(drawn))
        return dataclasses.replace(_timed(rollout, began), frozen=frozen)

    def close(self) -> None:
        """Do nothing: the model is the learner's."""

    def _hold(self, snapshot: Snapshot) -> None:
        if self._held is not snapshot:
            put(snapshot, self._slot)
            self._held = snapshot


def _timed(rollout: Rollout, began: float) -> Rollout:
    return dataclasses.replace(rollout, stats=dataclasses.replace(rollout.stats, seconds=time.perf_counter() - began))


class ServedWorker:
    """Sends a policy to a server and has it draw, again from the same seeds where the server fails."""

    def __init__(
        self, model: HydraModel, store: VersionStore, serve: Callable[[Callable[[], bool]], VllmRollouts]
    ) -> None:
        """serve: makes the backend by which a server draws for `behaviour`; it is given what says whether to stop."""
        self.stop, self.hurry = threading.Event(), threading.Event()
        self._store, self._rollouts = store, serve(self.stop.is_set)
        self._slot = model.role_backbone(BEHAVIOUR).slot(BEHAVIOUR)
        self._is_drawing = False
        self._beat = time.monotonic()

    @property
    def beat(self) -> float:
        """Time when it last was seen at work. A request under way has a timeout of its own."""
        if self._is_drawing:
            self._beat = time.monotonic()
        return self._beat

    def __call__(self, item: WorkItem) -> Rollout:
        """Draw a work item; StoppedError where the run has stopped meanwhile."""
        began, prompts = time.perf_counter(), item.prompts
        self._is_drawing = True
        try:
            put(self._store.get(item.version), self._slot)
            for left in reversed(range(_ATTEMPTS)):
                try:
                    self._rollouts.sync(item.version)
                    ids, greedy = prompts.sample_ids, prompts.greedy
                    draw = self._rollouts.generate
                    drawn = draw(prompts.prompts, item.sampling, role=BEHAVIOUR, sample_ids=ids, greedy=greedy)
                    return _timed(drawn, began)
                except RolloutServerError:
                    if not left or self.stop.is_set():
                        raise
                time.sleep(_PAUSE)
                self._rollouts.forget()  # a server that failed may have forgotten every adapter
                self._rollouts.wait_for_server()
        except RolloutServerError:
            if self.stop.is_set():
                raise StoppedError(item.name) from None
            raise
        finally:
            self._is_drawing = False
        raise AssertionError("unreachable")

    def check(self, version: int) -> dict[str, float]:
        """Compare the server's log-probs with those of the past policy; no metrics where that was done before."""
        return self._rollouts.check(version)

    def close(self) -> None:
        """Unload and remove the adapters of this worker."""
        self._rollouts.close()


class GeneratorThread(GeneratorTransport):
    """The transport to the thread: work items and policies go over as objects."""

    def __init__(
        self,
        worker: Worker | ServedWorker,
        store: VersionStore,
        *,
        device: torch.device | str = "cpu",
        threads: int | None = None,
    ) -> None:
        """Start the thread. threads: of this process's CPU threads, those that it takes from the learner."""
        self._learner_threads = torch.get_num_threads() if threads is not None else None
        if threads is not None:
            torch.set_num_threads(max(1, torch.get_num_threads() - threads))
        self._worker, self._store, self._threads = worker, store, threads
        self._device = torch.device(device)
        self._items: queue.SimpleQueue[WorkItem | None] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[Callable[[], Event | None]] = queue.SimpleQueue()
        self._began = time.monotonic()
        self._given_up = False
        self._cuda_stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._work, name=WORKER, daemon=True)
        self._thread.start()
        self._tell(Joined(WORKER))

    def _tell(self, event: Event) -> None:
        self._notes.put(lambda: event)

    def publish(self, snapshot: Snapshot) -> int:
        self._store.add(snapshot)  # a copy goes into the generator's slot
        return snapshot.n_bytes

    def keep(self, versions: frozenset[int]) -> None:
        self._store.keep(versions)

    def submit(self, worker: str, item: WorkItem) -> None:
        self._began = time.monotonic()
        self._items.put(item)

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
        self._items.put(None)
        if not self._given_up:
            self._thread.join()
        self._worker.close()
        if self._learner_threads is not None:
            torch.set_num_threads(self._learner_threads)

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # this thread's own
        while (item := self._items.get()) is not None:
            try:
                with self._stream():
                    rollout = self._worker(item)
            except StoppedError:
                return
            except BaseException as error:  # whatever it is, the learner has to hear of it, and raises it
                self._tell(Lost(WORKER, error))
                return
            self._tell(Drawn(WORKER, item, rollout))

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
