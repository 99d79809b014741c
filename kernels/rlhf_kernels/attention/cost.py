"""Work and memory of `attention`: what the causal mask leaves of the products, and one pass over the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import ATTENTION, BackendOf, Work, all_bytes

_FAMILY_ROWS = 1 << 18  # floats of scores of a block of queries, per thread


def _pairs(lengths: Sequence[int], parents: Sequence[int], window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    total = 0
    for length, parent in zip(lengths, parents, strict=True):
        end = length + (lengths[parent] if parent >= 0 else 0)
        for n, sign in ((end, 1), (end - length, -1)):  # sums over the last positions 1 … n
            most = n if window is None else min(n, window)
            total += sign * (most * (most + 1) // 2 + (n - most) * most)
    return total


def work(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """Forward 4 D per pair of query and key, backward 10 D: two and five products."""
    lengths, parents, _, window, _ = args[-5:]
    q = args[1] if name == "attention_backward" else args[0]
    flops = (10.0 if name == "attention_backward" else 4.0) * q.shape[1] * q.shape[2] * _pairs(lengths, parents, window)
    return [Work("attention", ATTENTION, flops, all_bytes([*args, *out]), 0, q.dtype)]
