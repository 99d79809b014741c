"""Memory that multi-LoRA linears take inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.cost import BackendOf, next_power, round_up

EXACT_SPLITS = 4
"""Parts of the features that Triton's h is added up from in exact mode, where the number of rows may not decide."""
_PLACES = {
    "lora_linear": (0, 3),
    "lora_linear_backward": (1, 3),
    "lora_delta": (0, 1),
    "lora_delta_backward": (1, 2),
}
"""Places of x and of the list of A among the arguments of each op; B, scales, starts, ends and slots follow A."""


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int:
    """h and dh [rows that are on, r] and partial sums of dA and dB."""
    if name not in _PLACES:
        return 0
    at_x, at_A = _PLACES[name]
    x, (A, B, _, starts, ends) = args[at_x], args[at_A : at_A + 5]
    backward = name.endswith("_backward")
    n_on, rank = sum(ends) - sum(starts), max(a.shape[0] for a in A)
    k, m = A[0].shape[1], B[0].shape[0]
    backend = backend_of("lora", x.dtype, (m, k))
    if backend == "triton":
        rank = max(16, next_power(rank))
        if registry.is_exact():  # h and the shares of dh in splits, and dh
            return (2 * EXACT_SPLITS + 1 if backward else EXACT_SPLITS) * n_on * rank * 4
        if not backward:
            return n_on * rank * 4
        # up to rank 32, dh is made from the read of dy that makes dB: one share per tile of 256 columns
        shares = -(-m // 256) * n_on * rank * 4 if rank <= 32 else n_on * rank * 4
        return 2 * n_on * rank * 4 + shares
    if backend == "cpu":
        sums = (k + m) * round_up(rank, native.tile_size("lora_rank")) * 4
        return sums * (len(A) + native.threads()) if backward else sums
    wide = 0 if x.element_size() == 4 else 4
    return n_on * (k + m) * wide + n_on * rank * 8
