"""Which implementation of an op runs: `auto | cuda | triton | cpu | reference`.

An implementation is a module (or any namespace) that offers the functions its op calls, plus optionally
`unsupported(device_type, dtype) -> str | None`, the reason why it cannot serve such tensors.

`auto` decides once per (op, device type, dtype) and `report` says what it decided. A backend asked for by name never
falls back: if it cannot serve the call, `BackendUnavailableError` says why and names what could.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

BACKENDS = ("cuda", "triton", "cpu", "reference")
_PREFERENCE = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpu", "reference")}
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {}
_AUTO_CHOICE: dict[tuple[str, str, torch.dtype], str] = {}
_default_backend = "auto"


class BackendUnavailableError(ValueError):
    """A backend was asked for by name and cannot serve the call."""


class Lazy:
    """An implementation whose module is imported when it is first called: its imports are heavy or not always there.

    `unsupported` decides without importing it, so a report never loads a compiler.
    """

    def __init__(self, module: str, unsupported: Callable[[str, torch.dtype], str | None]) -> None:
        self._module = module
        self.unsupported = unsupported

    def __getattr__(self, name: str) -> Any:  # only what is not set above comes here
        return getattr(importlib.import_module(self._module), name)


def register(op: str, backend: str, implementation: Any) -> None:
    """Offer `implementation` for `op` under the name `backend`. Called once per op folder at import."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    _IMPLEMENTATIONS.setdefault(op, {})[backend] = implementation
    _AUTO_CHOICE.clear()


def implementation(op: str, backend: str) -> Any:
    """The implementation registered for `op` under an already resolved backend name."""
    return _IMPLEMENTATIONS[op][backend]


def unsupported(op: str, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why `backend` cannot serve `op` on such tensors, or None if it can."""
    found = _IMPLEMENTATIONS[op].get(backend)
    if found is None:
        return f"{op} has no {backend} implementation"
    check = getattr(found, "unsupported", None)
    return check(device_type, dtype) if check else None


def resolve(op: str, backend: str, tensor: torch.Tensor) -> str:
    """Name of the backend that serves `op` for tensors like `tensor` (its device and dtype decide).

    `backend="auto"` follows the process-wide default (`set_default_backend`), which starts as `auto` as well.
    Raises `BackendUnavailableError` if a named backend cannot serve the call, `ValueError` for an unknown name.
    """
    if backend == "auto":
        backend = _default_backend
    device_type, dtype = tensor.device.type, tensor.dtype
    if backend != "auto":
        _check_name(backend)
        reason = unsupported(op, backend, device_type, dtype)
        if reason is not None:
            others = [b for b in _IMPLEMENTATIONS[op] if unsupported(op, b, device_type, dtype) is None]
            raise BackendUnavailableError(f"backend={backend!r} cannot serve {op}: {reason}; available here: {others}")
        return backend
    key = (op, device_type, dtype)
    if key not in _AUTO_CHOICE:
        preference = _PREFERENCE.get(device_type, ("reference",))
        _AUTO_CHOICE[key] = next(b for b in preference if unsupported(op, b, device_type, dtype) is None)
    return _AUTO_CHOICE[key]


def report(device_type: str, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, str]]:
    """For every op: the backend that `auto` picks (`"auto"`) and, per other backend, `"available"` or why it is not."""
    table: dict[str, dict[str, str]] = {}
    for op in sorted(_IMPLEMENTATIONS):
        reasons = {b: unsupported(op, b, device_type, dtype) for b in BACKENDS}
        preference = _PREFERENCE.get(device_type, ("reference",))
        chosen = next(b for b in preference if reasons[b] is None)
        table[op] = {"auto": chosen, **{b: reason or "available" for b, reason in reasons.items()}}
    return table


def default_backend() -> str:
    """The backend that `backend="auto"` stands for in this process."""
    return _default_backend


def set_default_backend(backend: str) -> None:
    """Make `backend="auto"` stand for `backend` from now on, in every op of this process."""
    global _default_backend
    if backend != "auto":
        _check_name(backend)
    _default_backend = backend


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """`set_default_backend` for the length of a `with` block."""
    previous = _default_backend
    set_default_backend(backend)
    try:
        yield
    finally:
        set_default_backend(previous)


def _check_name(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected 'auto' or one of {BACKENDS}, got {backend!r}")
