"""Tables of each tile's rows and adapter address: small, int64, uploaded once per batch layout (`device_tables`)."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.runtime.device_tables import Cache, upload

SLOT_WIDTH = 6  # address of A, address of B, rank, dropout threshold, 1 / (1 − p), scale (the last two as fp32 bits)
EXACT_ROWS, EXACT_CHUNK = 16, 32  # rows of a tile and tiles of a chunk in exact mode
TARGET_PROGRAMS = 264  # two per multiprocessor of an H100 or H200; fixed, so that bits do not depend on the device


class Slots(NamedTuple):
    """The places and scales of the adapters, as kernels read them."""

    table: Tensor  # [slots, SLOT_WIDTH]
    aligned: bool  # every address is divisible by 16


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


ADAPTERS = Cache(1 << 16)
"""One per linear and set of slots: of a model with 1,200 linears, 54 sets. A table takes 512 bytes of the device."""
BATCHES = Cache(1 << 10)
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
        return Slots(upload(rows, SLOT_WIDTH, device), all(x % 16 == 0 for pair in addresses for x in pair))

    return ADAPTERS.get((*addresses, *ranks, *scales, *p), device, make)


def layout_of(
    starts: list[int],
    ends: list[int],
    slots: list[int],
    ranks: list[int],
    wanted: Sequence[int],
    column_tiles: int,
    exact: bool,
    device: torch.device,
) -> Layout:
    """Tiles and chunks of the slots in `wanted` (ascending); `column_tiles` programs work on every chunk.

    exact: their sizes are fixed, so that other slots and rows change no order of summation.
    """

    def make() -> Layout:
        block_n = EXACT_ROWS if exact else block_rows(starts, ends)
        tiles: dict[int, list[list[int]]] = {slot: [] for slot in wanted}
        place = 0
        for start, end, slot in zip(starts, ends, slots, strict=True):
            for row in range(start, end, block_n) if slot in tiles else ():
                tiles[slot].append([row, min(block_n, end - row), slot, place + row - start])
            place += end - start
        n_tiles = sum(map(len, tiles.values()))
        step = EXACT_CHUNK if exact else max(1, math.ceil(n_tiles * column_tiles / TARGET_PROGRAMS))
        chunks: list[list[int]] = []
        folds, at, ranks_before = [], 0, 0
        for slot in wanted:
            first, after = len(chunks), at + len(tiles[slot])
            chunks += [[begin, min(begin + step, after)] for begin in range(at, after, step)]
            folds.append([slot, first, len(chunks), ranks_before])
            at, ranks_before = after, ranks_before + ranks[slot]
        return Layout(
            tiles=upload([tile for slot in wanted for tile in tiles[slot]], 4, device),
            chunks=upload(chunks, 2, device),
            folds=upload(folds, 4, device),
            n_tiles=n_tiles,
            n_chunks=len(chunks),
            block_n=block_n,
        )

    key = ("layout", tuple(starts), tuple(ends), tuple(slots), tuple(ranks), tuple(wanted), column_tiles, exact)
    return BATCHES.get(key, device, make)


def _bits(x: float) -> int:
    """x in fp32, its bits as an integer."""
    return struct.unpack("<i", struct.pack("<f", x))[0]
