"""Draws the answers of a work item on a vLLM server, by the policy that the item names."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from rlhf_engine.errors import RolloutServerError
from rlhf_engine.generators.policy_store import VersionStore, put
from rlhf_engine.generators.work import WorkItem
from rlhf_engine.generators.worker import StoppedError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.policy.build import BEHAVIOUR
from rlhf_engine.rollout import Rollout
from rlhf_engine.rollout.vllm.backend import VllmRollouts

_PAUSE = 1.0
"""Seconds before a server that has failed is looked for again."""
_ATTEMPTS = 3
"""Times that a work item is drawn, where the server fails meanwhile."""


class ServedWorker:
    """Sends a policy to a server under a name with its version, and has it draw, one work item at a time.

    Where the server fails, the item waits until it is up again, the policy is sent again, and all answers of the item
    are drawn again: from the same seeds, so that nothing is lost and nothing comes twice.
    """

    def __init__(
        self, model: HydraModel, store: VersionStore, rollouts: VllmRollouts, *, stopped: Callable[[], bool]
    ) -> None:
        self._model, self._store, self._rollouts, self._stopped = model, store, rollouts, stopped
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
        began = time.perf_counter()
        self._is_drawing = True
        try:
            put(self._store.get(item.version), self._slot)
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return self._draw(item, began)
                except RolloutServerError:
                    if self._stopped():
                        raise StoppedError(item.name) from None
                    if attempt == _ATTEMPTS:
                        raise
                    self._come_back(item)
        finally:
            self._is_drawing = False
        raise AssertionError("unreachable")

    def check(self, version: int) -> dict[str, float]:
        """Compare the server's log-probs with those of a policy, by the learner, which holds it as the past one.

        Answers of that version have been drawn. The metrics are empty where it was compared before.
        """
        return self._rollouts.check(version)

    def close(self) -> None:
        """Unload and remove the adapters of this worker."""
        self._rollouts.close()

    def _come_back(self, item: WorkItem) -> None:
        """Wait for a server that failed, which may have forgotten every adapter."""
        time.sleep(_PAUSE)
        self._rollouts.forget()
        try:
            self._rollouts.wait_for_server()
        except RolloutServerError:
            if self._stopped():
                raise StoppedError(item.name) from None
            raise

    def _draw(self, item: WorkItem, began: float) -> Rollout:
        prompts = item.prompts
        self._rollouts.sync(item.version)
        rollout = self._rollouts.generate(
            prompts.prompts, item.sampling, role=BEHAVIOUR, sample_ids=prompts.sample_ids, greedy=prompts.greedy
        )
        stats = dataclasses.replace(rollout.stats, seconds=time.perf_counter() - began)
        return dataclasses.replace(rollout, stats=stats)
