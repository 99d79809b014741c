"""Memory that `decode_attention` takes inside: splits of the positions leave sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import BackendOf, Traced

SPLIT, MAX_SPLITS = 256, 64
"""Positions of a split in Triton, and most splits; beyond, splits grow."""


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
