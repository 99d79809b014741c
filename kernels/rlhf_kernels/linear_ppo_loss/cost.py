"""Work and memory of `linear_ppo_loss`, whose forward makes the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import BackendOf, Work
from rlhf_kernels.vocab.cost import head_work, sweep_bytes


def work(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """The logits and every gradient; the logits again where the gradients take a second sweep."""
    needs = [need for need in args[-2].split(",") if need]
    second = bool(needs) and not _is_ahead(args)
    return [head_work(args[0], args[1], 1 + len(needs) + second)]


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int:
    """Memory of the sweep, and E [N, H], which stays inside the call."""
    hidden, weight, ahead = args[0], args[1], _is_ahead(args)
    backend = backend_of("linear_ppo_loss", hidden.dtype, weight.shape)
    return sweep_bytes(hidden, weight, backend, needs=args[-2], ahead=ahead, keeps_sums=ahead)


def _is_ahead(args: Sequence[Any]) -> bool:
    """Whether the sweep itself makes the sums of d_hidden: a frozen head without an entropy bonus."""
    needs, entropy_coef = args[-2], args[-3]
    return needs == "hidden" and entropy_coef == 0.0
