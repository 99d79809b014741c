"""Code of users that a run calls: reward functions, environments, tools. It may raise, exit, hang or change settings.

Whatever it does is bounded and named; a run's own state stays as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import inspect
import queue
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from rlhf_engine.data.tokenize import text_of
from rlhf_engine.devices import is_gpu
from rlhf_engine.errors import ConfigError, RewardError


def load_object(spec: str, option: str, expected: str) -> Callable[..., Any]:
    """Find what a spec names, `package.module:name` or `path/to/file.py:name`; it can be called."""
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"{option}: expected {expected}, got {spec!r}{_function_of(spec)}")
    module = load_module(place, option, spec)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise ConfigError(f"{option}: {place!r} has no {attribute!r}; it has {functions}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{option}: expected a function at {spec!r}, got a {type(target).__name__}")
    return target  # type: ignore[no-any-return]


def load_module(place: str, option: str, spec: str) -> ModuleType:
    """The module of a file or of a name."""
    return _load_file(Path(place), option, spec) if place.endswith(".py") else _load_module(place, option, spec)


def _function_of(spec: str) -> str:
    """A hint at the last function of a file that was given without one."""
    if not spec.endswith(".py") or not Path(spec).is_file():
        return ""
    names = re.findall(r"^def ([A-Za-z]\w*)", Path(spec).read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return f"; did you mean '{spec}:{names[-1]}'?" if names else ""


def _load_file(path: Path, option: str, spec: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {str(path)!r} (from {spec!r})")
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"_user_{path.stem}_{digest}"  # two files called reward.py must not be one module
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{option}: {str(path)!r} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickling look their module up by name
    try:
        with settings_kept(f"importing {str(path)!r}"):
            module_spec.loader.exec_module(module)
    except ERRORS as error:  # a user's file may raise anything; it is named and passed on
        del sys.modules[name]
        raise failure(f"importing {str(path)!r}", error) from error
    return module


def _load_module(name: str, option: str, spec: str) -> ModuleType:
    try:
        with settings_kept(f"importing {name!r}"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # only if the named module or a parent of it is missing; one that it imports is a failure of its own
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            hint = "for a file write its path with .py"
            raise ConfigError(f"{option}: no module named {error.name!r} (from {spec!r}); {hint}") from error
        raise failure(f"importing {name!r}", error) from error
    except ERRORS as error:  # as for files
        raise failure(f"importing {name!r}", error) from error


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
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
def settings_kept(name: str) -> Iterator[None]:
    """Put the working folder and torch's process-wide settings back after the block, with a warning for the latter.

    A function that loads a model of its own often sets some, which is no reason to stop a run. Random numbers are left
    alone: the run draws none from torch's own generator, and put back it would give a function the same ones each time.
    """
    before = {setting: get() for setting, (get, _) in SETTINGS.items()}
    try:
        with contextlib.chdir("."):
            yield
    finally:
        for setting, (get, put_back) in SETTINGS.items():
            after = get()
            if after != before[setting]:
                put_back(before[setting])
                warnings.warn(
                    f"{name} changed torch's {setting} from {before[setting]} to {after}; it was put back", stacklevel=4
                )


ERRORS = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Errors that a user's code may raise. Of what is left, KeyboardInterrupt stops the run."""


class TookTooLong(BaseException):
    """Raised inside a function whose time is over; no Exception, which the function might handle itself."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TookTooLong` within the block after so many seconds, and again each second until the block ends.

    By a timer's signal, which Python handles in the main thread alone: in another thread, and on Windows, there is no
    limit. Nor is there one for code that never comes back to the interpreter, or that sets the timer itself.
    """
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

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


_OURS = (__file__, str(Path(__file__).parent / "scoring" / "rewards.py"))


def failure(what: str, error: BaseException, prompts: Sequence[Any] = (), answers: Sequence[Any] = ()) -> RewardError:
    """The error of a user's code that raised, with the answer that it had in hand and the lines that led there."""
    try:
        said = str(error)
    except Exception as second:  # by the error's own __str__
        said = f"its text cannot be had, for {type(second).__name__}"
    text = f"{what} raised {type(error).__name__}: {said}"
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename not in _OURS and not frame.f_code.co_filename.startswith("<frozen ")
    ]
    row = _row_in_hand([frame for frame, _ in frames], answers)
    if row is not None:
        text += f", on the answer {excerpt(answers[row])!r} to {excerpt(prompts[row])!r}"
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


def excerpt(text: Any, length: int = 60) -> str:
    """The beginning of a text, or of the last of some messages."""
    text = text_of(text)
    return text if len(text) <= length else text[: length - 1] + "…"


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of async functions, in a thread of its own: clients that they open last from one call to the next."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


class TimedCaller:
    """Makes calls one after another in a thread of its own, as what a thread has opened may be of that thread alone."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._thread: threading.Thread | None = None

    def _begin(self) -> threading.Thread:
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._thread = threading.Thread(target=self._run, args=(self._calls,), daemon=True, name=self._name)
        self._thread.start()
        return self._thread

    @staticmethod
    def _run(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
        while (asked := calls.get()) is not None:
            try:
                asked[0].set_result(asked[1]())
            except BaseException as error:  # whatever it is, it is the caller's to hear of
                asked[0].set_exception(error)
            del asked

    def __call__(self, call: Callable[[], Any], seconds: float) -> Any:
        """Call; TookTooLong after so many seconds, when the call is broken off and later ones get another thread.

        Coroutines are awaited on the loop of async functions. Code that never comes back to the interpreter goes on.
        """
        result: Future[Any] = Future()
        with self._lock:
            thread = self._thread or self._begin()
            self._calls.put((result, call))
            try:
                given = result.result(seconds)
            except TimeoutError as error:
                if result.done():  # one of the call's own
                    raise
                number, late = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TookTooLong)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, late)
                self.close()
                raise TookTooLong from error
        if not inspect.iscoroutine(given):
            return given
        awaited = asyncio.run_coroutine_threadsafe(given, event_loop())
        try:
            return awaited.result(seconds)
        except TimeoutError as error:
            if awaited.done():
                raise
            raise TookTooLong from error
        finally:
            awaited.cancel()

    def close(self) -> None:
        """End the thread after what it was asked for; a later call begins another."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None
