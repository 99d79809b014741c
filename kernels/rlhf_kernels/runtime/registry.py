"""Choice of the implementation of an op: `auto | cuda | triton | cpu | reference`.

An implementation is a module (or any namespace) that offers the functions its op calls. It may also offer
`unsupported(device_type, dtype) -> str | None`, the reason why it cannot serve such tensors.

`auto` decides by op, device type and dtype, on a CPU also by instruction set and weight shape; never by the number of
rows or by a measurement of the moment. In this order:

    1. in exact mode (`begin_run(exact=True)`, `use_exact`) the first of `cuda`, `triton` on a GPU, and `cpu` on a CPU,
       that serves: its rows depend on nothing else
    2. on a CPU the choice of the checkpoint that a run resumed from (`begin_run`)
    3. on a CPU the kernel table, made by the benchmark (`kernel_table`)
    4. the same as in exact mode, less the backends that are taken only `when_measured`: torch has an op of its own
    5. `reference`

A backend that is registered `by_name` is none of these; `use_op_backend` names one for its op alone. On a GPU, where
there is no table, only a backend that a GPU has run may be registered otherwise: tests/test_gpu_defaults.py names the
record of each.

The table is the one in the package. One that `RLHF_ENGINE_KERNEL_TABLE` or `use_table` names goes before it, for every
op and dtype of which it has an entry. `report` says what `auto` decides and why. A backend asked for by name never
falls back: if it cannot serve the call, `BackendUnavailableError` says why and names what could.

What was asked for and what was chosen is in `Settings`: the process's, or those that a thread has entered (`used`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.kernel_table import (
    COMMITTED,
    ENVIRONMENT_VARIABLE,
    Entry,
    KernelTable,
    KernelTableError,
    Shape,
    read,
)

BACKENDS = ("cuda", "triton", "cpu", "reference")
_PREFERENCE = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpu", "reference")}
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {}
_WHEN_MEASURED: set[tuple[str, str]] = set()
"""(op, backend) that `auto` takes only where the table says so, and in exact mode."""
_BY_NAME: set[tuple[str, str]] = set()
"""(op, backend) that `auto` never takes."""


class BackendUnavailableError(ValueError):
    """Error of a call that its backend, named by an argument, a default or a run's checkpoint, cannot serve."""


class Choice(NamedTuple):
    """Decision of `auto` on a CPU."""

    op: str
    """name of the op"""
    dtype: str
    """name of the dtype without `torch.`"""
    shape: Shape
    """sizes for which `resolve` was called; None where the op has none"""
    backend: str
    """name of the backend"""


class Lazy:
    """Implementation whose module is imported when it is first called: its imports are heavy or not always there.

    `unsupported` decides without importing it, so a report never loads a compiler. Its functions run with the CUDA
    device of their first tensor as the current one: Triton launches on that, wherever the tensors lie.

    Args:
        module: name of the module.
        unsupported: function of device type and dtype; reason why the module cannot serve such tensors, or None.
    """

    def __init__(self, module: str, unsupported: Callable[[str, torch.dtype], str | None]) -> None:
        self._module = module
        self.unsupported = unsupported

    def __getattr__(self, name: str) -> Any:  # only what is not set above comes here
        attribute = getattr(importlib.import_module(self._module), name)
        return _on_its_device(attribute) if inspect.isfunction(attribute) else attribute


@functools.cache
def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        device = cuda_device(args)
        if device is None or device.index == torch.cuda.current_device():
            return function(*args, **named)
        with torch.cuda.device(device):
            return function(*args, **named)

    return call


def cuda_device(args: Iterable[Any]) -> torch.device | None:
    """CUDA device of the first tensor among arguments and lists of tensors.

    Args:
        args: arguments of a call.

    Returns:
        The device; None if the first tensor is elsewhere, or if there is no tensor.
    """
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device if arg.is_cuda else None
        if isinstance(arg, (list, tuple)) and len(arg) > 0 and isinstance(arg[0], torch.Tensor):
            return arg[0].device if arg[0].is_cuda else None
    return None


def is_gpu(device: torch.device | str) -> bool:
    """Whether a device, or a type of device, is another than the CPU: the host waits for what it reads from there.

    CUDA's own calls are no matter of this: a place that makes them looks for CUDA itself.

    Args:
        device: the device, or its type.
    """
    return (device if isinstance(device, str) else device.type) != "cpu"


def register(op: str, backend: str, implementation: Any, *, when_measured: bool = False, by_name: bool = False) -> None:
    """Offer an implementation of an op under the name of a backend; an op's folder does so once, at import.

    Args:
        op: name of the op.
        backend: one of `BACKENDS`.
        implementation: module, or any namespace, with the functions that the op calls.
        when_measured: True: `auto` takes it only where the kernel table names it, and in exact mode.
        by_name: True: `auto` never takes it: another was measured to be faster, or no GPU has run it.

    Raises:
        ValueError: backend is unknown.
    """
    global _generation
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    _IMPLEMENTATIONS.setdefault(op, {})[backend] = implementation
    if when_measured:
        _WHEN_MEASURED.add((op, backend))
    if by_name:
        _BY_NAME.add((op, backend))
    _generation += 1


def implementation(op: str, backend: str) -> Any:
    """Look up an implementation.

    Args:
        op: name of a registered op.
        backend: name of a backend that `resolve` returned, never "auto".

    Returns:
        What `register` was given.

    Raises:
        KeyError: op is unknown.
        ValueError: the op has no such backend.
    """
    module = _IMPLEMENTATIONS[op].get(backend)
    if module is None:
        raise ValueError(f"backend: expected one of {list(_IMPLEMENTATIONS[op])}, got {backend!r}")
    return module


def kernels(op: str, backend: str) -> Any:
    """Look up an implementation with a forward and a backward pass of its own, for a registered op of torch.

    Args:
        op: name of a registered op.
        backend: name of a backend that `resolve` returned, never "auto".

    Returns:
        What `register` was given.

    Raises:
        KeyError: op is unknown.
        ValueError: the op has no such backend, or it is the reference, which autograd differentiates outside of an op.
    """
    if backend == "reference":
        raise ValueError(
            "backend: expected one that has kernels, got 'reference', which is plain torch outside of this op"
        )
    return implementation(op, backend)


def ops() -> tuple[str, ...]:
    """Names of all registered ops, sorted."""
    return tuple(sorted(_IMPLEMENTATIONS))


def unsupported(op: str, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why a backend cannot serve an op.

    Args:
        op: name of a registered op.
        backend: name of a backend, never "auto".
        device_type: type of the tensors' device, such as "cpu" or "cuda".
        dtype: dtype of the tensors.

    Returns:
        The reason; None if the backend can serve.

    Raises:
        KeyError: op is unknown.
    """
    module = _IMPLEMENTATIONS[op].get(backend)
    if module is None:
        return f"{op} has no {backend} implementation"
    check = getattr(module, "unsupported", None)
    return check(device_type, dtype) if check else None


def resolve(op: str, backend: str, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> str:
    """Name of the backend that serves an op for tensors like a given one.

    Args:
        op: name of a registered op.
        backend: a name, or "auto", which stands for what was asked for (`asked`).
        tensor: its device and dtype decide.
        shape: sizes of the op's weight; without a weight (size of a head,) or (size of the vocabulary,), see
            `kernel_table`. None: the op has neither.

    Returns:
        One of `BACKENDS`.

    Raises:
        KeyError: op is unknown.
        BackendUnavailableError: the named backend, or the one of the run's checkpoint, cannot serve the call.
        ValueError: backend is unknown.
    """
    return resolve_for(op, backend, tensor.device.type, tensor.dtype, shape)


def resolve_for(op: str, backend: str, device_type: str, dtype: torch.dtype, shape: Sequence[int] | None = None) -> str:
    """Name of the backend that serves an op, as `resolve` without a tensor.

    Args:
        op: name of a registered op.
        backend: a name, or "auto", which stands for what was asked for (`asked`).
        device_type: type of the tensors' device, such as "cpu" or "cuda".
        dtype: dtype of the tensors.
        shape: as in `resolve`.

    Returns:
        One of `BACKENDS`.

    Raises:
        KeyError: op is unknown.
        BackendUnavailableError: the named backend, or the one of the run's checkpoint, cannot serve the call.
        ValueError: backend is unknown.
    """
    if backend == "auto":
        backend = asked(op)
    if backend == "auto":
        # under torch.compile a size may be a symbol, of which `index` makes a number
        sizes = None if shape is None else tuple(operator.index(n) for n in shape)
        return _auto(op, device_type, dtype, sizes, native.isa(), _thread.settings.exact)
    _check_name(backend)
    _require(op, backend, device_type, dtype, f"backend={backend!r}")
    return backend


def _require(op: str, backend: str, device_type: str, dtype: torch.dtype, asked: str) -> None:
    reason = unsupported(op, backend, device_type, dtype)
    if reason is not None:
        others = [b for b in _IMPLEMENTATIONS[op] if unsupported(op, b, device_type, dtype) is None]
        raise BackendUnavailableError(f"{asked} cannot serve {op}: {reason}; available here: {others}")


# ---- settings --------------------------------------------------------------------------------------------------------

_Named = dict[tuple[str, str, Shape], str]
"""Backends by op, dtype and shape."""


@dataclass(eq=False)
class Settings:
    """Settings of the kernels that run: of a base, of a run, or of the process."""

    backend: str = "auto"
    """Name that `backend="auto"` stands for; "auto" lets the registry decide."""
    exact: bool = False
    """Whether exact mode is on, see `is_exact`."""
    of_op: Mapping[str, str] = field(default_factory=dict)
    """Backends of single ops, which go before `backend`, and ways through their kernels."""
    held: _Named = field(default_factory=dict, init=False)
    """Choices of the checkpoint that the run resumed from."""
    decided: _Named = field(default_factory=dict, init=False)
    """Choices of `auto` on a CPU so far, those of the checkpoint among them."""
    chosen: dict[tuple[Any, ...], str] = field(default_factory=dict, init=False)
    """What `auto` has found, by all that it depends on."""

    def __post_init__(self) -> None:
        _check_name(self.backend)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return "PROCESS" if self is PROCESS else super().__reduce_ex__(protocol)  # by name: a copy's are no others

    def anew(self) -> Settings:
        """The same settings without choices, for a run."""
        return Settings(self.backend, self.exact, self.of_op)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let this thread use the settings within a `with` block, less what the `use_*` blocks around it change."""
        before = _thread.own
        _thread.enter(self, _thread.changes)
        try:
            yield
        finally:
            _thread.enter(before, _thread.changes)


def _check_name(backend: str) -> None:
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend: expected 'auto' or one of {BACKENDS}, got {backend!r}")


class _Thread(threading.local):
    """The settings that a thread uses."""

    def __init__(self) -> None:  # of an attribute of the class torch.compile would see no change
        self.enter(PROCESS, {})

    def enter(self, own: Settings, changes: Mapping[str, Any]) -> None:
        """own: those of the innermost `used` block. changes: attributes with the values of the `use_*` blocks."""
        self.own, self.settings, self.changes = own, own, changes
        if changes:
            self.settings = object.__new__(Settings)  # whose choices go into the same dicts
            vars(self.settings).update({**vars(own), **changes, "of_op": {**own.of_op, **changes["of_op"]}})


PROCESS = Settings()
"""Settings of a thread outside of every `used` block, and of bases that were loaded there."""
_thread = _Thread()


def current() -> Settings:
    """Settings of the innermost `used` block that this thread is in, those of the process outside of any."""
    return _thread.own


def effective() -> Settings:
    """Settings that this thread uses now: the current ones, with what `use_*` blocks change."""
    return _thread.settings


@contextlib.contextmanager
def _use(of_op: Mapping[str, str] | None = None, **changes: Any) -> Iterator[None]:
    own, before = _thread.own, _thread.changes
    _thread.enter(own, {**before, **changes, "of_op": {**before.get("of_op", {}), **(of_op or {})}})
    try:
        yield
    finally:
        _thread.enter(own, before)  # anew: the settings themselves may have changed within the block


# ---- what `auto` decides ---------------------------------------------------------------------------------------------

_lock = threading.RLock()
"""Held while a choice is made, and while what choices depend on changes."""
_generation = 0
"""How often the ops or the table have changed."""


class _Decision(NamedTuple):
    backend: str
    why: str


@torch.compiler.assume_constant_result
def _auto(op: str, device_type: str, dtype: torch.dtype, shape: Shape, isa: str | None, exact: bool) -> str:
    """isa, exact: of now, named so that others are decided for anew."""
    settings = _thread.settings
    key = (op, device_type, dtype, shape, isa, exact, _generation)
    backend = settings.chosen.get(key)
    if backend is None:
        with _lock:
            backend = settings.chosen[key] = _decide(op, device_type, dtype, shape).backend
            if not is_gpu(device_type):
                settings.decided[op, _name(dtype), shape] = backend
    return backend


def _decide(op: str, device_type: str, dtype: torch.dtype, shape: Shape) -> _Decision:
    exact = _thread.settings.exact
    held = None if is_gpu(device_type) or exact else _thread.settings.held.get((op, _name(dtype), shape))
    if held is not None:
        _require(op, held, device_type, dtype, f"{held!r}, the choice of the run's checkpoint,")
        return _Decision(held, "as in the run's checkpoint")
    preference = [b for b in _PREFERENCE.get(device_type, ("reference",)) if (op, b) not in _BY_NAME]
    reasons = {b: unsupported(op, b, device_type, dtype) for b in preference}
    served = [b for b, reason in reasons.items() if reason is None]
    if len(served) == 1:
        others = "; ".join(reason for reason in reasons.values() if reason)
        return _Decision(served[0], f"the only one that serves: {others}" if others else "the only one there is")
    if exact:
        return _Decision(served[0], "exact mode: its rows depend on nothing else")
    first = next(b for b in served if (op, b) not in _WHEN_MEASURED)
    if is_gpu(device_type):
        return _Decision(first, "the first that serves" if first == served[0] else f"{served[0]} is for exact mode")
    entry = table().find(op, native.isa(), _name(dtype), shape)
    if entry is not None:
        return _Decision(entry.backend, f"by the table: {_measured(entry)}")
    return _Decision(first, f"the first that serves; the table has nothing for {native.isa()}")


def _measured(entry: Entry) -> str:
    at = "" if entry.shape is None else f" at {'x'.join(map(str, entry.shape))}"
    return f"{entry.backend} {entry.ratio:.2f} x as fast{at}"


def begin_run(choices: Iterable[Choice] = (), *, exact: bool = False) -> None:
    """Forget what `auto` has decided by the settings in use, and hold the choices of a checkpoint from now on.

    Args:
        choices: those of the checkpoint that a run resumes from; ops that exist no longer are passed over.
        exact: whether the run is in exact mode, see `is_exact`.

    Raises:
        BackendUnavailableError: a choice cannot serve here while no default backend is set. Nothing has changed.
        ValueError: the backend of a choice is unknown while no default backend is set. Nothing has changed.
    """
    held = {(c.op, c.dtype, c.shape): c.backend for c in choices if c.op in _IMPLEMENTATIONS}  # others are gone
    for (op, dtype, _), backend in held.items() if _thread.settings.backend == "auto" else ():
        _check_name(backend)
        _require(op, backend, "cpu", getattr(torch, dtype), f"{backend!r}, the choice of the run's checkpoint,")
    own = _thread.own
    with _lock:
        own.exact = exact
        for kept in (own.held, own.decided):
            kept.clear()
            kept.update(held)
        own.chosen.clear()
    _thread.enter(own, _thread.changes)


def is_exact() -> bool:
    """Whether exact mode is on: a row's bits depend on nothing but the row, in rollouts and in training.

    Then `auto` takes the C++ ops on a CPU, whatever the kernel table says. On a GPU it takes Triton's also where torch
    has an op of its own.
    """
    return _thread.settings.exact


def use_exact(exact: bool = True) -> contextlib.AbstractContextManager[None]:
    """Switch exact mode on, or off, within a `with` block of this thread; what it was comes back at its end.

    Args:
        exact: whether it is on.

    Returns:
        A context manager, for a `with` block.
    """
    return _use(exact=exact)


def take_over(choices: Iterable[Choice]) -> None:
    """Add to this run's choices, for its checkpoints, those that `auto` made in another process of the run.

    Args:
        choices: those of the other process; where this one has a choice of its own, that one stays.
    """
    with _lock:
        for c in choices:
            _thread.settings.decided.setdefault((c.op, c.dtype, c.shape), c.backend)


def choices() -> list[Choice]:
    """Choices of `auto` on the CPU since `begin_run`, for a checkpoint; sorted by op, dtype and shape."""
    made = [Choice(*key, backend) for key, backend in list(_thread.settings.decided.items())]
    return sorted(made, key=lambda c: (c.op, c.dtype, c.shape or ()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the table -------------------------------------------------------------------------------------------------------

_named_table = os.environ.get(ENVIRONMENT_VARIABLE)
_table: KernelTable | None = None


def _require_file(argument: str, path: str | os.PathLike[str]) -> Path:
    if not Path(path).is_file():
        raise ValueError(f"{argument}: expected the path of a kernel table, got {str(path)!r}, which is no file")
    return Path(path)


if _named_table:
    _require_file(ENVIRONMENT_VARIABLE, _named_table)


def table() -> KernelTable:
    """Kernel table in use. One that was named and cannot be read is ignored with a warning of one line."""
    global _table
    if _table is None:
        _table = _named(ENVIRONMENT_VARIABLE, Path(_named_table)) if _named_table else _committed()
    return _table


def _named(argument: str, path: Path) -> KernelTable:
    try:
        read_table = read(path, ops(), isa=native.isa())
    except KernelTableError as error:
        warnings.warn(f"{argument}: {path} is ignored: {error}", stacklevel=3)
        return _committed()
    known = {(e.op, e.isa, e.dtype) for e in read_table.entries}
    others = tuple(e for e in _committed().entries if (e.op, e.isa, e.dtype) not in known)
    return replace(read_table, entries=read_table.entries + others)


def _committed() -> KernelTable:
    try:
        read_table = read(COMMITTED, ops())
    except KernelTableError as error:
        warnings.warn(f"kernel table: {COMMITTED} is ignored: {error}", stacklevel=4)
        return KernelTable(source="none", entries=())
    return replace(read_table, source="the package's own")


@contextlib.contextmanager
def use_table(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let `auto` decide by the table in a file within a `with` block; as RLHF_ENGINE_KERNEL_TABLE does for a process.

    Args:
        path: the file. One that cannot be read as a table is ignored with a warning.

    Returns:
        A context manager, for a `with` block.

    Raises:
        ValueError: there is no such file.
    """
    global _table, _generation
    previous, named = table(), _named("path", _require_file("path", path))
    with _lock:
        _table = named
        _generation += 1
    try:
        yield
    finally:
        with _lock:
            _table = previous
            _generation += 1


# ---- reports and the default -----------------------------------------------------------------------------------------


def report(device_type: str, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, str]]:
    """Report of the backend that runs for every op.

    Args:
        device_type: type of the tensors' device, such as "cpu" or "cuda".
        dtype: dtype of the tensors.

    Returns:
        Per op: the backend that `auto` picks (`"auto"`; two names where the shape decides), the reason (`"why"`), and
            per backend `"available"` or why it is not.
    """
    by_op: dict[str, dict[str, str]] = {}
    for op in ops():
        reasons = {b: unsupported(op, b, device_type, dtype) for b in BACKENDS}
        chosen = _report_choice(op, device_type, dtype, reasons)
        by_op[op] = {
            "auto": chosen.backend,
            "why": chosen.why,
            **{b: reason or "available" for b, reason in reasons.items()},
        }
    return by_op


def _report_choice(op: str, device_type: str, dtype: torch.dtype, reasons: dict[str, str | None]) -> _Decision:
    named = asked(op)
    if named != "auto":
        reason = reasons[named]
        return _Decision(named, f"asked for by name{f', but {reason}' if reason else ''}")
    measured = () if is_gpu(device_type) else table().of(op, native.isa(), _name(dtype))
    shapes = {entry.shape for entry in measured}
    shapes |= {
        shape for held_op, held_dtype, shape in _thread.settings.held if (held_op, held_dtype) == (op, _name(dtype))
    }
    decisions = [_decide(op, device_type, dtype, shape) for shape in sorted(shapes, key=lambda s: s or ())]
    if not decisions:
        return _decide(op, device_type, dtype, None)
    backends = [b for b in BACKENDS if any(b == decision.backend for decision in decisions)]
    return _Decision(" or ".join(backends), "; ".join(dict.fromkeys(decision.why for decision in decisions)))


def default_backend() -> str:
    """Name that `backend="auto"` stands for by the settings in use: "auto", or the backend that was set."""
    return _thread.settings.backend


def asked(op: str) -> str:
    """Name that `backend="auto"` stands for in an op: its own (`use_op_backend`), or that of every op.

    Args:
        op: name of the op.

    Returns:
        "auto", or the backend that was set.
    """
    return _thread.settings.of_op.get(op, _thread.settings.backend)


def use_op_backend(op: str, backend: str) -> contextlib.AbstractContextManager[None]:
    """Make `backend="auto"` stand for a given backend within a `with` block of this thread, in one op.

    Args:
        op: name of a registered op.
        backend: one of `BACKENDS` that the op has.

    Returns:
        A context manager, for a `with` block; what the op had before it comes back at its end.

    Raises:
        KeyError: op is unknown.
        ValueError: the op has no such backend.
    """
    implementation(op, backend)
    return _use(of_op={op: backend})


def use_ways(op: str, *ways: str) -> contextlib.AbstractContextManager[None]:
    """Let the kernels of an op take other ways than their own within a `with` block of this thread.

    Args:
        op: name of the op.
        ways: names of the ways, which the op's backend knows.

    Returns:
        A context manager, for a `with` block; what was on before it comes back at its end.
    """
    return _use(of_op={f"{op}, ways": " ".join(ways)})


def ways(op: str) -> list[str]:
    """Names of the ways that `use_ways` has given an op.

    Args:
        op: name of the op.

    Returns:
        The names, in the order given.
    """
    return _thread.settings.of_op.get(f"{op}, ways", "").split()


def leaves_to_torch(op: str) -> bool:
    """Whether the backend asked for leaves an op, such as linears and norms, which torch has itself, to torch.

    Those named `reference` and `cuda` do. `cpu` and `triton` stand for every kernel that they have.

    Args:
        op: name of the op.
    """
    return asked(op) in ("reference", "cuda")


def set_default_backend(backend: str) -> None:
    """Make `backend="auto"` stand for a given backend from now on, wherever the settings of the process are used.

    Args:
        backend: one of `BACKENDS`, or "auto" to let the registry decide again.

    Raises:
        ValueError: backend is unknown.
    """
    _check_name(backend)
    PROCESS.backend = backend
    _thread.enter(_thread.own, _thread.changes)


def use_backend(backend: str) -> contextlib.AbstractContextManager[None]:
    """Make `backend="auto"` stand for a given backend within a `with` block of this thread, in every op.

    Args:
        backend: one of `BACKENDS`, or "auto" to let the registry decide.

    Returns:
        A context manager, for a `with` block; the default before it comes back at its end.

    Raises:
        ValueError: backend is unknown.
    """
    _check_name(backend)
    return _use(backend=backend)
