"""Memory that `sample` takes inside: partial results per share of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import BackendOf, Traced
from rlhf_kernels.vocab.cost import SHARES
from rlhf_kernels.vocab.logits import HeadOptions

PROGRAMS = SHARES
"""Shares of the vocabulary that Triton makes."""
FIELDS, CHOICES = 4, 2
"""Numbers that a share leaves per row: m, s, w and the best column's logit; the best score's key and its column."""


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int | Traced:
    """Partial results in Triton, nothing that grows in C++ (tiles per thread), the reference's own peak otherwise."""
    backend = backend_of("sample", args[0].dtype, args[1].shape)
    if backend == "triton":
        return 4 * PROGRAMS * (FIELDS + CHOICES) * args[0].shape[0]
    if backend != "reference":
        return 0
    from rlhf_kernels.sample import reference

    inputs = [*args[:5], None, HeadOptions(*args[7:15]), *args[15:-1]]
    return Traced(reference.forward, inputs, {bool: False})  # False: not every row is greedy
