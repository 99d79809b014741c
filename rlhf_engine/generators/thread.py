"""A generator in a thread beside the learner, on the same base: one copy of the weights serves both.

The threads share nothing that changes: the generator draws in a slot of its own, into which it copies published
policies between two tokens. The gate by which layers find their slot is a thread's own. On a GPU it has a stream of its
own with the higher priority: its small kernels slip in between the learner's large ones.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from rlhf_engine.generators.policy_store import Snapshot, VersionStore
from rlhf_engine.generators.transport import Drawn, Event, Joined, Lost
from rlhf_engine.generators.work import WorkItem
from rlhf_engine.generators.worker import StoppedError
from rlhf_engine.rollout import Rollout

WORKER = "generator"


class GeneratorThread:
    """The transport to the thread: work items and policies go over as objects."""

    def __init__(
        self,
        draw: Callable[[WorkItem], Rollout],
        store: VersionStore,
        *,
        stop: threading.Event,
        device: torch.device | str = "cpu",
        beat: Callable[[], float] = lambda: 0.0,
        threads: int | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a generator; its thread starts with the first work item.

        `draw` answers a work item and ends with StoppedError soon after `stop` is set. `beat` says when it was last at
        work. `threads` is how many of this process's CPU threads the generator takes from the learner. `close` calls
        `end` once the thread has ended.
        """
        self._learner_threads = torch.get_num_threads() if threads is not None else None
        if threads is not None:
            torch.set_num_threads(max(1, torch.get_num_threads() - threads))
        self._threads = threads
        self._draw, self._store, self._stop, self._beat, self._end = draw, store, stop, beat, end
        self._device = torch.device(device)
        self._items: queue.SimpleQueue[WorkItem | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._began = time.monotonic()
        self._given_up = False
        self._cuda_stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._work, name=WORKER, daemon=True)
        self._thread.start()
        self._events.put(Joined(worker=WORKER))

    def publish(self, snapshot: Snapshot) -> int:
        """Let work items name a policy from here on; a copy goes into the generator's slot."""
        self._store.add(snapshot)
        return snapshot.n_bytes

    def keep(self, versions: frozenset[int]) -> None:
        """Forget the others."""
        self._store.keep(versions)

    def submit(self, worker: str, item: WorkItem) -> None:
        """The thread draws it next."""
        self._began = time.monotonic()
        self._items.put(item)

    def next_event(self, timeout: float) -> Event | None:
        """Wait for the next event; None after `timeout` seconds without one."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def silent_for(self, worker: str) -> float:
        """Seconds since the last token, or since the work came."""
        return time.monotonic() - max(self._began, self._beat())

    def expects_more(self) -> bool:
        """Whether a generator is on its way: never, because there is one thread and no other comes after it."""
        return False

    def give_up(self, worker: str, cause: BaseException) -> None:
        """A thread cannot be killed: it is told to stop, and not waited for."""
        self._given_up = True
        self._stop.set()
        self._events.put(Lost(worker=worker, cause=cause))

    def close(self) -> None:
        """Ends after the token that is being drawn."""
        self._stop.set()
        self._items.put(None)
        if not self._given_up:
            self._thread.join()
        self._end()
        if self._learner_threads is not None:
            torch.set_num_threads(self._learner_threads)

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # this thread's own
        while (item := self._items.get()) is not None:
            try:
                with self._stream():
                    rollout = self._draw(item)
            except StoppedError:
                return
            except BaseException as error:  # whatever it is, the learner has to hear of it, and raises it
                self._events.put(Lost(worker=WORKER, cause=error))
                return
            self._events.put(Drawn(worker=WORKER, item=item, rollout=rollout))

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
