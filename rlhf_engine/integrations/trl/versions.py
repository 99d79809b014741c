"""Checks of TRL: whether this package supports its version, and whether what it builds on is still as it was there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from rlhf_engine.errors import ConfigError

OLDEST, TOO_NEW = "1.15", "1.18"


def require_trl() -> None:
    """Raise ConfigError unless a version of TRL is installed that this package knows, and nobody else changes it."""
    if "unsloth" in sys.modules:
        raise ConfigError(
            "unsloth: expected it not imported, because it exchanges the same parts of TRL's trainers, got it imported"
        )
    try:
        import trl
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ConfigError("trl: expected it installed (pip install 'rlhf-engine[trl]'), it is not") from error
    if not Version(OLDEST) <= Version(trl.__version__) < Version(TOO_NEW):
        raise ConfigError(f"trl: expected {OLDEST} <= version < {TOO_NEW}, got {trl.__version__}")


def require_parameters(where: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise ConfigError unless a function of TRL begins with these parameters. where: its name, for the message."""
    given = [name for name in inspect.signature(function).parameters if name not in ("self", "ctx")]
    if given[: len(names)] != list(names):
        import trl

        raise ConfigError(f"trl {trl.__version__}: expected {where}({', '.join(names)}, …), got ({', '.join(given)})")
