"""Generators as Ray actors, on this machine or on a cluster: `rlhf-engine train --async ray`.

    with generators_on_ray(config) as connect:
        RlTrainer(config, connect=connect).run()

Every generator is a process that holds the base, a slot for the policy that draws, and the frozen lanes. Only adapters
go over, each checked on arrival and again by the digest that comes back with the answers that it drew. One that dies,
raises or falls silent is lost: another draws its share, and a new one takes its place, up to three times in a run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import os
import queue
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rlhf_kernels.runtime import registry

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import ALONE, World, is_gpu, keep_freed_memory, resolve_device
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.generators import work
from rlhf_engine.generators.scheduler import SILENCE, Drawn, Event, GeneratorTransport, Joined, Lost
from rlhf_engine.generators.sources import Connect, Worker
from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.build import BEHAVIOUR, build_generator_model
from rlhf_engine.rollout import EngineOptions, PromptBatch, SamplingConfig
from rlhf_engine.rollout.answer import load_own_tokenizer
from rlhf_engine.rollout.conversation import make_conversations
from rlhf_engine.rollout.generate import LocalRollouts
from rlhf_engine.scoring.experience import FrozenRoles

_BEAT = 1.0  # seconds between two questions whether a generator is at work
_START = 600.0  # seconds in which a generator has to come up, or `timeout` if that is more: bases load slowly
RESTARTS = 3  # times in a run that a lost generator is replaced
_REACH = 10.0  # seconds in which a cluster's head has to answer
_PATHS = ("model_name_or_path", "actor_adapter", "reference_adapter", "reward_model_path")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class Room(NamedTuple):
    """Resources of one generator process."""

    cpus: int
    gpus: float
    threads: int | None  # of the CPU; None: as many as torch takes


class Generator:
    """Draws answers by policies that it was sent: a Ray actor, with a thread for `beat` and one for the rest."""

    def __init__(self) -> None:
        self._store, self._digests = work.VersionStore(), dict[int, str]()
        self._worker: Worker | None = None

    def build(
        self,
        config: Mapping[str, Any],
        sampling: Mapping[str, Any],
        frozen: Mapping[str, str],
        threads: int | None,
        kernels: Sequence[Any],
    ) -> tuple[int, str]:
        """Load the model of a TrainConfig's values; process id and host. ConfigError where `frozen` parts differ."""
        options = TrainConfig(**config)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        registry.set_default_backend(options.kernels)
        registry.begin_run((registry.Choice(*values) for values in kernels), exact=bool(options.exact))
        keep_freed_memory()
        self._threads = threads or torch.get_num_threads()
        torch.set_num_threads(self._threads)
        model = build_generator_model(options).eval()
        work.require_same_parts(work.fixed_parts(model), frozen)
        self._device = model.role_backbone(BEHAVIOUR).device
        score = FrozenRoles(model, options, past=BEHAVIOUR, reward="reward" in model.roles)
        conversations = make_conversations(options, load_own_tokenizer(options)) if options.converses else None
        rollouts = LocalRollouts(model, EngineOptions.of(options), BEHAVIOUR, conversations)
        self._worker = Worker(rollouts, self._store, SamplingConfig(**sampling), score=score)
        return os.getpid(), socket.gethostname()

    def hold(self, version: int, digest: str, data: bytes) -> str:
        """Hold a policy for later answers, EngineError for a damaged one; the digest of what arrived."""
        self._store.add(work.unpack_policy(version, digest, data, self._device))
        self._digests[version] = digest
        return digest

    def draw(self, prompts: Mapping[str, Any], version: int, keep: Sequence[int]) -> dict[str, Any]:
        """Answers, the digest of the policy that drew them, and kernels chosen so far; only versions in `keep` stay."""
        if self._worker is None:
            raise EngineError("generator: expected `build` before `draw`")
        torch.set_num_threads(self._threads)  # of this thread, which need not be the one that has built the model
        self._store.keep(keep)
        self._digests = {version: digest for version, digest in self._digests.items() if version in keep}
        rollout = work.pack_rollout(self._worker(PromptBatch(**prompts), version))
        kernels = [tuple(choice) for choice in registry.choices()]
        return {"rollout": rollout, "digest": self._digests[version], "kernels": kernels}

    def beat(self) -> float:
        """Seconds since it was last seen at work."""
        return time.monotonic() - self._worker.beat if self._worker is not None else 0.0


@dataclass(kw_only=True, eq=False)
class _Process:
    name: str
    actor: Any
    place: str = "a process that has not come up"
    pid: int | None = None  # None until it has come up
    seen: float = field(default_factory=time.monotonic)  # when it was last known to be at work, or began to be
    ask_at: float = 0.0  # when to ask next whether it is at work; never while it has not answered


class RayTransport(GeneratorTransport):
    """Actors, their start and their end. What they answer is queued, and looked at in `next_event`."""

    def __init__(
        self,
        ray: Any,
        config: Mapping[str, Any],
        sampling: SamplingConfig,
        frozen: Mapping[str, str],
        *,
        generators: int,
        room: Room,
        restarts: int,
        timeout: float,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start so many generators, of which `restarts` are replaced when they are lost or silent for too long."""
        self._ray, self._room, self._kernels = ray, room, registry.effective()
        self._given = (dict(config), asdict(sampling), dict(frozen), room.threads)
        self._restarts, self._device = restarts, device
        self._beat, self._start_limit = min(_BEAT, timeout / 4), max(_START, timeout)
        self._class = ray.remote(concurrency_groups={"beat": 1})(Generator)
        self._lock = threading.RLock()
        self._notes: queue.SimpleQueue[Callable[[], Event | None]] = queue.SimpleQueue()
        self._held: dict[int, tuple[str, Any]] = {}  # digest by version, and the reference to the bytes in Ray's store
        self._workers: dict[str, _Process] = {}
        self._started = 0
        self.losses: list[Lost] = []  # so far
        for _ in range(generators):
            self._start()

    def publish(self, snapshot: work.Snapshot) -> int:
        """Send a policy to every generator that has come up; others get it as they do."""
        digest, data = work.pack_policy(snapshot)
        with self._lock:
            self._held[snapshot.version] = (digest, self._ray.put(data))
            receivers = [worker for worker in self._workers.values() if worker.pid is not None]
            for worker in receivers:
                self._send(worker, snapshot.version)
        return len(data) * len(receivers)

    def keep(self, versions: frozenset[int]) -> None:
        with self._lock:  # generators hear of it with their next prompts
            self._held = {version: sent for version, sent in self._held.items() if version in versions}

    def submit(self, worker: str, prompts: PromptBatch, version: int) -> None:
        """Send a generator its prompts, after the policies that were published before."""
        with self._lock:
            generator = self._workers.get(worker)
            if generator is None:
                return  # lost: the scheduler is about to hear of it
            generator.seen = time.monotonic()
            digest, _ = self._held[version]

            def drawn(values: dict[str, Any]) -> Event:
                if values["digest"] != digest:
                    raise EngineError(f"{worker} has drawn by another policy than version {version}")
                rollout = work.unpack_rollout(values["rollout"], self._device)
                with self._kernels.used():  # of the run, whose thread this is not
                    registry.take_over(registry.Choice(*kernel) for kernel in values["kernels"])
                return Drawn(worker, rollout)

            self._ask(generator, "draw", asdict(prompts), version, sorted(self._held), then=drawn)

    def silent_for(self, worker: str) -> float:
        """Seconds since the last token that it reported."""
        with self._lock:
            generator = self._workers.get(worker)
            return 0.0 if generator is None else time.monotonic() - generator.seen

    def expects_more(self) -> bool:
        with self._lock:
            return any(worker.pid is None for worker in self._workers.values())

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
            for worker in workers.values() if self._ray.is_initialized() else ():
                self._ray.kill(worker.actor)

    # ---- a generator's life, under the lock ------------------------------------------------------------------------

    def _start(self) -> str:
        """Start a process; its name."""
        self._started += 1
        options = {"num_cpus": self._room.cpus, "num_gpus": self._room.gpus, "max_restarts": 0}
        worker = _Process(name=f"generator {self._started}", actor=self._class.options(**options).remote())
        self._workers[worker.name] = worker

        def built(place: tuple[int, str]) -> Event | None:
            worker.pid, host = place
            worker.place, worker.seen = f"process {worker.pid} on {host}", time.monotonic()
            for version in self._held:
                self._send(worker, version)  # it has them before any work: calls arrive in order
            return Joined(worker.name)

        with self._kernels.used():
            kernels = [tuple(choice) for choice in registry.choices()]
        self._ask(worker, "build", *self._given, kernels, then=built)
        return worker.name

    def _send(self, worker: _Process, version: int) -> None:
        sent, data = self._held[version]

        def arrived(digest: str) -> None:
            if digest != sent:
                said = f"{worker.name} holds digest {digest[:12]}…, not {sent[:12]}…"
                raise EngineError(f"policy version {version}: {said}")

        self._ask(worker, "hold", version, sent, data, then=arrived)

    def _lose(self, worker: _Process, cause: BaseException) -> Lost | None:
        with self._lock:
            if self._workers.pop(worker.name, None) is None:
                return None  # it was lost before, or all is closed
            if self._ray.is_initialized():
                self._ray.kill(worker.actor)
            self.losses.append(Lost(worker.name, cause))
            text = f"{worker.name}, {worker.place}, is lost: {type(cause).__name__}: {cause}"
            if self._restarts > 0 and not isinstance(cause, ConfigError):  # that, the next one would find as well
                self._restarts -= 1
                text += f"; {self._start()} takes its place"
        warnings.warn(text, stacklevel=2)
        return self.losses[-1]

    def _ask(self, worker: _Process, method: str, *arguments: Any, then: Callable[[Any], Event | None]) -> None:
        """Call a method of a generator; `then` gets its result, unless the generator is lost by then."""
        call = getattr(worker.actor, method)
        if method == "beat":  # in a thread of its own there, since the other one draws
            call = call.options(concurrency_group="beat")

        def settle(future: Future[Any]) -> Event | None:
            with self._lock:
                if worker.name not in self._workers:
                    return None
                error = future.exception()
                if error is not None:
                    return self._lose(worker, _cause(error))
                try:
                    return then(future.result())
                except EngineError as damage:
                    return self._lose(worker, damage)

        called = call.remote(*arguments).future()
        called.add_done_callback(lambda future: self._notes.put(lambda: settle(future)))

    def _look_after(self) -> None:
        """Ask who is at work, and note who has not come up in time."""
        now = time.monotonic()
        with self._lock:
            for worker in list(self._workers.values()):
                if worker.pid is None:
                    if now - worker.seen > self._start_limit:
                        self.give_up(worker.name, TimeoutError(f"it has not come up for {self._start_limit:.0f} s"))
                elif now >= worker.ask_at:
                    worker.ask_at = math.inf
                    self._ask(worker, "beat", then=functools.partial(self._has_answered, worker))

    def _has_answered(self, worker: _Process, age: float) -> None:
        now = time.monotonic()
        worker.seen = max(worker.seen, now - age)
        worker.ask_at = now + self._beat


def _cause(error: BaseException) -> BaseException:
    """Error that ended a call on the other side, in few words; Ray's own error is its `__cause__`."""
    raised = getattr(error, "cause", None)
    if not isinstance(raised, BaseException):
        around = r".*The actor is dead because | (?:Some common causes|There are some potential).*"
        raised = ConnectionError(re.sub(around, "", " ".join(str(error).split())))
    raised.__cause__ = error
    return raised


@contextlib.contextmanager
def generators_on_ray(config: TrainConfig, world: World = ALONE) -> Iterator[Connect]:
    """Make what `RlTrainer` takes as `connect`, on the cluster there is or a new one; ConfigError without room."""
    ray = _import_ray()
    address = os.environ.get("RAY_ADDRESS")
    if world.size > 1 and address is None:
        raise ConfigError(
            f"RAY_ADDRESS: expected that of a running cluster (ray start --head) in a run of {world.size} processes, "
            "each of which has generators of its own there, got none"
        )
    device = resolve_device(config.device) if world.device is None else world.device
    threads = torch.get_num_threads()
    ours = not ray.is_initialized()
    if ours:
        _join(ray, address, device)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = room_for(config, device, nodes, learners=world.size)
        if ours and address is None and room.threads is not None:
            # they run on the learner's own cores
            torch.set_num_threads(max(1, threads - config.ray_generators * room.threads))
        # folders by their whole path, because processes may start elsewhere; the GPU is the one that Ray gives
        paths = {name: str(getattr(config, name)) for name in _PATHS if getattr(config, name)}
        whole = {name: str(Path(path).resolve()) for name, path in paths.items() if Path(path).exists()}
        for name in ("environment", "tools"):
            file, colon, attribute = str(getattr(config, name) or "").partition(".py")
            if colon:
                whole[name] = f"{Path(file).resolve()}.py{attribute}"
        theirs = replace(config, **whole, device=device.type, shard_base=False)  # type: ignore[arg-type]

        def connect(model: HydraModel, sampling: SamplingConfig) -> RayTransport:
            given = replace(theirs, exact=registry.is_exact()).to_dict(), sampling, work.fixed_parts(model)
            n, place = config.ray_generators, model.role_backbone(BEHAVIOUR).device
            return RayTransport(ray, *given, generators=n, room=room, restarts=RESTARTS, timeout=SILENCE, device=place)

        yield connect
    finally:
        torch.set_num_threads(threads)
        if ours:
            ray.shutdown()


def room_for(config: TrainConfig, device: torch.device, nodes: list[Mapping[str, float]], *, learners: int = 1) -> Room:
    """Ray resources of each generator. Raises ConfigError where machines with these resources cannot hold them all."""
    n = config.ray_generators * learners
    cpus_by_node = [int(node.get("CPU", 0)) for node in nodes]
    if is_gpu(device):
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        sharers = -(-n // max(1, gpus))  # generators of one GPU: none lies across two
        room = Room(cpus=1, gpus=1 / sharers, threads=None)
        fit = sum(min(cpus, int(node.get("GPU", 0)) * sharers) for node, cpus in zip(nodes, cpus_by_node, strict=True))
    else:
        threads = max(1, min(max(cpus_by_node, default=1), sum(cpus_by_node) // (2 * n)))
        room = Room(cpus=threads, gpus=0.0, threads=threads)
        fit = sum(cpus // threads for cpus in cpus_by_node)
    if fit < n:
        have = f"{sum(cpus_by_node)} CPUs and {sum(node.get('GPU', 0) for node in nodes):g} GPUs"
        each = f"{room.cpus} CPUs and {room.gpus:g} GPUs"
        given = f"{n}" if learners == 1 else f"{config.ray_generators} for each of {learners} processes"
        raise ConfigError(f"async: expected ray with at most {fit}, of {each} each, where Ray has {have}; got {given}")
    return room


def _import_ray() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "async: expected 'off', 'overlap' or 'replay' where Ray is not installed (pip install 'rlhf-engine[ray]'), "
            f"got 'ray': {error}"
        ) from error


def _join(ray: Any, address: str | None, device: torch.device) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        host, _, port = address.rpartition(":")
        try:
            if host:
                socket.create_connection((host, int(port)), timeout=_REACH).close()  # Ray would try for minutes
            ray.init(address=address, **quiet)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:  # what they raise where nobody answers
            raise ConfigError(
                f"RAY_ADDRESS: expected the address of a running cluster's head, got {address!r}: {error}"
            ) from error
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = _other_gpus(device) or before
    try:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        ray.init(address="local", include_dashboard=False, **quiet)
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif visible is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")


def _other_gpus(device: torch.device) -> str | None:
    """CUDA_VISIBLE_DEVICES without the learner's GPU; None where it has no other beside it."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return ",".join(name for i, name in enumerate(ids) if i != (device.index or 0))
