"""From a configuration to what the training loop gets its answers from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, PackedBatch
from rlhf_engine.rollout import EngineOptions
from rlhf_engine.rollout.backend import Rollouts
from rlhf_engine.training.build import BEHAVIOUR
from rlhf_engine.training.distributed import ALONE, World
from rlhf_engine.training.generation.drawing import OrderDrawer
from rlhf_engine.training.generation.orders import StepOrders
from rlhf_engine.training.generation.scheduler import Scheduler
from rlhf_engine.training.generation.sources import (
    Concurrent,
    OwnPolicy,
    PastPolicies,
    PastState,
    PolicyTracker,
    Source,
)
from rlhf_engine.training.generation.staleness import StalenessRule
from rlhf_engine.training.generation.thread import GeneratorThread
from rlhf_engine.training.generation.transport import Transport
from rlhf_engine.training.generation.versions import VersionStore
from rlhf_engine.training.lanes import FrozenScores, score_frozen

Connect = Callable[[HydraModel], Transport]
"""Starts generators in other processes, for the learner's model."""


def make_source(
    config: TrainConfig,
    model: HydraModel,
    rollouts: Rollouts,
    orders: StepOrders,
    past: PastState,
    *,
    step: int,
    policy_version: int,
    reward: bool,
    world: World = ALONE,
    connect: Connect | None = None,
) -> Source:
    """past: what a checkpoint holds; step, policy_version: where the run is; reward: whether a reward role scores;
    world: ranks that draw a share each.

    connect: for async_mode 'ray'. Raises ConfigError where it is missing.
    """
    if not config.draws_beside:
        return OwnPolicy(rollouts, orders, world)
    store, hurry = VersionStore(), threading.Event()
    tracker = PolicyTracker(model, past, done=step, version=policy_version)
    rule = StalenessRule.of(config)
    in_flight = config.async_policy == "in_flight"
    start: Callable[[], Transport]
    n_shares = 1
    if config.async_mode == "ray":
        if connect is None:
            raise ConfigError(
                "async: expected RlTrainer's `connect` with 'ray', see rlhf_engine.integrations.ray, got none"
            )
        start, n_shares = functools.partial(connect, model), config.ray_generators
    else:
        device = model.role_backbone(BEHAVIOUR).device
        threads = None
        if device.type == "cpu" and config.async_mode != "off":
            threads = config.generator_threads or max(1, torch.get_num_threads() // 2)

        def score(batch: PackedBatch) -> FrozenScores | None:
            return score_frozen(model, batch, config, past=None if in_flight else BEHAVIOUR, reward=reward)

        make_drawer = functools.partial(OrderDrawer, model, store, EngineOptions.of(config), score=score)
        if config.async_mode != "overlap":
            return PastPolicies(make_drawer(), store, tracker, orders, rule, world, threads=threads)
        stop = threading.Event()
        # who asks the frozen lanes must not show in their bits
        alike = threads is None or torch.get_num_threads() in (1, 2 * threads)
        draw = make_drawer(in_flight=in_flight, hurry=hurry.is_set if alike else lambda: False, stopped=stop.is_set)
        start = functools.partial(
            GeneratorThread, draw, store, stop=stop, device=device, beat=lambda: draw.beat, threads=threads
        )

    def begin() -> Scheduler:
        return Scheduler(
            start(),
            orders.orders,
            rule,
            tracker.after,
            step=step,
            total_steps=config.max_steps,
            n_shares=n_shares,
            timeout=config.async_timeout,
            drawn_by=past.drawn_by,
            hurry=hurry,
        )

    return Concurrent(begin, store, tracker, n_shares=n_shares, mixed=in_flight, drawn_by=past.drawn_by)
