"""Work and memory of `linear_logprob`: one sweep of the vocabulary, or two where more than hidden is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_kernels.runtime.cost import BackendOf, Work
from rlhf_kernels.vocab.cost import head_work, sweep_bytes


def work(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """Forward: logits, and E where it is made ahead. Backward: nothing with E, else logits and every gradient."""
    if name == "linear_logprob":
        products = 1 + bool(args[-2])
    else:
        has_sums = isinstance(args[16], torch.Tensor) and args[16].numel() > 0
        products = 0 if has_sums else 1 + len(args[-2].split(","))
    return [head_work(args[0], args[1], products)]


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int:
    """Memory of the sweep; backward also the gradients' own."""
    hidden, weight = args[0], args[1]
    backend = backend_of("linear_logprob", hidden.dtype, weight.shape)
    if name == "linear_logprob":
        return sweep_bytes(hidden, weight, backend, needs="", ahead=args[-2], keeps_sums=False)
    return sweep_bytes(hidden, weight, backend, needs=args[-2], ahead=False, keeps_sums=False)
