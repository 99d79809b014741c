"""Scoring passes over answers: all that memory holds at once, and the roles that no update of a run changes.

What the reference, the reward model and the policy that drew an answer say of it is the same whenever it is asked. Such
frozen roles have a pass of their own where answers are drawn beside the updates: whoever has the time makes it, the
generator or the learner, with the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlhf_kernels.runtime import registry

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import is_out_of_memory, release_memory
from rlhf_engine.errors import MemoryLimitError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores
from rlhf_engine.rollout import Rollout

CHECKED_EVERY = 8
"""One in so many answers is scored in exact mode by the policy that drew it; others keep the rollout's log-probs.
"""


def score(
    model: HydraModel,
    batch: PackedBatch,
    roles: Sequence[str],
    budget: int,
    *,
    temperature: float,
    exact_kl: bool = False,
) -> tuple[Scores, int]:
    """Score as `HydraModel.score` does; the scores, and the `budget` of tokens that fitted, halved until then."""
    while True:
        try:
            scores = model.score(batch, roles, temperature=temperature, exact_kl=exact_kl, token_budget=budget)
            return scores, budget
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryLimitError) or not is_out_of_memory(error):
                raise
            # a larger budget than all lanes of all tokens, one between that and a single lane of them, or a smaller one
            # than one sequence, changes nothing
            together = len(roles) * batch.n_tokens
            tried = together if budget >= together else min(budget, batch.n_tokens)
            if tried <= max(batch.lengths):
                raise MemoryLimitError(
                    "scoring a single sequence does not fit into memory; shorten answers or use a smaller model"
                ) from error
        release_memory(model.device)  # here rather than above, where the error still holds the failed pass's tensors
        budget = tried // 2


def score_some(
    model: HydraModel, drawn: Rollout, role: str, budget: int, *, temperature: float, turn: int
) -> tuple[Scores, int]:
    """Score one in `CHECKED_EVERY` answers by the policy that drew it, as at this `turn`; the budget, too."""
    n = drawn.batch.n_sequences
    checked = list(range(turn % min(n, CHECKED_EVERY), n, CHECKED_EVERY))
    scores, budget = score(model, drawn.batch.select(checked), [role], budget, temperature=temperature)
    name = next(name for name, _ in scores.items() if name.endswith("logprobs_M"))
    logprobs_M = drawn.logprobs_M.clone()
    logprobs_M[drawn.batch.select_completion_rows(checked)] = getattr(scores, name)
    return dataclasses.replace(scores, **{name: logprobs_M}), budget


class FrozenRoles:
    """Scores of answers by the roles that no update changes, in exact mode also by the policy that drew."""

    def __init__(
        self, model: HydraModel, config: TrainConfig, *, past: str | None, reward: bool, budget: int | None = None
    ) -> None:
        """Choose the roles: the reference is left to the present policy's pass where the exact KL needs both."""
        self._model, self._temperature = model, config.temperature
        reference = [] if config.kl_estimator == "exact" else ["reference"]
        self._past, self._roles = past, [*reference, *(["reward"] if reward else [])]
        self.budget = model.token_budget if budget is None else budget

    def __call__(self, drawn: Rollout) -> Scores | None:
        """Score answers, or None where there is no such role. The budget that fitted is kept."""
        past, roles, few = self._past, self._roles, Scores()
        if past is not None and registry.is_exact():
            few, self.budget = score_some(
                self._model, drawn, past, self.budget, temperature=self._temperature, turn=drawn.policy_version
            )
        elif past is not None:
            roles = [past, *roles]
        scores = Scores()
        if roles:
            scores, self.budget = score(self._model, drawn.batch, roles, self.budget, temperature=self._temperature)
        return dataclasses.replace(scores, **dict(few.items())) if past is not None or roles else None
