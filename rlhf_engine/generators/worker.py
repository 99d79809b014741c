"""Drawing the answers of an order on a model, by the policy that the order names."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhf_engine.generators.policy_store import Snapshot, VersionStore, put
from rlhf_engine.generators.work import Answered, Order
from rlhf_engine.hydra import HydraModel, PackedBatch
from rlhf_engine.policy.build import BEHAVIOUR
from rlhf_engine.rollout import EngineOptions, Request, RolloutEngine
from rlhf_engine.rollout.generate import collect
from rlhf_engine.scoring.score import FrozenScores


class StoppedError(Exception):
    """The drawing was called off."""


class OrderDrawer:
    """Draws orders in the lane of `behaviour`, one at a time."""

    def __init__(
        self,
        model: HydraModel,
        store: VersionStore,
        options: EngineOptions | None = None,
        *,
        in_flight: bool = False,
        score: Callable[[PackedBatch], FrozenScores | None] | None = None,
        hurry: Callable[[], bool] = lambda: False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """in_flight: answers that are being written go on with each newer policy. score: asks the frozen lanes of the
        answers that are learned from, unless there is `hurry` when they are drawn. stopped: asked before every token.
        """
        backbone = model.role_backbone(BEHAVIOUR)
        self._model, self._options, self._store = model, options, store
        self._slot = backbone.slot(BEHAVIOUR)
        self._in_flight, self._stopped = in_flight, stopped
        self._score, self._hurry = score, hurry
        self._held: Snapshot | None = None
        self.beat = time.monotonic()
        """When it last was seen at work."""

    def __call__(self, order: Order) -> Answered:
        """Raises StoppedError once `stopped`, and what drawing raises."""
        self.beat = time.monotonic()
        self._hold(self._store.newest() if self._in_flight else self._store.get(order.version))
        requests = [
            Request(prompt=prompt, sample_id=sample_id, role=BEHAVIOUR, greedy=greedy)
            for prompt, sample_id, greedy in zip(order.prompts, order.sample_ids, order.greedy, strict=True)
        ]
        engine = RolloutEngine(self._model, order.sampling, requests, options=self._options)
        answers = []
        while not engine.finished:
            if self._stopped():
                raise StoppedError(order.name)
            if self._in_flight:
                self._hold(self._store.newest())
            assert self._held is not None
            engine.policy_version = self._held.version
            answers += engine.step()
            self.beat = time.monotonic()
        rollout = collect(requests, answers, order.sampling, engine.backbone.device, stats=engine.stats)
        if self._score is None or self._hurry():
            return Answered(rollout, None)
        drawn = [i for i, greedy in enumerate(order.greedy) if not greedy]
        everything = len(drawn) == len(order.greedy)
        return Answered(rollout, self._score(rollout.batch if everything else rollout.batch.select(drawn)))

    def _hold(self, snapshot: Snapshot) -> None:
        if self._held is not snapshot:
            put(snapshot, self._slot)
            self._held = snapshot
