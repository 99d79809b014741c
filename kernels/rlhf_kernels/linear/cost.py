"""Memory that `linear` takes inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.cost import BackendOf, round_up


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int:
    """Lanes of one side as tiles, and per thread a strip of the other side and its sums, in C++; nothing in Triton.

    x is packed forward, W backward. The tiles of a weight that is kept packed are counted as state besides.
    """
    backward = name != "linear"
    rows, weight = args[0], args[2 if backward else 1]
    if backend_of("linear", weight.dtype, weight.shape) == "triton":
        return 0
    n, (m, k) = rows.numel() // max(rows.shape[-1], 1), weight.shape
    columns, strip = native.tile_size("linear_columns"), native.tile_size("strip_rows")
    lanes, depth = (k, m) if backward else (n, k)
    tiles = max(round_up(depth, 16) // 16, 1)
    at_once = min(round_up(lanes, 16) // 16, round_up(-(-native.tile_size("linear_tiles") // tiles), columns))
    scratch = strip * (columns + 1) * 64 + columns * strip * 64
    return at_once * tiles * 1024 + native.threads() * scratch
