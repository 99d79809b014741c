"""Memory that the engine's own code allocates, found by running it on tensors without data.

Everything runs under `FakeTensorMode`: shapes, dtypes, views and autograd are real, memory is not. `Tracker` watches
every op below autograd and keeps the sum of the storages that are alive. What autograd saves, what a backward pass adds
and what is freed when then come from the code itself. Three things are outside of a trace:

* memory that a kernel takes inside one call: added by `workspace`;
* numbers that the code reads from tensors: the tracker answers such that checks pass and indices are 0;
* depth: two shallow copies of the model are traced and the layers between are extrapolated (`extrapolated_peak`).

Bytes throughout.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rlhf_kernels.runtime.cost import round_up
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rlhf_engine.planning.workspace import workspace_bytes

_READS = frozenset(
    (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default)
)
ROUNDING = {"cuda": 512, "cpu": 64}
"""A block is a multiple of this, by device."""


Log = list[int | None]
"""Everything that changed the bytes alive, in order: the bytes of a new storage; −1 − i when storage i, counted from 0,
is gone; None at an event."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One op that allocated something."""

    op: str
    added: int
    """Bytes of its new results."""
    live: int
    """Bytes alive in the op, its results and its own workspace included."""
    seen: Seen | None = None
    """For another number of rows, see `rows`."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Circumstances of an event: its place in the log, and the call."""

    log: Log
    """Of the tracker."""
    place: int
    """Number of the event in the log."""
    new: int
    """Number of its new storages."""
    inside: int
    """Bytes of its own workspace."""
    func: Any
    args: Any
    """Arguments, tensors as shape and dtype; None where nothing is taken inside."""


@dataclass(frozen=True)
class Shaped:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(kw_only=True)
class Timeline:
    """Everything that allocated, in order."""

    events: list[Event] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        return max((event.live for event in self.events), default=0)


class Tracker(TorchDispatchMode):
    """Counts the bytes alive in storages made while it is on. Storages of `known` tensors do not count."""

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),
        *,
        device_type: str = "cuda",
        answers: Mapping[type, Any] | None = None,
    ) -> None:
        """answers: what a bool, int or float read from a tensor is taken for, if not True, 0 and 1; or what says so."""
        super().__init__()
        self._answers = {bool: True, int: 0, float: 1.0, **(answers or {})}
        self.timeline = Timeline()
        self.live = 0
        self._log: Log = []
        self._n_storages = self._n_events = 0
        self._device_type = device_type
        self._rounding = ROUNDING[device_type]
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: t for t in known}
        self._sums: dict[int, int] = {}  # of integers that came from a list, by storage

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            dtype = args[0].dtype
            answer = self._answers[bool if dtype is torch.bool else float if dtype.is_floating_point else int]
            return answer() if callable(answer) else answer
        if func in (torch.ops.aten.allclose.default, torch.ops.aten.equal.default):
            return True
        if func is torch.ops.aten.repeat_interleave.Tensor:
            # the one result whose size depends on numbers; these came from a list on the host
            kwargs = {**kwargs, "output_size": self._sums[args[0].untyped_storage()._cdata]}
        if _is_composite(func):
            with self:  # inside of a kernel, ops made of others arrive whole
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        if func is torch.ops.aten.lift_fresh.default and args[0].dtype is torch.int64 and args[0].dim() == 1:
            with unset_fake_temporarily():
                self._sums[out.untyped_storage()._cdata] = sum(args[0].tolist())
        before = self._n_storages
        added = sum(self._hold(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        inside = workspace_bytes(func, args, out, self._device_type)
        if added or inside:
            seen = Seen(
                log=self._log,
                place=self._n_events,
                new=self._n_storages - before,
                inside=inside,
                func=func,
                args=tree_map_only(torch.Tensor, _shaped, args) if inside else None,
            )
            self.timeline.events.append(Event(op=str(func), added=added, live=self.live + inside, seen=seen))
            self._log.append(None)
            self._n_events += 1
        return out

    def _hold(self, tensor: torch.Tensor) -> int:
        """Count a storage until it is gone; its bytes if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return 0
        exact, number = storage.nbytes(), self._n_storages
        size = round_up(exact, self._rounding)

        def gone(_: Any) -> None:
            del self._known[key]
            self._sums.pop(key, None)
            self.live -= size
            self._log.append(-1 - number)

        self._known[key] = weakref.ref(storage, gone)
        self._log.append(exact)
        self._n_storages += 1
        self.live += size
        return size


def _shaped(tensor: torch.Tensor) -> Shaped:
    return Shaped(tuple(tensor.shape), tensor.dtype)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an op is nothing but other ops on every device."""

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)

    return func.namespace == "aten" and has("CompositeImplicitAutograd") and not has("CPU")


def traced(run: Callable[[], object], known: Iterable[torch.Tensor], device_type: str) -> Timeline:
    """The timeline of a call. The caller is in a FakeTensorMode and `known` holds what exists before the call."""
    tracker = Tracker(known, device_type=device_type)
    with tracker:
        result = run()
    del result
    return tracker.timeline


def extrapolated_peak(short: Timeline, long: Timeline, layers: tuple[int, int], n_layers: int) -> int | None:
    """Peak of a model of `n_layers` layers from timelines of two shallow ones of `layers` layers each.

    The longer timeline is the shorter one with more of the same inserted in every pass over the layers, forward or
    backward. Within a pass the level at an event is a linear function of how many layers came before it and of how
    many there are. So an event of the first layers (matched up to the insertion) and of the last layers (matched
    backwards from its end) bound those of all layers between. None if one timeline is not the other with insertions:
    layers differ.
    """
    few, many = short.events, long.events
    inserted = _insertions(few, many)
    if inserted is None:
        return None
    pairs: list[tuple[Event, Event]] = []
    i = j = 0
    for at, begin, end in [*inserted, (len(few), len(many), len(many))]:
        pairs += zip(few[i:at], many[j:begin], strict=True)
        back = _matching_backwards(few[:at], many[:end])
        pairs += zip(few[at - back : at], many[end - back : end], strict=True)
        i, j = at, end
    factor = (n_layers - layers[0]) / (layers[1] - layers[0])
    return round(max((a.live + (b.live - a.live) * factor for a, b in pairs), default=0))


def _matching_backwards(few: Sequence[Event], many: Sequence[Event]) -> int:
    """Number of events at the ends that match and differ by the same number of bytes."""
    growth = many[-1].live - few[-1].live if few and many else 0
    n = 0
    for a, b in zip(reversed(few), reversed(many), strict=False):
        if not _same(a, b) or b.live - a.live != growth:
            break
        n += 1
    return n


def _insertions(few: Sequence[Event], many: Sequence[Event]) -> list[tuple[int, int, int]] | None:
    """Places where `many` has more: (place in `few`, first and after the last of the events that only `many` has).

    Two timelines that match event by event differ by the same number of bytes until something is inserted.
    """
    found = []
    i = j = 0
    growth = None
    while i < len(few) or j < len(many):
        matches = i < len(few) and j < len(many) and _same(few[i], many[j])
        if matches and growth in (None, many[j].live - few[i].live):
            growth = many[j].live - few[i].live
            i, j = i + 1, j + 1
            continue
        end = _end_of_insertion(few[i:], many, j)
        if end is None:
            if not matches:
                return None
            growth = many[j].live - few[i].live
            continue
        found.append((i, j, end))
        j, growth = end, None
    return found


def _end_of_insertion(rest: Sequence[Event], many: Sequence[Event], begin: int) -> int | None:
    """Place from which `many` goes on like `rest`, for more events than were inserted; None if it does not."""
    if not rest:
        return len(many)
    for end in range(begin + 1, len(many) - len(rest) + 1):
        ahead = rest[: end - begin + _MARGIN]
        if all(_same(a, b) for a, b in zip(ahead, many[end : end + len(ahead)], strict=True)):
            return end
    return None


_MARGIN = 8


def _same(a: Event, b: Event) -> bool:
    return a.op == b.op and a.added == b.added
