"""Draws the answers of a work item on a model, by the policy that the item names."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from rlhf_engine.generators.policy_store import Snapshot, VersionStore, put
from rlhf_engine.generators.work import WorkItem
from rlhf_engine.hydra import HydraModel, Scores
from rlhf_engine.policy.build import BEHAVIOUR
from rlhf_engine.rollout import EngineOptions, Request, Rollout, RolloutEngine
from rlhf_engine.rollout.generate import collect


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
        hurry: Callable[[], bool] = lambda: False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take a model and the policies that may draw.

        With `in_flight`, answers that are being written go on with each newer policy. `score` scores the answers by
        frozen roles, unless `hurry` says that the learner waits and does so itself. `stopped` is called before every
        token.
        """
        backbone = model.role_backbone(BEHAVIOUR)
        self._model, self._options, self._store = model, options, store
        self._slot = backbone.slot(BEHAVIOUR)
        self._in_flight, self._stopped = in_flight, stopped
        self._score, self._hurry = score, hurry
        self._held: Snapshot | None = None
        self.beat = time.monotonic()
        """Time at which it was last seen at work."""

    def __call__(self, item: WorkItem) -> Rollout:
        """The answers of a work item. Raises StoppedError once `stopped`, and what drawing raises."""
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
            if self._stopped():
                raise StoppedError(item.name)
            if self._in_flight:
                self._hold(self._store.newest())
            assert self._held is not None
            engine.policy_version = self._held.version
            answers += engine.step()
            self.beat = time.monotonic()
        rollout = collect(requests, answers, engine.backbone.device, stats=engine.stats)
        frozen = None
        if self._score is not None and not self._hurry():
            drawn = prompts.drawn
            frozen = self._score(rollout if len(drawn) == len(prompts) else rollout.select(drawn))
        stats = dataclasses.replace(rollout.stats, seconds=time.perf_counter() - began)
        return dataclasses.replace(rollout, frozen=frozen, stats=stats)

    def _hold(self, snapshot: Snapshot) -> None:
        if self._held is not snapshot:
            put(snapshot, self._slot)
            self._held = snapshot
