"""One list of faults of a run's parts: what it has written stays whole, and what goes on has the same floats."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rlhf_engine.errors import EngineError
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.rollout import RolloutEngine
from rlhf_engine.runs import checkpoint
from rlhf_engine.runs.metrics import MetricsWriter
from rlhf_engine.runs.progress import StopSignals
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_model

SEED = int(os.environ.get("RELIABILITY_SEED", "0"))
STEPS = 3
Fault = Callable[[list[Any], list[Any], list[Any]], Any]
at_call: dict[int, Fault] = {}
"""Call of the reward function: what it does there, with its rewards, answers and their tokens."""
calls: list[int] = []


def score(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> Any:
    """The reward of every run here."""
    calls.append(1)
    rewards = [float(len(text)) for text in completions]
    return at_call.get(len(calls), lambda rewards, *_: rewards)(rewards, completions, completion_ids)


def raising(error: BaseException) -> Fault:
    def fault(*_: Any) -> Any:
        raise error

    return fault


def doing(what: Callable[[], Any]) -> Fault:
    return lambda rewards, *_: (what(), rewards)[1]


def harm(rewards: list[Any], completions: list[Any], ids: list[Any]) -> list[Any]:
    completions.clear()
    ids[0].append(7)
    return rewards


STOPS: dict[str, Fault] = {  # what a reward does that ends the run
    "a reward too few": lambda r, *_: r[1:], "a reward too many": lambda r, *_: [*r, 1.0], "NaN": lambda r,
    *_: [float("nan"), *r[1:]],
    "infinity": lambda r, *_: [float("inf"), *r[1:]], "too large for float32": lambda r, *_: [1e300, *r[1:]],
    "texts": lambda r, *_: list(map(str, r)),
    "a number": lambda r, *_: 1.0, "nothing": lambda *_: None, "a dict": lambda r, *_: dict(enumerate(r)),
    "lists": lambda r, *_: [[x] for x in r],
    "objects": lambda r, *_: [object()] * len(r), "10 ** 400": lambda r, *_: [10**400, *r[1:]], "complex": lambda r,
    *_: [1j, *r[1:]], **{type(e).__name__: raising(e) for e in (
        ValueError("a\nb"), KeyError("x"), SystemExit(0), GeneratorExit(), StopIteration(), RecursionError(),
        OSError(28, "full"), AssertionError(), UnicodeError(), EOFError(),
    )},
    **{f"{name} within": doing(lambda name=name: os.kill(os.getpid(), getattr(signal, name))) for name in ("SIGTERM",
    "SIGHUP", "SIGUSR1", "SIGINT")},
}  # fmt: skip
GOES_ON: dict[str, Fault] = {  # what a reward does that changes nothing
    "harms what it is given": harm, "another folder": doing(lambda: os.chdir("/")),
    "another dtype": doing(lambda: torch.set_default_dtype(torch.float64)),
    "seeds": doing(lambda: (torch.manual_seed(9), random.seed(9))), "threads": doing(lambda: torch.set_num_threads(2)),
    "no gradients": doing(lambda: torch.set_grad_enabled(False)),
    "another environment": doing(lambda: os.environ.update(RANK="3")), "is slow": doing(lambda: time.sleep(0.3)),
    "warns": doing(lambda: warnings.warn("x", stacklevel=1)),
}  # fmt: skip


class Part(NamedTuple):
    """A function of the engine or of Python, which fails at one of its calls."""

    owner: Any
    name: str
    error: Callable[[], BaseException]


NUMBERS = ("ENOSPC", "EIO", "EMFILE", "EDQUOT", "EROFS")
PARTS = [
    *(Part(owner, name, lambda n=n: OSError(getattr(errno, n), os.strerror(getattr(errno, n)))) for owner, name in (
        (os, "replace"), (os, "fsync"), (os, "mkdir"), (checkpoint, "write_manifest"), (checkpoint, "save_file"),
        (MetricsWriter, "write"), (shutil, "rmtree"),
    ) for n in NUMBERS),
    *(Part(owner, name, lambda e=e: e("out of memory")) for owner, name in (
        (Backbone, "run"), (RoleOptimizer, "step"), (RolloutEngine, "step"), (checkpoint, "save_file"),
        (RlTrainer, "save"),
    ) for e in (torch.OutOfMemoryError, MemoryError, RuntimeError)),
]  # fmt: skip


class Broken:
    """The part, whose n-th call fails; 0: none."""

    def __init__(self, part: Part, n: int) -> None:
        self.part, self.n, self.calls, self.whole = part, n, 0, getattr(part.owner, part.name)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        def function(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.n:
                raise self.part.error()
            return self.whole(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.part.owner, self.part.name, function)
            yield
        assert self.calls >= self.n, "the fault was not met"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m"))


def state(trainer: RlTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def run(model: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after a run that writes a checkpoint of every step."""
    calls.clear()
    config = train_config(model, folder / "run", reward_funcs=[score], save_steps=1, max_steps=STEPS, **options)
    trainer = RlTrainer(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with StopSignals() as signals:
            trainer.run(stop=signals.asked)
    return state(trainer)


def outcome(model: Path, folder: Path, expected: dict[str, torch.Tensor], *, ends: bool | None) -> str | None:
    """What is wrong with a run that meets a fault, and with the run that goes on from it; None where nothing is.

    ends: whether the fault has to end the run; None: either will do, as a part may be done again.
    """
    ended: BaseException | None = None
    found: dict[str, torch.Tensor] = {}
    try:
        found = run(model, folder)
    except (EngineError, OSError, MemoryError, RuntimeError) as error:
        ended = error
        if "\n" in str(error) and not isinstance(error, EngineError):
            return f"told in several lines: {error}"
    at_call.clear()
    if ends is not None and ends != (ended is not None):
        return f"ended by {ended!r}"
    found = run(model, folder, resume_from_checkpoint="auto") if ended is not None else found
    close = ended is None and ends is None  # smaller passes, done again, round otherwise
    bounds = (1e-3, 1e-5) if close else (0.0, 0.0)
    wrong = [name for name, x in expected.items() if not torch.allclose(x, found[name], *bounds)]
    return f"after {ended!r} other floats in {wrong[:3]}" if wrong else None


@contextlib.contextmanager
def backwards() -> Iterator[None]:
    days = itertools.count(4 * 10**9, -86_400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(days)))
        yield


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_that_meets_a_fault_goes_on_to_the_same_floats(model, tmp_path, survived, every):
    print(f"RELIABILITY_SEED={SEED}")
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it
    rng = random.Random(SEED)
    expected = run(model, tmp_path / "whole")
    plans: list[tuple[str, Fault | Part | None, bool | None]] = [
        *((f"a reward: {name}", fault, True) for name, fault in STOPS.items()),
        *((f"a reward: {name}", fault, False) for name, fault in GOES_ON.items()),
        *((f"{part.owner.__name__}.{part.name}: {part.error()!r}", part, None) for part in PARTS),
        ("a clock that goes back a day at each look", None, False),
    ]
    plans, failures = plans[::-every], []
    for i, (name, fault, ends) in enumerate(plans):
        before, dtype, threads, here = dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(), Path.cwd()
        met: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if fault is None:
            met = backwards()
        elif isinstance(fault, Part):
            counted = Broken(fault, 0)
            with counted.in_place():
                run(model, tmp_path / f"count{i}")
            n = rng.randint(1, counted.calls)
            name, met = f"{name}, call {n} of {counted.calls}", Broken(fault, n).in_place()
        else:
            at_call[4] = fault
        with met:
            wrong = outcome(model, tmp_path / str(i), expected, ends=ends)
        os.environ.clear()
        os.environ.update(before)
        if (torch.get_default_dtype(), torch.get_num_threads(), Path.cwd()) != (dtype, threads, here):
            wrong = "settings stay changed"
        failures += [f"{name}: {wrong}"] if wrong else []
    signal.signal(signal.SIGHUP, hangup)
    print("\n".join(failures))
    survived("faults", len(plans), len(failures))
    assert every > 1 or len(plans) >= 70
