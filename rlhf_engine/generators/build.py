"""Builds the source of a run's answers from its configuration."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import is_gpu
from rlhf_engine.errors import ConfigError
from rlhf_engine.generators.policy_store import Snapshot, VersionStore, put
from rlhf_engine.generators.scheduler import SILENCE, Scheduler
from rlhf_engine.generators.served import ServedWorker
from rlhf_engine.generators.sources import AnswerSource, Concurrent, OwnPolicy, PastPolicies, PastState, PolicyTracker
from rlhf_engine.generators.staleness import StalenessRule
from rlhf_engine.generators.thread import GeneratorThread
from rlhf_engine.generators.transport import GeneratorTransport
from rlhf_engine.generators.work import StepPrompts
from rlhf_engine.generators.worker import Worker
from rlhf_engine.hydra import HydraModel
from rlhf_engine.policy.build import BEHAVIOUR, PAST
from rlhf_engine.rollout import EngineOptions
from rlhf_engine.rollout.backend import Rollouts
from rlhf_engine.rollout.vllm.backend import VllmRollouts
from rlhf_engine.scoring.score import FrozenRoles

Connect = Callable[[HydraModel], GeneratorTransport]
"""Starts generators in other processes, for the learner's model."""
Serve = Callable[[Callable[[], bool]], VllmRollouts]
"""Makes the backend by which a server draws for the role `behaviour`; it is given what says whether to stop."""


def make_source(
    config: TrainConfig,
    model: HydraModel,
    rollouts: Rollouts,
    prompts: StepPrompts,
    past: PastState,
    *,
    step: int,
    policy_version: int,
    reward: bool,
    connect: Connect | None = None,
    serve: Serve | None = None,
) -> AnswerSource:
    """Make the source of a run's answers.

    Policies of the past come from a checkpoint; `step` and `policy_version` say where the run is. `reward` is whether a
    reward role scores. `connect` serves async_mode 'ray'. `serve` is given where a server draws.
    """
    if not config.is_async:
        return OwnPolicy(rollouts, prompts)
    if config.async_mode == "ray" and connect is None:
        raise ConfigError(
            "async: expected RlTrainer's `connect` with 'ray', see rlhf_engine.generators.ray.connect, got none"
        )
    store, tracker = VersionStore(), PolicyTracker(model, past, done=step, version=policy_version)
    rule = StalenessRule.of(config)
    in_flight = config.async_policy == "in_flight"

    score = FrozenRoles(model, config, past=None if in_flight else BEHAVIOUR, reward=reward)

    stop = threading.Event()
    served = None if serve is None else ServedWorker(model, store, serve(stop.is_set), stopped=stop.is_set)

    def hold(policy: Snapshot) -> dict[str, float]:
        put(policy, model.role_backbone(PAST).slot(PAST))
        return {} if served is None else served.check(policy.version)

    options = EngineOptions.of(config)
    device = model.role_backbone(BEHAVIOUR).device
    threads = _generator_threads(config, device)
    hurry = threading.Event()
    if config.async_mode in ("off", "replay"):
        if served is not None:
            return PastPolicies(served, store, tracker, prompts, rule, hold=hold, end=served.close)
        worker = Worker(model, store, options, score=score)
        return PastPolicies(worker, store, tracker, prompts, rule, hold=hold, threads=threads)

    def start() -> GeneratorTransport:
        if config.async_mode == "ray" and connect is not None:
            return connect(model)
        if served is not None:  # the learner scores: no pass of the model is made beside it
            return GeneratorThread(served, store, stop=stop, device=device, beat=lambda: served.beat, end=served.close)
        # who asks the frozen lanes must not show in their bits
        alike = threads is None or torch.get_num_threads() in (1, 2 * threads)
        worker = Worker(
            model,
            store,
            options,
            in_flight=in_flight,
            score=score,
            hurry=hurry.is_set if alike else lambda: False,
            stopped=stop.is_set,
        )
        return GeneratorThread(worker, store, stop=stop, device=device, beat=lambda: worker.beat, threads=threads)

    n_shares = config.ray_generators if config.async_mode == "ray" else 1

    def begin() -> Scheduler:
        return Scheduler(
            start(),
            prompts.items,
            rule,
            tracker.after,
            step=step,
            total_steps=config.max_steps,
            n_shares=n_shares,
            timeout=SILENCE,
            drawn_by=past.drawn_by,
            hurry=hurry,
        )

    return Concurrent(begin, store, tracker, drawn_by=past.drawn_by, n_shares=n_shares, mixed=in_flight, hold=hold)


def _generator_threads(config: TrainConfig, device: torch.device) -> int | None:
    """Threads of the CPU that are a generator's; None where it takes none from the learner."""
    if is_gpu(device) or config.async_mode not in ("replay", "overlap") or config.vllm_servers:
        return None
    return max(1, torch.get_num_threads() // 2)
