"""The prompts of a step and the sources of its answers; the worker that draws by past policies, and its thread.

Prompts are a function of (data, seed, step), whoever answers them and whenever.

OwnPolicy      every step draws its own, on the very weights that train
PastPolicies   one after the other, by the policies that a rule names; what a concurrent run draws, repeated
Concurrent     generators draw the answers of later steps meanwhile

A source has four methods. `draw(step, version, lap)` makes the answers of a step (from 0) and metrics by name, calling
`lap` with the name of each phase. `learned(done, version)` publishes the policy that `done` steps have made. `state()`
is for a checkpoint that is written now, and `close()` lets go of what draws.

In the thread one copy of the base serves learner and generator, which share nothing that changes: the generator draws
in a slot of its own, into which it copies published policies between two tokens. On a GPU it has a stream of its own
with the higher priority: its small kernels slip in between the learner's large ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet, batch_indices
from rlhf_engine.devices import ALONE, World, is_gpu
from rlhf_engine.errors import ConfigError, RolloutServerError
from rlhf_engine.generators.scheduler import (
    SILENCE,
    Drawn,
    Event,
    GeneratorTransport,
    Joined,
    Lost,
    Scheduler,
    StalenessRule,
    newest_after,
)
from rlhf_engine.generators.work import Snapshot, VersionStore, put, take
from rlhf_engine.hydra import HydraModel, Scores
from rlhf_engine.hydra.build import BEHAVIOUR, PAST
from rlhf_engine.rollout import PromptBatch, Rollout, SamplingConfig
from rlhf_engine.rollout.generate import LocalRollouts, Rollouts
from rlhf_engine.rollout.vllm.backend import VllmRollouts
from rlhf_engine.scoring.experience import FrozenRoles

Lap = Callable[[str], None]  # called with the name of a phase at its end
Connect = Callable[[HydraModel, SamplingConfig], GeneratorTransport]
"""Starts generators in other processes, for the learner's model."""
WORKER = "generator"
_ATTEMPTS = 3  # times that answers are drawn, where the server fails meanwhile


@dataclass(frozen=True, kw_only=True, eq=False)
class PastState:
    """Past policies and unfinished draws in a checkpoint, so that a resumed run draws the same answers."""

    policies: Mapping[int, Snapshot] = field(default_factory=dict)
    """Steps done → the policy after them, the present one and those that may still be needed."""
    drawn_by: Mapping[int, int] = field(default_factory=dict)  # step → version, of steps whose answers had been begun


class StepPrompts:
    """The prompts of every step of a run, and how answers to them are drawn."""

    def __init__(
        self,
        config: TrainConfig,
        prompts: PromptSet,
        sampling: SamplingConfig,
        *,
        step: int,
        samples: int,
        world: World = ALONE,
    ) -> None:
        """Take the data, and how far the run is: steps done and answers drawn when it began or was taken up."""
        self.config, self.sampling, self.first_step = config, sampling, step
        self._prompts, self._samples, self._world, self._converses = prompts, samples, world, config.converses
        self.of_step = functools.lru_cache(maxsize=config.max_staleness + 2)(self._of_step)
        """All prompts of a step (from 0), kept for those that are being drawn or learned from."""

    def _of_step(self, step: int) -> PromptBatch:
        config = self.config
        n_answers = config.prompts_per_step * config.generations
        rows = batch_indices(len(self._prompts.rows), config.prompts_per_step, step, config.seed)
        return PromptBatch.of(
            rows,
            self._prompts.ids,
            generations=config.generations,
            with_greedy=config.facts.with_greedy,
            first_id=self._samples + (step - self.first_step) * n_answers,
            data=self._prompts.conversations(rows) if self._converses else (),
        )

    def own(self, step: int) -> PromptBatch:
        """This rank's share of the prompts of a step."""
        return self._divided(self.of_step(step), self._world.size)[self._world.rank]

    def shares(self, step: int, n_shares: int) -> list[PromptBatch]:
        """This rank's share of a step for so many generators, or one for each prompt."""
        own = self.own(step)
        return self._divided(own, min(n_shares, len(own) // self.config.generations))

    def _divided(self, prompts: PromptBatch, n_shares: int) -> list[PromptBatch]:
        """Prompts in so many nearly equal shares; the answers to a prompt stay together."""
        if n_shares == 1:
            return [prompts]
        n = self.config.generations
        bounds = [round(i * (len(prompts) // n) / n_shares) * n for i in range(n_shares + 1)]
        columns = dataclasses.fields(PromptBatch)
        return [
            PromptBatch(**{column.name: getattr(prompts, column.name)[a:b] for column in columns})
            for a, b in itertools.pairwise(bounds)
        ]


class OwnPolicy:
    """Every step draws its own answers: there is nothing to remember, and nothing to let go of."""

    def __init__(self, rollouts: Rollouts, prompts: StepPrompts) -> None:
        self._rollouts, self._prompts = rollouts, prompts

    def draw(self, step: int, version: int, lap: Lap) -> tuple[Rollout, dict[str, float]]:
        """Draw by the present policy."""
        synced = self._rollouts.sync(version)
        if synced:
            lap("sync")
        began = time.perf_counter()
        rollout = self._rollouts.generate(self._prompts.own(step), self._prompts.sampling)
        lap("generate")
        rollout.stats.seconds = time.perf_counter() - began
        return rollout, synced

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Do nothing: the next draw is by the weights that train."""
        return {}

    def state(self) -> PastState:
        """Nothing to remember."""
        return PastState()

    def close(self) -> None:
        """Nothing to let go of."""


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


class _ByPast:
    """Common parts of both sources whose answers past policies draw."""

    def __init__(
        self,
        rollouts: Rollouts,
        prompts: StepPrompts,
        past: PastState,
        *,
        version: int,
        reward: bool,
        connect: Connect | None,
    ) -> None:
        """Take the arguments of `make_source`, and a snapshot of the present policy beside the past ones."""
        config, model = prompts.config, rollouts.model
        self._model, self._prompts, self._config = model, prompts, config
        self._rule, self._store, self._connect = StalenessRule.of(config), VersionStore(), connect
        spec = model.roles["actor"]
        assert spec.slot is not None
        self._slot = model.backbone(spec.backbone).slot(spec.slot)
        self._present = take(self._slot, version)
        known = {snapshot.version: snapshot for snapshot in past.policies.values()} | {version: self._present}
        self._after = {done: known[snapshot.version] for done, snapshot in past.policies.items()}
        """Policies by steps done."""
        self._after[prompts.first_step] = self._present
        for snapshot in self._after.values():
            self._store.add(snapshot)
        self._mixed = config.async_policy == "in_flight"  # whether an answer may be of several policies
        takes_threads = config.async_kind in ("replay", "overlap") and not config.vllm_servers
        takes_threads = takes_threads and not is_gpu(model.role_backbone(BEHAVIOUR).device)
        self._threads = max(1, torch.get_num_threads() // 2) if takes_threads else None
        """Threads of the CPU that are a generator's; None where it takes none from the learner."""
        score = None  # by the learner, of what a server draws: no pass is made beside it
        if isinstance(rollouts, LocalRollouts):
            score = FrozenRoles(model, config, past=None if self._mixed else BEHAVIOUR, reward=reward)
        self._worker = Worker(rollouts, self._store, prompts.sampling, in_flight=self._mixed, score=score)

    def _now(self, version: int) -> Snapshot:
        """Snapshot of the present policy, taken once per version, where it may draw."""
        if version != self._present.version:
            self._present = take(self._slot, version)
        self._store.add(self._present)
        return self._present

    def _hold(self, policy: Snapshot) -> dict[str, float]:
        """Copy a policy into the slot that the learner scores by, and compare a server's with it; metrics by name."""
        put(policy, self._model.role_backbone(PAST).slot(PAST))
        return self._worker.rollouts.check(policy.version)


class PastPolicies(_ByPast):
    """Draws the answers of a step when it comes, by the policy that the rule names."""

    _all_threads: int | None = None

    def draw(self, step: int, version: int, lap: Lap) -> tuple[Rollout, dict[str, float]]:
        """Draw on this thread, by the policy that the rule names rather than by `version`."""
        policy = self._after[newest_after(self._after, self._rule.earliest(step))]
        self._all_threads = self._all_threads or torch.get_num_threads()
        torch.set_num_threads(self._threads or self._all_threads)
        try:
            rollout = self._worker(self._prompts.own(step), policy.version)
        finally:
            torch.set_num_threads(max(1, self._all_threads - (self._threads or 0)))
        lap("generate")
        return rollout, self._hold(policy) if rollout.frozen is None else {}

    def learned(self, done: int, version: int) -> dict[str, float]:
        """Note the policy, and forget those that no later step asks for."""
        self._after[done] = self._now(version)
        first = newest_after(self._after, self._rule.earliest(done))
        self._after = {steps: policy for steps, policy in self._after.items() if steps >= first}
        self._store.keep(policy.version for policy in self._after.values())
        return {}

    def state(self) -> PastState:
        """The policies of later steps."""
        return PastState(policies=dict(self._after))

    def close(self) -> None:
        """Give the learner all threads of the CPU back, and close the rollouts."""
        self._worker.rollouts.close()
        torch.set_num_threads(self._all_threads or torch.get_num_threads())
        self._all_threads = None


class Concurrent(_ByPast):
    """Generators draw ahead, as far as the rule lets them, while the learner learns. They begin with the first draw."""

    def __init__(self, rollouts: Rollouts, prompts: StepPrompts, past: PastState, **options: Any):
        super().__init__(rollouts, prompts, past, **options)
        self._drawn_by = dict(past.drawn_by)
        self._n_shares = self._config.ray_generators if self._config.async_kind == "ray" else 1
        self._scheduler: Scheduler | None = None
        self._last: tuple[float, float] | None = None
        """Time at which the answers before were taken, and how long generators had been at work by then."""

    def _begin(self) -> Scheduler:
        hurry = None
        if self._config.async_kind == "ray":
            assert self._connect is not None
            transport = self._connect(self._model, self._prompts.sampling)
        else:
            # who asks the frozen lanes must not show in their bits
            if self._threads is None or torch.get_num_threads() in (1, 2 * self._threads):
                hurry = self._worker.hurry
            device = self._model.role_backbone(BEHAVIOUR).device
            transport = GeneratorThread(self._worker, self._store, device=device, threads=self._threads)
        return Scheduler(
            transport, self._prompts.shares, self._rule, self._after, step=self._prompts.first_step,
            total_steps=self._config.max_steps, n_shares=self._n_shares, timeout=SILENCE, drawn_by=self._drawn_by,
            hurry=hurry,
        )  # fmt: skip

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
        snapshot = self._now(version)
        assert self._scheduler is not None
        sent = self._scheduler.publish(done, snapshot)
        self._store.keep(self._scheduler.policies().values())
        return {"async/published_bytes": float(sent)}

    def state(self) -> PastState:
        """Policies that may still draw, and versions that steps have begun to be drawn by."""
        if self._scheduler is None:
            return PastState(policies=self._after, drawn_by=self._drawn_by)
        policies = {done: self._store.get(version) for done, version in self._scheduler.policies().items()}
        return PastState(policies=policies, drawn_by=self._scheduler.drawn_by())

    def close(self) -> None:
        """Stop the generators."""
        if self._scheduler is not None:
            self._scheduler.close()


AnswerSource = OwnPolicy | PastPolicies | Concurrent


def make_source(
    rollouts: Rollouts,
    prompts: StepPrompts,
    past: PastState,
    *,
    version: int,
    reward: bool,
    connect: Connect | None = None,
) -> AnswerSource:
    """Make the source of a run's answers; `connect` serves async_mode 'ray'."""
    config = prompts.config
    if not config.is_async:
        return OwnPolicy(rollouts, prompts)
    if config.async_kind == "ray" and connect is None:
        raise ConfigError("async: expected RlTrainer's `connect` with 'ray', see rlhf_engine.generators.ray, got none")
    kind = PastPolicies if config.async_kind in ("blocks", "replay") else Concurrent
    return kind(rollouts, prompts, past, version=version, reward=reward, connect=connect)
