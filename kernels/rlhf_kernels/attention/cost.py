"""Memory that `attention` takes inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.cost import BackendOf, round_up

QUERY_ROWS, SCORES, TILE = 32, 1 << 18, 16
"""Rows and scores of a block of queries, and positions of a tile: csrc/cpu/attention_rows.h."""


def longest(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """Positions that the last query of some sequence sees at most, without a window."""
    return max((n + (lengths[p] if p >= 0 else 0) for n, p in zip(lengths, parents, strict=True)), default=0)


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int:
    """Scratch of every thread: a block of queries and its scores, or a family's gradients of queries; δ in Triton."""
    back = name == "attention_backward"
    (q, k), (lengths, parents, _, window, _) = args[1:3] if back else args[:2], args[-6:-1]
    t, n_heads, d = q.shape
    if args[-1] == "triton":
        return 4 * t * n_heads if back else 0
    group, padded = n_heads // k.shape[1], round_up(d, TILE)
    if back:
        members = list(lengths)  # rows of the families, each at its parent's place
        for length, parent in zip(lengths, parents, strict=True):
            if parent >= 0:
                members[parent] += length
        floats = (max(members, default=0) * group + 6 * TILE) * padded + 2 * TILE**2
        return 4 * (native.threads() * floats + t * n_heads)
    most = longest(lengths, parents) if window is None else min(longest(lengths, parents), window + QUERY_ROWS)
    rows = max(group, QUERY_ROWS)
    floats = (2 * rows + TILE) * padded + max(min(rows * most, SCORES), group * most) + 2 * TILE * rows
    return 4 * native.threads() * floats
