"""Work and memory of `decode_attention`: keys and values are read once, and splits of the positions leave sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import ATTENTION, BackendOf, Traced, Work

SPLIT, MAX_SPLITS = 256, 64
"""Positions of a split in Triton, and most splits; beyond, splits grow."""


def work(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """4 N h S D for S positions that a row's table holds, or as many as the window lets through."""
    q, keys, _, _, table, _, window = args[:7]
    positions = table.shape[1] * keys.shape[1]
    positions = positions if window is None else min(positions, window)
    moved = 2.0 * q.shape[0] * positions * keys.shape[2] * keys.shape[3] * keys.element_size()
    return [Work("decode_attention", ATTENTION, 4.0 * q.numel() * positions, moved, 0, q.dtype, 2)]


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int | Traced:
    """Sums and states of the splits in Triton, nothing that grows in C++, the reference's own peak otherwise."""
    (n, heads, d), positions = args[0].shape, args[1].shape[1] * args[4].shape[1]
    backend = backend_of("decode_attention", args[0].dtype, (d,))
    if backend == "triton":
        return 4 * n * heads * min(MAX_SPLITS, -(-positions // SPLIT)) * (d + 2)
    if backend != "reference":
        return 0
    from rlhf_kernels.decode_attention import reference

    # every row is as long as its table allows: lengths first, then the table's places
    read = itertools.chain((positions, positions), itertools.repeat(0))
    return Traced(reference.forward, list(args[:-1]), {int: lambda: next(read)})
