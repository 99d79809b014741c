"""Memory that `linear_ppo_loss` takes inside; its forward makes the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import BackendOf
from rlhf_kernels.vocab.cost import sweep_bytes


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int:
    """Memory of the sweep, and E [N, H], which stays inside the call."""
    hidden, weight, ahead = args[0], args[1], _is_ahead(args)
    backend = backend_of("linear_ppo_loss", hidden.dtype, weight.shape)
    return sweep_bytes(hidden, weight, backend, needs=args[-2], ahead=ahead, keeps_sums=ahead)


def _is_ahead(args: Sequence[Any]) -> bool:
    """Whether the sweep itself makes the sums of d_hidden: a frozen head without an entropy bonus."""
    needs, entropy_coef = args[-2], args[-3]
    return needs == "hidden" and entropy_coef == 0.0
