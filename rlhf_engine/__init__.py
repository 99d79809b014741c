"""rlhf-engine: RLHF on one frozen backbone. Actor, critic, reference and reward are adapter slots and heads on it.

The names of the Python guide are here, too: `from rlhf_engine import HydraModel`. Each is imported when it is first
used, so that `import rlhf_engine` imports no torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
"""Name → the module that lends it to the package, as the file for type checkers says."""
_NOT_INSTALLED = "0.0+unknown"
"""Version of a checkout that is imported without being installed: git's tags are read when the package is built."""

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_nearest(name)}")
    globals()[name] = value  # the next use costs nothing
    return value


def __dir__() -> list[str]:
    return list(__all__)


def _version() -> str:
    """Version in the metadata of the installed package."""
    import importlib.metadata  # takes as long as everything else that `rlhf-engine --help` does

    try:
        return importlib.metadata.version("rlhf-engine")
    except importlib.metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def _nearest(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
