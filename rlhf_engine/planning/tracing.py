"""What the engine's own code allocates, found by running it on tensors without data.

Everything runs under `FakeTensorMode`: shapes, dtypes, views and autograd are real, memory is not. `Tracker` watches every
op below autograd and keeps the sum of the storages that are alive, so that what autograd saves, what a backward pass adds
and what is freed when come from the code itself. Three things are outside of a trace:

* memory that a kernel takes inside one call: added by `workspace`;
* numbers that the code reads from tensors: the tracker answers 0, False is never the answer to a check;
* depth: two shallow copies of the model are traced and the layers between are extrapolated (`extrapolated_peak`).

Bytes throughout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_engine.planning.workspace import workspace_bytes

_ROUNDING = {"cuda": 512, "cpu": 64}
"""A block is a multiple of this, by device."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One op that allocated something."""

    op: str
    added: int
    """Bytes of its new results."""
    live: int
    """Bytes alive in the op, its results and its own workspace included."""


@dataclass(kw_only=True)
class Timeline:
    """Events in stretches: the tracker begins a new one where a backward pass begins or ends, and on request."""

    stretches: list[list[Event]] = field(default_factory=lambda: [[]])

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        return max((event.live for stretch in self.stretches for event in stretch), default=0)


class Tracker(TorchDispatchMode):
    """Counts the bytes alive in storages made while it is on. Storages of `known` tensors do not count."""

    def __init__(self, known: Iterable[torch.Tensor] = (), *, device_type: str = "cuda") -> None:
        super().__init__()
        self.timeline = Timeline()
        self.live = 0
        self._device_type = device_type
        self._rounding = _ROUNDING[device_type]
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: t for t in known}
        self._backward = False

    def cut(self) -> None:
        """Begin a new stretch."""
        if self.timeline.stretches[-1]:
            self.timeline.stretches.append([])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _answer(args[0].dtype)
        if func is torch.ops.aten.allclose.default:
            return True
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        if backward != self._backward:
            self._backward = backward
            self.cut()
        added = sum(self._hold(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        inside = workspace_bytes(func, args, out, self._device_type)
        if added or inside:
            self.timeline.stretches[-1].append(Event(op=str(func), added=added, live=self.live + inside))
            if func.namespace == "rlhf_kernels" and func._opname == "sample":
                self.cut()  # a decoding step ends
        return out

    def _hold(self, tensor: torch.Tensor) -> int:
        """Count a storage until it is gone; its bytes if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return 0
        size = -(-storage.nbytes() // self._rounding) * self._rounding

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        return size


def _answer(dtype: torch.dtype) -> float | int | bool:
    """What a number read from a tensor without data is taken for: checks pass, indices are 0, ratios 1."""
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 0


def traced(run: Callable[[], object], known: Iterable[torch.Tensor], device_type: str) -> Timeline:
    """The timeline of a call. The caller is in a FakeTensorMode and `known` holds what exists before the call."""
    tracker = Tracker(known, device_type=device_type)
    with tracker:
        result = run()
    del result
    return tracker.timeline


def extrapolated_peak(short: Timeline, long: Timeline, layers: tuple[int, int], n_layers: int) -> int | None:
    """Peak of a model of `n_layers` layers from timelines of two shallow ones of `layers` layers each.

    Within a stretch (a forward pass, a backward pass) every layer repeats the same events, and its level is a linear
    function of how many layers came before and of how many there are. So an event near the beginning and the same event
    near the end bound all layers between. Events are matched from both ends by op and size; None if that does not
    cover the shorter timeline, which means that layers differ.
    """
    if len(short.stretches) != len(long.stretches):
        return None
    factor = (n_layers - layers[0]) / (layers[1] - layers[0])
    peak = 0.0
    for few, many in zip(short.stretches, long.stretches, strict=True):
        ahead = _common(few, many)
        behind = _common(few[::-1], many[::-1])
        if ahead + behind < len(few):
            return None
        pairs = [*zip(few[:ahead], many[:ahead], strict=True)]
        pairs += zip(few[len(few) - behind :], many[len(many) - behind :], strict=True)
        peak = max([peak, *(a.live + (b.live - a.live) * factor for a, b in pairs)])
    return round(peak)


def _common(a: Sequence[Event], b: Sequence[Event]) -> int:
    """Length of the common beginning, by op and size."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if (x.op, x.added) != (y.op, y.added):
            break
        n += 1
    return n
