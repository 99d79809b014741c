"""The transport to generators that are Ray actors. Imports no Ray: whoever makes one hands it over."""

from __future__ import annotations

import functools
import math
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.generators import serialize
from rlhf_engine.generators.policy_store import Snapshot
from rlhf_engine.generators.ray.generator import Generator
from rlhf_engine.generators.transport import Drawn, Event, Joined, Lost
from rlhf_engine.generators.work import WorkItem

_BEAT = 1.0
"""Seconds between two questions whether a generator is at work."""
_START = 600.0
"""Seconds in which a generator has to come up, or `timeout` if that is more: bases take their time to load."""


class Room(NamedTuple):
    """Resources of one generator process."""

    cpus: int
    gpus: float
    threads: int | None
    """Threads of the CPU; None: as many as torch takes."""


@dataclass(kw_only=True, eq=False)
class _Worker:
    name: str
    actor: Any
    stage: Literal["starting", "receiving", "ready"] = "starting"
    place: str = "a process that has not come up"
    pid: int | None = None
    item: WorkItem | None = None
    owed: set[int] = field(default_factory=set)
    """Versions that it was sent and has not acknowledged."""
    seen: float = field(default_factory=time.monotonic)
    """Time at which it was last known to be at work, or began to be."""
    ask_at: float = 0.0
    """Time to ask next whether it is at work; never while it has not answered."""


class _Sent(NamedTuple):
    digest: str
    n_bytes: int
    ref: Any
    """Reference to the bytes in Ray's store."""


class RayTransport:
    """Actors, their start and their end. What they answer is queued, and looked at in `next_event`."""

    def __init__(
        self,
        ray: Any,
        config: Mapping[str, Any],
        frozen: Mapping[str, str],
        *,
        generators: int,
        room: Room,
        restarts: int,
        timeout: float,
        device: torch.device | str = "cpu",
    ) -> None:
        """config, frozen: what generators are built from and have to find, see `Generator.build`.

        restarts: lost generators that are replaced. timeout: of silence, after which the scheduler gives one up.
        device: of answers.
        """
        self._ray, self._config, self._frozen, self._room = ray, dict(config), dict(frozen), room
        self._restarts, self._device = restarts, device
        self._beat, self._start_limit = min(_BEAT, timeout / 4), max(_START, timeout)
        self._class = ray.remote(concurrency_groups={"beat": 1})(Generator)
        self._lock = threading.RLock()
        self._notes: queue.SimpleQueue[Callable[[], Event | None]] = queue.SimpleQueue()
        self._held: dict[int, _Sent] = {}
        self._workers: dict[str, _Worker] = {}
        self._started = 0
        self.losses: list[Lost] = []
        """Generators that were lost so far, and of what."""
        for _ in range(generators):
            self._start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the generators that have come up."""
        with self._lock:
            return {worker.name: worker.pid for worker in self._workers.values() if worker.pid is not None}

    # ---- the scheduler's side --------------------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> int:
        """Send a policy to every generator that has come up; others get it as they do."""
        parcel = serialize.pack_policy(snapshot)
        with self._lock:
            sent = _Sent(parcel.digest, len(parcel.data), self._ray.put(parcel.data))
            self._held[parcel.version] = sent
            receivers = [worker for worker in self._workers.values() if worker.stage != "starting"]
            for worker in receivers:
                self._send(worker, parcel.version)
        return sent.n_bytes * len(receivers)

    def keep(self, versions: frozenset[int]) -> None:
        """Generators hear of it with their next work item."""
        with self._lock:
            self._held = {version: sent for version, sent in self._held.items() if version in versions}

    def submit(self, worker: str, item: WorkItem) -> None:
        """Send a generator its work item, after the policies that were published before."""
        with self._lock:
            generator = self._workers.get(worker)
            if generator is None:
                return  # lost: the scheduler is about to hear of it
            generator.item, generator.seen = item, time.monotonic()
            digest = self._held[item.version].digest

            def drawn(values: dict[str, Any]) -> Event | None:
                if values["digest"] != digest:
                    return self._lose(generator, EngineError(f"{worker} has drawn {item.name} by another policy"))
                try:
                    rollout = serialize.unpack_rollout(values["rollout"], self._device)
                except EngineError as error:
                    return self._lose(generator, error)
                generator.item = None
                registry.take_over(registry.Choice(*kernel) for kernel in values["kernels"])
                return Drawn(worker=worker, item=item, rollout=rollout)

            self._ask(generator, "draw", serialize.pack_item(item), sorted(self._held), then=drawn)

    def next_event(self, timeout: float) -> Event | None:
        """Wait for the next event; None after `timeout` seconds without one."""
        until = time.monotonic() + timeout
        while True:
            self._look_after()
            try:
                note = self._notes.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return None
            with self._lock:
                event = note()
            if event is not None:
                return event

    def silent_for(self, worker: str) -> float:
        """Seconds since the last token that it reported."""
        with self._lock:
            generator = self._workers.get(worker)
            return 0.0 if generator is None else time.monotonic() - generator.seen

    def expects_more(self) -> bool:
        """Whether one that was started has not joined yet."""
        with self._lock:
            return any(worker.stage != "ready" for worker in self._workers.values())

    def give_up(self, worker: str, cause: BaseException) -> None:
        """End the process of a generator, which is then lost."""
        with self._lock:
            generator = self._workers.get(worker)
        if generator is not None:
            self._notes.put(lambda: self._lose(generator, cause))

    def close(self) -> None:
        """End their processes; Ray itself stays."""
        with self._lock:
            workers, self._workers = self._workers, {}
            for worker in workers.values():
                self._end(worker)

    # ---- a generator's life, under the lock ------------------------------------------------------------------------

    def _start(self) -> _Worker:
        self._started += 1
        options = {"num_cpus": self._room.cpus, "num_gpus": self._room.gpus, "max_restarts": 0}
        worker = _Worker(name=f"generator {self._started}", actor=self._class.options(**options).remote())
        self._workers[worker.name] = worker

        def built(place: tuple[int, str]) -> Event | None:
            worker.pid, host = place
            worker.place, worker.stage = f"process {worker.pid} on {host}", "receiving"
            for version in self._held:
                self._send(worker, version)
            return self._join_if_complete(worker)

        kernels = [tuple(choice) for choice in registry.choices()]
        self._ask(worker, "build", self._config, self._frozen, self._room.threads, kernels, then=built)
        return worker

    def _send(self, worker: _Worker, version: int) -> None:
        sent = self._held[version]
        worker.owed.add(version)

        def arrived(digest: str) -> Event | None:
            if digest != sent.digest:
                text = f"policy version {version}: {worker.name} holds digest {digest[:12]}…, not {sent.digest[:12]}…"
                return self._lose(worker, EngineError(text))
            worker.owed.discard(version)
            return self._join_if_complete(worker)

        self._ask(worker, "hold", version, sent.digest, sent.ref, then=arrived)

    def _join_if_complete(self, worker: _Worker) -> Joined | None:
        if worker.stage != "receiving" or worker.owed:
            return None
        worker.stage = "ready"
        return Joined(worker=worker.name)

    def _lose(self, worker: _Worker, cause: BaseException) -> Lost | None:
        if self._workers.pop(worker.name, None) is None:
            return None  # it was lost before, or all is closed
        self._end(worker)
        lost = Lost(worker=worker.name, cause=cause)
        self.losses.append(lost)
        text = f"{worker.name}, {worker.place}, is lost: {type(cause).__name__}: {cause}"
        if self._restarts > 0 and not isinstance(cause, ConfigError):  # that, the next one would find as well
            self._restarts -= 1
            text += f"; {self._start().name} takes its place"
        warnings.warn(text, stacklevel=2)
        return lost

    def _end(self, worker: _Worker) -> None:
        if self._ray.is_initialized():
            self._ray.kill(worker.actor)

    # ---- questions and answers -------------------------------------------------------------------------------------

    def _ask(self, worker: _Worker, method: str, *arguments: Any, then: Callable[[Any], Event | None]) -> None:
        """Call a method of a generator; `then` gets what it returns, unless the generator is lost by then."""
        call = getattr(worker.actor, method)
        if method == "beat":  # in a thread of its own there, since the other one draws
            call = call.options(concurrency_group="beat")
        ref = call.remote(*arguments)

        def settle(future: Future[Any]) -> Event | None:
            if worker.name not in self._workers:
                return None
            error = future.exception()
            return self._lose(worker, _cause(error)) if error is not None else then(future.result())

        ref.future().add_done_callback(lambda future: self._notes.put(lambda: settle(future)))

    def _look_after(self) -> None:
        """Ask who is at work, and note who has not come up in time."""
        now = time.monotonic()
        with self._lock:
            for worker in list(self._workers.values()):
                if worker.stage != "ready":
                    if now - worker.seen > self._start_limit:
                        self.give_up(worker.name, TimeoutError(f"it has not come up for {self._start_limit:.0f} s"))
                elif now >= worker.ask_at:
                    worker.ask_at = math.inf
                    self._ask(worker, "beat", then=functools.partial(self._has_answered, worker))

    def _has_answered(self, worker: _Worker, age: float) -> None:
        now = time.monotonic()
        worker.seen = max(worker.seen, now - age)
        worker.ask_at = now + self._beat


def _cause(error: BaseException) -> BaseException:
    """Error that ended a call on the other side, in few words; Ray's own error is its `__cause__`."""
    raised = getattr(error, "cause", None)
    if isinstance(raised, BaseException):
        raised.__cause__ = error
        return raised
    said = " ".join(str(error).split())
    said = said.partition("The actor is dead because ")[2] or said
    lost = ConnectionError(re.split(r" (?:Some common causes|There are some potential)", said)[0])
    lost.__cause__ = error
    return lost
