"""Tables that kernels read from the device: small, int64, uploaded once for what they are made from.

An upload comes from pinned memory and does not wait for the device. Tables are cached: a step that repeats the tables
of an earlier one uploads nothing, which is what makes it capturable in a CUDA graph. A table that a graph has seen is
kept for good; of the others those go first that were not used for longest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T", bound=NamedTuple)


class Cache:
    """Tables by what they are made from, those used last; for any number of threads."""

    def __init__(self, entries: int) -> None:
        self.entries = entries
        """Tables that it holds at most."""
        self._held: OrderedDict[tuple, tuple[Any, Any, Any]] = OrderedDict()  # table, stream and event of its upload
        self._in_graphs: dict[tuple, tuple[Any, Any, Any]] = {}  # what CUDA graphs read: kept for good
        self._lock = threading.Lock()

    def get(self, key: tuple, device: torch.device, make: Callable[[], _T]) -> _T:
        """Return the table of a key, made where it is new. Streams other than the one that uploaded it wait for it."""
        key = (*key, device)
        with self._lock:
            table = self._held.get(key) or self._in_graphs.get(key)
            if key in self._held:
                self._held.move_to_end(key)
        if table is None:
            made_here = (make(), *_uploaded(device))
            with self._lock:
                table = self._held.setdefault(key, made_here)  # another thread may have made it, too
                while len(self._held) > self.entries:
                    self._held.popitem(last=False)
        made, stream, event = table
        if event is not None:
            current = torch.cuda.current_stream(device)
            if _capturing(device):  # a capture waits for everything before it
                with self._lock:
                    self._in_graphs[key] = table
            elif current != stream:
                current.wait_event(event)
                for tensor in made:
                    if isinstance(tensor, Tensor):
                        tensor.record_stream(current)
        return made  # type: ignore[no-any-return]

    def tables(self, *, of_graphs: bool = False) -> list[Any]:
        """All that it holds, or those that graphs read."""
        with self._lock:
            return [entry[0] for entry in (self._in_graphs if of_graphs else self._held).values()]

    def clear(self) -> None:
        """Forget all tables but those of graphs."""
        with self._lock:
            self._held.clear()


def upload(rows: list[list[int]], width: int, device: torch.device) -> Tensor:
    """Rows of integers [n, width] as an int64 tensor on a device.

    Args:
        rows: n lists of `width` integers.
        width: integers per row.
        device: where the tensor is to lie.

    Returns:
        The tensor; on a GPU its copy may still be under way on the current stream.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if _capturing(device):
        raise RuntimeError(
            "a CUDA graph is being captured, and these segments, adapters or lengths are new; run the step once before "
            "the capture, with the same ones and with contiguous adapters of one dtype"
        )
    return queued(torch.tensor(rows, dtype=torch.int64).reshape(-1, width), device)


def queued(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers of the host to a device, without waiting for it.

    Args:
        values: integers, or a tensor on the CPU that nobody writes to any more.
        device: where they are to lie.

    Returns:
        The tensor, int64 of integers; on a GPU its copy may still be under way on the current stream.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    # from memory that is not pinned, CUDA's copy waits for all that is queued before it
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _uploaded(device: torch.device) -> tuple[Any, Any]:
    """(stream, event) of what was just copied to a CUDA device, (None, None) elsewhere."""
    if device.type != "cuda":
        return None, None
    stream = torch.cuda.current_stream(device)
    return stream, stream.record_event()
