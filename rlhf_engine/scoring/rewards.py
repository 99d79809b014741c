"""The score of an answer: the learned reward lane, users' reward functions, or both weighted; then the EOS rule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerState

from rlhf_engine.data.types import Text
from rlhf_engine.errors import ConfigError, RewardError
from rlhf_engine.scoring.reward_functions import (
    RewardFunction,
    check_reward,
    load_reward,
    score_with_functions,
    weighted_total,
)

REWARD_MODEL = "reward_model"


@dataclass(frozen=True, kw_only=True)
class ScoredAnswers:
    """Scores of N answers."""

    totals: list[float | None]  # [N], what is to be maximised; None leaves the answer out
    sources: dict[str, list[float | None]]  # rewards [N] by source, unweighted and without penalties
    logged: dict[str, list[float]]  # values that reward functions logged of these answers, by metric


class AnswerScorer:
    """Combines the configured reward sources."""

    def __init__(
        self,
        specs: Sequence[str | RewardFunction],
        weights: Sequence[float] | None,
        missing_eos_penalty: float | None = None,
        missing_eos_score: float | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """timeout: seconds after which one call of a function is given up; None for never."""
        self.specs = list(specs)
        self.weights = list(weights) if weights is not None else [1.0] * len(self.specs)
        self.missing_eos_penalty, self.missing_eos_score = missing_eos_penalty, missing_eos_score
        self.timeout = timeout
        self.trainer_state = TrainerState()
        """Progress of the run, for reward functions; a run that trains keeps it up to date."""
        if self.specs.count(REWARD_MODEL) > 1:
            raise ConfigError(f"reward_funcs: expected {REWARD_MODEL!r} at most once, got {self.specs}")
        self.functions: list[RewardFunction] = [load_reward(spec) for spec in self.specs if spec != REWARD_MODEL]

    @property
    def uses_reward_model(self) -> bool:
        """Whether the learned reward is one of the sources."""
        return REWARD_MODEL in self.specs

    def dry_run(self, prompts: Sequence[Text], columns: Mapping[str, Sequence[Any]]) -> None:
        """Call every function once on two rows, before any time is spent."""
        for function in self.functions:
            check_reward(function, prompts, columns, self.timeout)

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str | list[Any]],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        finished: Sequence[bool],
        reward_model_N: torch.Tensor | None,
    ) -> ScoredAnswers:
        """Scores of N answers, of which the reward role's are given; RewardError for a function that failed."""
        logged = defaultdict[str, list[float]](list)
        log = {"log_metric": lambda name, value: logged[name].append(float(value))}
        context = {"trainer_state": self.trainer_state, **log}
        given: dict[str, list[float | None]] = {}
        if self.functions:
            try:
                given = score_with_functions(
                    self.functions, prompts, completions, completion_ids, columns, self.timeout, context
                )
            except (ValueError, TypeError) as error:  # the user's function returned what it must not
                raise RewardError(str(error)) from error
        by_function = iter(given.items())
        sources: dict[str, list[float | None]] = {}
        for spec in self.specs:
            if spec == REWARD_MODEL:
                if reward_model_N is None:
                    raise ValueError("reward_model_N: expected rewards of the reward role, got None")
                sources[REWARD_MODEL] = list(map(float, reward_model_N.tolist()))
            else:
                name, rewards = next(by_function)
                sources[name if name != REWARD_MODEL else f"{REWARD_MODEL}_function"] = rewards
        try:
            totals = weighted_total(list(sources.values()), self.weights)
        except ValueError as error:
            raise RewardError(f"reward_{error}") from error  # the option is called reward_weights
        totals = [t if done else self._of_unfinished(t) for t, done in zip(totals, finished, strict=True)]
        return ScoredAnswers(totals=totals, sources=sources, logged=dict(logged))

    def _of_unfinished(self, total: float | None) -> float | None:
        """The score of an answer that never ended. One that its sources leave out stays out."""
        if total is None:
            return None
        if self.missing_eos_score is not None:
            return self.missing_eos_score
        return total - (self.missing_eos_penalty or 0.0)


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Mean of the entries that are there."""
    present = [v for v in values if v is not None]
    return math.fsum(present) / len(present) if present else None
