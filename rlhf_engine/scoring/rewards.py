"""The score of an answer: users' reward functions, the learned reward, or both weighted; then the EOS rule.

    r_i = Σ_k w_k · f_k(prompts, completions, completion_ids, **columns)_i        i: row, k: reward source

* The call is TRL's: `f(prompts, completions, completion_ids, **columns, trainer_state, log_metric, log_extra)` gives
  one number or None per row. On conversations prompts and completions are lists of messages. Functions may be
  `async def`: those run beside each other on one event loop, which lasts as long as the process.
* Functions are tried before any time is spent.
* `None` leaves the function out of the row's sum. A row with None from all sources has the total None. NaN and ±inf are
  errors, because one such value turns every weight of the policy into NaN; the message says which prompt did it.
* Sums and means are taken in float64.
* A learned reward (`reward_model`) is one more column of numbers: `weighted_total` sums it with the others.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import TrainerState

from rlhf_engine.data.types import Text
from rlhf_engine.errors import ConfigError, RewardError
from rlhf_engine.scoring import verifiable
from rlhf_engine.user_code import (
    ERRORS,
    TookTooLong,
    event_loop,
    excerpt,
    failure,
    load_object,
    settings_kept,
    time_limit,
)

RewardFunction = Callable[..., Any]
REWARD_MODEL, ENVIRONMENT = "reward_model", "environment"
_RESERVED = ("prompts", "completions", "completion_ids")
_LARGEST = torch.finfo(torch.float32).max
_EXPECTED = f"reward_model, {', '.join(verifiable.BUILT_IN)}, module:function or path/file.py:function"


def load_reward(spec: str | RewardFunction) -> RewardFunction:
    """The function of a spec: `package.module:function`, `path/to/file.py:function`, one of `verifiable`, or itself."""
    if not isinstance(spec, str):
        return spec
    if spec.partition(",")[0] in verifiable.BUILT_IN:
        return verifiable.make(spec)
    return load_object(spec, "reward_funcs", _EXPECTED)


def reward_name(function: RewardFunction) -> str:
    """Name of a reward function in metrics and messages."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """`reward_name` of each; the second function of a name becomes `name_2`, and so on."""
    names: list[str] = []
    for function in functions:
        base = name = reward_name(function)
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


def score_with_functions(
    functions: Sequence[RewardFunction],
    prompts: Sequence[Text],
    completions: Sequence[str | list[Any]],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]] | None = None,
    timeout: float | None = None,
    context: Mapping[str, Any] | None = None,
) -> dict[str, list[float | None]]:
    """Unweighted rewards of all rows by function's name; ValueError, TypeError or RewardError for a wrong one."""
    if not functions:
        raise ValueError("functions: expected at least one reward function, got none")
    n = len(prompts)
    columns = dict(columns or {})
    for name, values in {"completions": completions, "completion_ids": completion_ids, **columns}.items():
        if len(values) != n:
            raise ValueError(f"{name}: expected {n} entries, one per prompt, got {len(values)}")
    for name in _RESERVED:
        if name in columns:
            raise ValueError(f"columns: {name!r} is taken by the signature of reward functions; rename that column")
    logs = dict.fromkeys(("log_metric", "log_extra"), lambda name, value: None)
    context = {"trainer_state": TrainerState(), **logs, **(context or {})}
    arguments: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {}
    for name, function in zip(unique_names(functions), functions, strict=True):
        # each function gets its own lists and messages, so that one that changes them cannot harm the next
        arguments[name] = {
            "prompts": [p if isinstance(p, str) else [dict(message) for message in p] for p in prompts],
            "completions": [_said(c, to=p) for p, c in zip(prompts, completions, strict=True)],
            "completion_ids": list(completion_ids),
            **{key: list(values) for key, values in columns.items()},
            **context,
        }
        results[name] = _call(name, function, arguments[name], timeout)
    for name, result in results.items():
        if inspect.iscoroutine(result):
            results[name] = asyncio.run_coroutine_threadsafe(result, event_loop())
    for name, result in results.items():
        if isinstance(result, Future):
            result = _call(name, lambda awaited=result, **_: awaited.result(), arguments[name], timeout)
        results[name] = _checked(name, result, prompts)
    return results


def _said(completion: str | list[Any], *, to: Text) -> str | list[Any]:
    """A completion in the form of its prompt."""
    if isinstance(completion, str):
        return completion if isinstance(to, str) else [{"role": "assistant", "content": completion}]
    return [dict(message) for message in completion]


def weighted_total(columns: Sequence[Sequence[float | None]], weights: Sequence[float] | None) -> list[float | None]:
    """Row by row Σ_k w_k · columns[k][i] over the columns that are not None; None where all are. weights: None: 1."""
    if weights is None:
        weights = [1.0] * len(columns)
    if len(weights) != len(columns):
        raise ValueError(f"weights: expected {len(columns)} numbers, one per reward source, got {len(weights)}")
    for weight in weights:
        if not math.isfinite(weight):
            raise ValueError(f"weights: expected finite numbers, got {weight}")
    totals: list[float | None] = []
    for row in zip(*columns, strict=True):
        present = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
        totals.append(math.fsum(present) if present else None)
        if totals[-1] is not None and not abs(totals[-1]) <= _LARGEST:
            raise ValueError(f"weights: expected sums of rewards that are finite in float32, got {totals[-1]:g}")
    return totals


def check_reward(
    function: RewardFunction,
    prompts: Sequence[Text],
    columns: Mapping[str, Sequence[Any]] | None = None,
    timeout: float | None = None,
) -> None:
    """A dry run on two rows, one with an empty answer, so that a broken function is found early."""
    if not prompts:
        raise ValueError("prompts: expected at least one example, got none")
    rows = [0, min(1, len(prompts) - 1)]
    two_columns = {name: [values[i] for i in rows] for name, values in (columns or {}).items()}
    two_prompts = [prompts[i] for i in rows]
    answers, ids = ["This is a short answer.", ""], [[3, 4, 5, 6, 7], [0]]
    score_with_functions([function], two_prompts, answers, ids, two_columns, timeout)


def _call(name: str, function: RewardFunction, arguments: dict[str, Any], timeout: float | None) -> Any:
    try:
        with settings_kept(f"reward function {name!r}"), time_limit(timeout):
            return function(**arguments)
    except TookTooLong as error:
        raise RewardError(f"reward function {name!r} took longer than {timeout:g} seconds") from error
    except ERRORS as error:  # a user's function may raise anything; it is named and passed on
        raise failure(f"reward function {name!r}", error, arguments["prompts"], arguments["completions"]) from error


def _checked(name: str, result: Any, prompts: Sequence[Text]) -> list[float | None]:
    """Rewards that a function returned, as one finite float or None per prompt."""
    place = f"reward function {name!r}"
    if hasattr(result, "tolist"):  # a tensor, an array, a Series
        if getattr(result, "ndim", 1) != 1:
            raise ValueError(f"{place}: expected a tensor of one dimension, got {tuple(result.shape)}")
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise TypeError(f"{place}: expected a list, tuple or tensor, got {type(result).__name__}")
    if len(result) != len(prompts):
        raise ValueError(f"{place}: expected {len(prompts)} rewards, got {len(result)}")
    rewards: list[float | None] = []
    for row, value in enumerate(result):
        if hasattr(value, "tolist"):  # a number of numpy's, or a tensor of one
            value = value.tolist()
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if value is None:
            rewards.append(None)
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{place}: expected numbers or None, got {value!r} {_at(row, prompts)}")
        try:
            number = float(value)
        except OverflowError:  # a huge integer, whose digits nobody would read
            number = math.inf
        if not abs(number) <= _LARGEST:  # also catches NaN
            raise ValueError(f"{place}: expected finite numbers of float32, got {number} {_at(row, prompts)}")
        rewards.append(number)
    return rewards


def _at(row: int, prompts: Sequence[Text]) -> str:
    return f"at row {row} (prompt {excerpt(prompts[row])!r})"


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
        self.uses_reward_model = REWARD_MODEL in self.specs  # the learned reward is one of the sources
        self.weights = list(weights) if weights is not None else [1.0] * len(self.specs)
        self.missing_eos_penalty, self.missing_eos_score = missing_eos_penalty, missing_eos_score
        self.timeout = timeout
        self.trainer_state = TrainerState()
        """Progress of the run, for reward functions; a run that trains keeps it up to date."""
        if self.specs.count(REWARD_MODEL) > 1:
            raise ConfigError(f"reward_funcs: expected {REWARD_MODEL!r} at most once, got {self.specs}")
        self.functions: list[RewardFunction] = [
            load_reward(spec) for spec in self.specs if spec not in (REWARD_MODEL, ENVIRONMENT)
        ]

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
        environment: Sequence[float | None] | None = None,
    ) -> ScoredAnswers:
        """Scores of N answers, of which the reward role's are given; RewardError for a function that failed.

        environment: rewards of environments, where they are a source.
        """
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
            elif spec == ENVIRONMENT:
                if environment is None:
                    raise ConfigError(
                        "reward_funcs: expected an environment with get_reward for 'environment', got none"
                    )
                sources[ENVIRONMENT] = list(environment)
            else:
                name, rewards = next(by_function)
                sources[name if name != REWARD_MODEL else f"{REWARD_MODEL}_function"] = rewards
        try:
            totals = weighted_total(list(sources.values()), self.weights)
        except ValueError as error:
            raise RewardError(f"reward_{error}") from error  # the option is called reward_weights
        for i, (total, done) in enumerate(zip(totals, finished, strict=True)):
            if not done and total is not None:  # an answer that its sources leave out stays out
                penalty = self.missing_eos_penalty or 0.0
                totals[i] = total - penalty if self.missing_eos_score is None else self.missing_eos_score
        return ScoredAnswers(totals=totals, sources=sources, logged=dict(logged))


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Mean of the entries that are there."""
    present = [v for v in values if v is not None]
    return math.fsum(present) / len(present) if present else None
