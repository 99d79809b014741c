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
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import re
import signal
import sys
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from transformers import TrainerState

from rlhf_engine.data.tokenize import text_of
from rlhf_engine.data.types import Text
from rlhf_engine.devices import is_gpu
from rlhf_engine.errors import ConfigError, RewardError
from rlhf_engine.scoring import verifiable

RewardFunction = Callable[..., Any]
REWARD_MODEL = "reward_model"
_RESERVED = ("prompts", "completions", "completion_ids")
_LARGEST = torch.finfo(torch.float32).max
_EXPECTED = f"reward_model, {', '.join(verifiable.BUILT_IN)}, module:function or path/file.py:function"


def load_reward(spec: str | RewardFunction) -> RewardFunction:
    """The function of a spec: `package.module:function`, `path/to/file.py:function`, one of `verifiable`, or itself."""
    if not isinstance(spec, str):
        return spec
    if spec.partition(",")[0] in verifiable.BUILT_IN:
        return verifiable.make(spec)
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"reward_funcs: expected {_EXPECTED}, got {spec!r}{_function_of(spec)}")
    module = _load_file(Path(place), spec) if place.endswith(".py") else _load_module(place, spec)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise ConfigError(f"reward_funcs: {place!r} has no {attribute!r}; it has {functions}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"reward_funcs: expected a function at {spec!r}, got a {type(target).__name__}")
    return target


def _function_of(spec: str) -> str:
    """A hint at the last function of a file that was given without one."""
    if not spec.endswith(".py") or not Path(spec).is_file():
        return ""
    names = re.findall(r"^def ([A-Za-z]\w*)", Path(spec).read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return f"; did you mean '{spec}:{names[-1]}'?" if names else ""


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
            results[name] = asyncio.run_coroutine_threadsafe(result, _event_loop())
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


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of async functions, in a thread of its own: clients that they open last from one call to the next."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


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


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward_funcs: there is no file {str(path)!r} (from {spec!r})")
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"_reward_{path.stem}_{digest}"  # two files called reward.py must not be one module
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"reward_funcs: {str(path)!r} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickling look their module up by name
    try:
        with _settings_kept(f"importing {str(path)!r}"):
            module_spec.loader.exec_module(module)
    except _OF_USERS_CODE as error:  # a user's file may raise anything; it is named and passed on
        del sys.modules[name]
        raise _failure(f"importing {str(path)!r}", error) from error
    return module


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        with _settings_kept(f"importing {name!r}"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # only if the named module or a parent of it is missing; one that it imports is a failure of its own
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            hint = "for a file write its path with .py"
            raise ConfigError(f"reward_funcs: no module named {error.name!r} (from {spec!r}); {hint}") from error
        raise _failure(f"importing {name!r}", error) from error
    except _OF_USERS_CODE as error:  # as for files
        raise _failure(f"importing {name!r}", error) from error


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(device if is_gpu(device) else None),
    ),
    "autocast on the CPU": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on the GPU": (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}
"""Settings of torch that belong to the run: name → (getter, setter)."""


@contextlib.contextmanager
def _settings_kept(name: str) -> Iterator[None]:
    """Put the working folder and torch's process-wide settings back after the block, with a warning for the latter.

    A function that loads a model of its own often sets some, which is no reason to stop a run. Random numbers are left
    alone: the run draws none from torch's own generator, and put back it would give a function the same ones each time.
    """
    before = {setting: get() for setting, (get, _) in _SETTINGS.items()}
    try:
        with contextlib.chdir("."):
            yield
    finally:
        for setting, (get, put_back) in _SETTINGS.items():
            after = get()
            if after != before[setting]:
                put_back(before[setting])
                warnings.warn(
                    f"{name} changed torch's {setting} from {before[setting]} to {after}; it was put back", stacklevel=4
                )


_OF_USERS_CODE = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Errors that a user's code may raise. Of what is left, KeyboardInterrupt stops the run."""


class _TookTooLong(BaseException):
    """Raised inside a function whose time is over; no Exception, which the function might handle itself."""


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `_TookTooLong` within the block after so many seconds, and again each second until the block ends.

    By a timer's signal, which Python handles in the main thread alone: in another thread, and on Windows, there is no
    limit. Nor is there one for code that never comes back to the interpreter, or that sets the timer itself.
    """
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # it may have gone off right here
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _call(name: str, function: RewardFunction, arguments: dict[str, Any], timeout: float | None) -> Any:
    try:
        with _settings_kept(f"reward function {name!r}"), _time_limit(timeout):
            return function(**arguments)
    except _TookTooLong as error:
        raise RewardError(f"reward function {name!r} took longer than {timeout:g} seconds") from error
    except _OF_USERS_CODE as error:  # a user's function may raise anything; it is named and passed on
        raise _failure(f"reward function {name!r}", error, arguments["prompts"], arguments["completions"]) from error


def _failure(what: str, error: BaseException, prompts: Sequence[Any] = (), answers: Sequence[Any] = ()) -> RewardError:
    """The error of a user's code that raised, with the answer that it had in hand and the lines that led there."""
    try:
        said = str(error)
    except Exception as second:  # by the error's own __str__
        said = f"its text cannot be had, for {type(second).__name__}"
    text = f"{what} raised {type(error).__name__}: {said}"
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename != __file__ and not frame.f_code.co_filename.startswith("<frozen ")
    ]
    row = _row_in_hand([frame for frame, _ in frames], answers)
    if row is not None:
        text += f", on the answer {_excerpt(answers[row])!r} to {_excerpt(prompts[row])!r}"
    lines = traceback.StackSummary.extract(iter(frames)).format()
    if isinstance(error, SyntaxError):  # of a file that is imported: its line is in the error alone
        lines += traceback.format_exception_only(error)[:-1]
    return RewardError(text, "".join(lines).rstrip())


def _row_in_hand(frames: Sequence[FrameType], answers: Sequence[Any]) -> int | None:
    """Row of the answer that a variable held where the code failed, the innermost function first; None: no variable."""
    rows = {id(part): row for row, answer in enumerate(answers) for part in (answer, text_of(answer))}
    for frame in reversed(frames):
        held = [rows[id(value)] for value in frame.f_locals.values() if id(value) in rows]
        if held:
            return held[-1]
    return None


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
    return f"at row {row} (prompt {_excerpt(prompts[row])!r})"


def _excerpt(text: Any, length: int = 60) -> str:
    text = text_of(text)
    return text if len(text) <= length else text[: length - 1] + "…"


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
        self.functions: list[RewardFunction] = [load_reward(spec) for spec in self.specs if spec != REWARD_MODEL]

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
        for i, (total, done) in enumerate(zip(totals, finished, strict=True)):
            if not done and total is not None:  # an answer that its sources leave out stays out
                penalty = self.missing_eos_penalty or 0.0
                totals[i] = total - penalty if self.missing_eos_score is None else self.missing_eos_score
        return ScoredAnswers(totals=totals, sources=sources, logged=dict(logged))


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Mean of the entries that are there."""
    present = [v for v in values if v is not None]
    return math.fsum(present) / len(present) if present else None
