"""Tables of each tile's rows and adapter address: small, int64, uploaded once per batch layout.

An upload comes from pinned memory and does not wait for the device. Tables are cached: a step that repeats the
segments and the adapters of an earlier one uploads nothing, which is what makes it capturable in a CUDA graph. A
table that a graph has seen is kept for good; of the others those go first that were not used for longest.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf_kernels.lora.segments import OFF

SLOT_WIDTH = 6  # address of A, address of B, rank, dropout threshold, 1 / (1 − p), scale (the last two as fp32 bits)
TARGET_PROGRAMS = 264  # two per multiprocessor of an H100 or H200; fixed, so that bits do not depend on the device
_T = TypeVar("_T", bound=NamedTuple)


class Slots(NamedTuple):
    """The places and scales of the adapters, as kernels read them."""

    table: Tensor  # [slots, SLOT_WIDTH]
    aligned: bool  # every address is divisible by 16


class RowSlots(NamedTuple):
    """The slot of each row, as `lora_decode` reads it."""

    table: Tensor  # [N] int64, the slot of each row, −1: off


class Layout(NamedTuple):
    """Tiles of the rows that some of the slots carry, sorted by slot, and chunks of tiles of one slot."""

    tiles: Tensor  # [tiles, 4]: first row, number of rows, slot, place among the on rows
    chunks: Tensor  # [chunks, 2]: first tile, tile after the last
    folds: Tensor  # [slots in here, 4]: slot, first chunk, chunk after the last, sum of the ranks before it
    n_tiles: int
    n_chunks: int
    block_n: int


def block_rows(starts: Sequence[int], ends: Sequence[int]) -> int:
    """Rows per tile: few where there are few, or where runs are short."""
    n_on = sum(ends) - sum(starts)
    return 16 if n_on <= 256 or n_on < 32 * len(starts) else 64


class _Cache:
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
            found = self._held.get(key) or self._in_graphs.get(key)
            if key in self._held:
                self._held.move_to_end(key)
        if found is None:
            made_here = (make(), *_uploaded(device))
            with self._lock:
                found = self._held.setdefault(key, made_here)  # another thread may have made it, too
                while len(self._held) > self.entries:
                    self._held.popitem(last=False)
        made, stream, event = found
        if event is not None:
            current = torch.cuda.current_stream(device)
            if _capturing(device):  # a capture waits for everything before it
                with self._lock:
                    self._in_graphs[key] = found
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


ADAPTERS = _Cache(1 << 16)
"""One per linear and set of slots: of a model with 1,200 linears, 54 sets. A table takes 512 bytes of the device."""
BATCHES = _Cache(1 << 10)
"""Tables by layout of a batch and width of a linear; those of earlier batches are not used again."""


def slots_of(A: list[Tensor], B: list[Tensor], scales: Sequence[float], p: Sequence[float]) -> Slots:
    """The table of contiguous adapters."""
    addresses = [(a.data_ptr(), b.data_ptr()) for a, b in zip(A, B, strict=True)]
    ranks = [a.shape[0] for a in A]
    device = A[0].device

    def make() -> Slots:
        rows = [
            [*address, rank, int(q * 2**32), _bits(1 / (1 - q)), _bits(scale)]
            for address, rank, q, scale in zip(addresses, ranks, p, scales, strict=True)
        ]
        return Slots(_upload(rows, SLOT_WIDTH, device), all(x % 16 == 0 for pair in addresses for x in pair))

    return ADAPTERS.get((*addresses, *ranks, *scales, *p), device, make)


def row_slots_of(
    starts: Sequence[int], ends: Sequence[int], slots: Sequence[int], n_rows: int, device: torch.device
) -> RowSlots:
    """The table of runs that are on, for a batch of `n_rows`."""

    def make() -> RowSlots:
        rows = [[OFF]] * n_rows
        for start, end, slot in zip(starts, ends, slots, strict=True):
            rows[start:end] = [[slot]] * (end - start)
        return RowSlots(_upload(rows, 1, device).view(-1))

    return BATCHES.get(("rows", *starts, *ends, *slots, n_rows), device, make)


def layout_of(
    starts: list[int],
    ends: list[int],
    slots: list[int],
    ranks: list[int],
    wanted: Sequence[int],
    column_tiles: int,
    device: torch.device,
) -> Layout:
    """Tiles and chunks of the slots in `wanted` (ascending); `column_tiles` programs work on every chunk."""

    def make() -> Layout:
        block_n = block_rows(starts, ends)
        tiles: dict[int, list[list[int]]] = {slot: [] for slot in wanted}
        place = 0
        for start, end, slot in zip(starts, ends, slots, strict=True):
            for row in range(start, end, block_n) if slot in tiles else ():
                tiles[slot].append([row, min(block_n, end - row), slot, place + row - start])
            place += end - start
        n_tiles = sum(map(len, tiles.values()))
        step = max(1, math.ceil(n_tiles * column_tiles / TARGET_PROGRAMS))
        chunks: list[list[int]] = []
        folds, at, ranks_before = [], 0, 0
        for slot in wanted:
            first, after = len(chunks), at + len(tiles[slot])
            chunks += [[begin, min(begin + step, after)] for begin in range(at, after, step)]
            folds.append([slot, first, len(chunks), ranks_before])
            at, ranks_before = after, ranks_before + ranks[slot]
        return Layout(
            tiles=_upload([tile for slot in wanted for tile in tiles[slot]], 4, device),
            chunks=_upload(chunks, 2, device),
            folds=_upload(folds, 4, device),
            n_tiles=n_tiles,
            n_chunks=len(chunks),
            block_n=block_n,
        )

    key = ("layout", tuple(starts), tuple(ends), tuple(slots), tuple(ranks), tuple(wanted), column_tiles)
    return BATCHES.get(key, device, make)


def _bits(x: float) -> int:
    """x in fp32, its bits as an integer."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _upload(rows: list[list[int]], width: int, device: torch.device) -> Tensor:
    host = torch.tensor(rows, dtype=torch.int64).reshape(-1, width)
    if device.type != "cuda":
        return host.to(device)
    if _capturing(device):
        raise RuntimeError(
            "lora: a CUDA graph is being captured, and these segments or adapters are new; run the step once before "
            "the capture, with the same segments and with contiguous adapters of one dtype"
        )
    return host.pin_memory().to(device, non_blocking=True)


def _uploaded(device: torch.device) -> tuple[Any, Any]:
    """(stream, event) of what was just copied to a CUDA device, (None, None) elsewhere."""
    if device.type != "cuda":
        return None, None
    stream = torch.cuda.current_stream(device)
    return stream, stream.record_event()
