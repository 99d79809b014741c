"""Scoring passes over answers: all that memory holds at once, and the roles that no update of a run changes.

What the reference, the reward model and the policy that drew an answer say of it is the same whenever it is asked. Such
frozen roles have a pass of their own where answers are drawn beside the updates: whoever has the time makes it, the
generator or the learner, with the same bits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from rlhf_kernels.runtime import registry

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import Budget, is_out_of_memory, release_memory
from rlhf_engine.errors import MemoryLimitError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores
from rlhf_engine.hydra.model import join_scores
from rlhf_engine.hydra.roles import fold_lanes
from rlhf_engine.rollout import Rollout

CHECKED_EVERY = 8
"""One in so many answers is scored in exact mode by the policy that drew it; others keep those of the draw."""


def score(
    model: HydraModel,
    batch: PackedBatch,
    roles: Sequence[str],
    budget: Budget,
    *,
    temperature: float,
    exact_kl: bool = False,
    most: int | None = None,
) -> Scores:
    """Score as `HydraModel.score` does, in groups of at most `most` tokens; one that does not fit, in smaller ones."""
    most = most or budget.tokens or model.token_budget
    options: dict[str, Any] = {"temperature": temperature, "exact_kl": exact_kl}
    lanes = max(Counter(map(itemgetter(0), fold_lanes(model.roles, roles))).values())  # of one backbone
    parts: list[Scores] = []
    for part in model.parts(batch, most):
        rows = model.count_rows(part)
        rows = lanes * rows if lanes * rows <= most else rows
        try:
            with budget.measured(rows):
                parts.append(model.score(part, roles, token_budget=most, **options))
            continue
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryLimitError) or not is_out_of_memory(error):
                raise
            if rows <= max(part.lengths):
                raise MemoryLimitError(
                    "scoring a single sequence does not fit into memory; shorten answers (max_completion_length) or "
                    "use a smaller model"
                ) from error
        release_memory(model.device)  # here rather than above, where the error still holds the failed pass's tensors
        budget.divide(rows // 2)
        parts.append(score(model, part, roles, budget, most=rows // 2, **options))
    return join_scores(parts)


def score_some(
    model: HydraModel, drawn: Rollout, role: str, budget: Budget, *, temperature: float, turn: int
) -> Scores:
    """Score one in `CHECKED_EVERY` answers by the policy that drew it, as at this `turn`."""
    n = drawn.batch.n_sequences
    checked = list(range(turn % min(n, CHECKED_EVERY), n, CHECKED_EVERY))
    scores = score(model, drawn.batch.select(checked), [role], budget, temperature=temperature)
    name = next(name for name, _ in scores.items() if name.endswith("logprobs_M"))
    logprobs_M = drawn.logprobs_M.clone()
    logprobs_M[drawn.batch.select_completion_rows(checked)] = getattr(scores, name)
    return dataclasses.replace(scores, **{name: logprobs_M})


class FrozenRoles:
    """Scores of answers by the roles that no update changes, in exact mode also by the policy that drew."""

    def __init__(
        self, model: HydraModel, config: TrainConfig, *, past: str | None, reward: bool, budget: Budget | None = None
    ) -> None:
        """Choose the roles: the reference is left to the present policy's pass where the exact KL needs both."""
        self._model, self._temperature = model, config.temperature
        reference = [] if config.kl_estimator == "exact" else ["reference"]
        self._past, self._roles = past, [*reference, *(["reward"] if reward else [])]
        self._budget = Budget(model.device) if budget is None else budget

    def __call__(self, drawn: Rollout) -> Scores | None:
        """Score answers, or None where there is no such role."""
        past, roles, few = self._past, self._roles, Scores()
        given: dict[str, Any] = {"budget": self._budget, "temperature": self._temperature}
        if past is not None and registry.is_exact():
            few = score_some(self._model, drawn, past, turn=drawn.policy_version, **given)
        elif past is not None:
            roles = [past, *roles]
        scores = score(self._model, drawn.batch, roles, **given) if roles else Scores()
        return dataclasses.replace(scores, **dict(few.items())) if past is not None or roles else None
