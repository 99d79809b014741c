"""Work and memory of `linear`: one product forward, one per gradient backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.cost import GEMMS, BackendOf, Work, all_bytes, round_up, tensor_bytes


def work(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """2 N K M per product; inputs and results are moved once, the weight once per product."""
    if name == "linear":
        return [linear_work(name, args[0], args[1], 1, out)]
    return [linear_work(name, args[0], args[2], sum(args[3:5]), out)]


def linear_work(kind: str, x: torch.Tensor, weight: torch.Tensor, products: int, out: Any) -> Work:
    """Work of `products` products of x [..., K] with a weight [M, K]."""
    rows = x.numel() // max(1, x.shape[-1])
    moved = products * tensor_bytes(weight) + all_bytes([x, *tree_leaves(out)])
    return Work(kind, GEMMS, 2.0 * products * rows * weight.numel(), moved, rows, weight.dtype, products)


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
