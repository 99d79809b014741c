"""Errors that a user can do something about. Each message names the argument, what was expected, what came.

`EngineError` is what they share, so that the command line can print any of them in one line, not a traceback.
(`BackendUnavailableError` belongs to `rlhf_kernels`, which knows nothing of this package.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class EngineError(Exception):
    """Base of this package's own errors."""


class ConfigError(EngineError, ValueError):
    """An option, a config file or a path given by the user cannot be served."""


class UnsupportedModelError(ConfigError):
    """A model that the engine would get wrong; it is refused when it is loaded."""


class CorruptCheckpointError(ConfigError):
    """A checkpoint or a model's folder is not what was written: a file was changed, cut short, lost or added."""


class CheckpointWriteError(EngineError, OSError):
    """A file of a run could not be written (a full disk, an I/O error); checkpoints written before are whole."""


class RunStopped(EngineError):
    """A run was asked to stop; it has written a checkpoint of its last whole step, from which it goes on."""


class RewardError(EngineError, RuntimeError):
    """A user's reward function raised, at lines `trace` of its code; the original error is the `__cause__`."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class NonFiniteError(EngineError, ArithmeticError):
    """A loss, gradient or log-prob is NaN or infinite; nothing of the step that made it was applied."""


class MismatchError(EngineError, ArithmeticError):
    """Two computations that must agree at equal weights do not: rollout and training, or actor and reference."""


class RolloutServerError(EngineError, RuntimeError):
    """A rollout server does not answer, refuses, or answers what rollouts cannot be made of."""


class GeneratorError(EngineError, RuntimeError):
    """No generator is left that could draw answers; what ended the last one is the `__cause__`."""


class RankError(EngineError, RuntimeError):
    """Another process of the run could not go on; its message says which one and why, where that is known."""


class MemoryLimitError(EngineError, MemoryError):
    """Work that cannot be split any further does not fit into memory; nothing of its step was applied."""


class BusyError(EngineError, RuntimeError):
    """Nothing more may wait now; the same request may be served later."""


class PolicyRemovedError(EngineError, LookupError):
    """A policy was removed while a request or a step of it waited."""


class GradientsLostError(EngineError, RuntimeError):
    """A backward pass broke off, and gradients that waited for a step are gone."""


def notes(error: BaseException) -> list[str]:
    """Lines that were added to an error by `add_note`."""
    return list(getattr(error, "__notes__", []))


@contextlib.contextmanager
def as_request_errors() -> Iterator[None]:
    """While a request is checked and its model is built, such an error is about the request."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, RewardError) as error:
        raise ConfigError(str(error)) from error
