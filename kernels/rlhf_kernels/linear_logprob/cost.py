"""Memory that `linear_logprob` takes inside: of one sweep of the vocabulary, or of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import BackendOf
from rlhf_kernels.vocab.cost import sweep_bytes


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int:
    """Memory of the sweep; backward also the gradients' own."""
    hidden, weight = args[0], args[1]
    backend = backend_of("linear_logprob", hidden.dtype, weight.shape)
    if name == "linear_logprob":
        return sweep_bytes(hidden, weight, backend, needs="", ahead=args[-2], keeps_sums=False)
    return sweep_bytes(hidden, weight, backend, needs=args[-2], ahead=False, keeps_sums=False)
