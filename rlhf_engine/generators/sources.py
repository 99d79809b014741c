"""Sources of a step's answers, for the training loop.

OwnPolicy      every step draws its own, on the very weights that train
PastPolicies   one after the other, by the policies that a rule names; what a concurrent run draws, repeated
Concurrent     generators draw the answers of later steps meanwhile

A source has four methods. `draw(step, version, lap)` makes the answers of a step (from 0), the next one to learn from,
and metrics by name; `version` is the present policy's, `lap` is called with the name of a phase at its end.
`learned(done, version)` notes that `done` steps are done, and publishes the policy that they made. `state()` is for a
checkpoint that is written now, and `close()` lets go of what draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import is_gpu
from rlhf_engine.errors import ConfigError
from rlhf_engine.generators.scheduler import SILENCE, GeneratorTransport, Scheduler, StalenessRule, newest_after
from rlhf_engine.generators.thread import GeneratorThread, Worker
from rlhf_engine.generators.work import Snapshot, StepPrompts, VersionStore, put, take
from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.build import BEHAVIOUR, PAST
from rlhf_engine.rollout import Rollout, SamplingConfig
from rlhf_engine.rollout.backend import LocalRollouts, Rollouts
from rlhf_engine.scoring.score import FrozenRoles

Lap = Callable[[str], None]  # called with the name of a phase at its end
Connect = Callable[[HydraModel, SamplingConfig], GeneratorTransport]
"""Starts generators in other processes, for the learner's model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PastState:
    """Past policies and unfinished draws in a checkpoint, so that a resumed run draws the same answers."""

    policies: Mapping[int, Snapshot] = field(default_factory=dict)
    """Steps done → the policy after them, the present one and those that may still be needed."""
    drawn_by: Mapping[int, int] = field(default_factory=dict)  # step → version, of steps whose answers had been begun


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
        self._threads = _generator_threads(config, model.role_backbone(BEHAVIOUR).device)
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
        """Put a policy where the learner scores answers by it, and check that a server draws by it; metrics by name."""
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
        """Give the learner all threads back, and let go of what draws."""
        self._worker.rollouts.close()
        torch.set_num_threads(self._all_threads or torch.get_num_threads())
        self._all_threads = None


class Concurrent(_ByPast):
    """Generators draw ahead, as far as the rule lets them, while the learner learns. They begin with the first draw."""

    def __init__(self, rollouts: Rollouts, prompts: StepPrompts, past: PastState, **options: Any):
        super().__init__(rollouts, prompts, past, **options)
        self._drawn_by = dict(past.drawn_by)
        self._n_shares = self._config.ray_generators if self._config.async_mode == "ray" else 1
        self._scheduler: Scheduler | None = None
        self._last: tuple[float, float] | None = None
        """Time at which the answers before were taken, and how long generators had been at work by then."""

    def _begin(self) -> Scheduler:
        hurry = None
        if self._config.async_mode == "ray":
            assert self._connect is not None
            transport = self._connect(self._model, self._prompts.sampling)
        else:
            # who asks the frozen lanes must not show in their bits
            if self._threads is None or torch.get_num_threads() in (1, 2 * self._threads):
                hurry = self._worker.hurry
            device = self._model.role_backbone(BEHAVIOUR).device
            transport = GeneratorThread(self._worker, self._store, device=device, threads=self._threads)
        return Scheduler(
            transport,
            self._prompts.shares,
            self._rule,
            self._after,
            step=self._prompts.first_step,
            total_steps=self._config.max_steps,
            n_shares=self._n_shares,
            timeout=SILENCE,
            drawn_by=self._drawn_by,
            hurry=hurry,
        )

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
    if config.async_mode == "ray" and connect is None:
        raise ConfigError("async: expected RlTrainer's `connect` with 'ray', see rlhf_engine.generators.ray, got none")
    kind = PastPolicies if config.async_mode in ("blocks", "replay") else Concurrent
    return kind(rollouts, prompts, past, version=version, reward=reward, connect=connect)


def _generator_threads(config: TrainConfig, device: torch.device) -> int | None:
    """Threads of the CPU that are a generator's; None where it takes none from the learner."""
    if is_gpu(device) or config.async_mode not in ("replay", "overlap") or config.vllm_servers:
        return None
    return max(1, torch.get_num_threads() // 2)
