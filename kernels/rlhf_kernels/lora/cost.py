"""Work and memory of multi-LoRA linears: the base product, and what is added to the adapted rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.linear.cost import linear_work
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.cost import LORA, BackendOf, Work, all_bytes, next_power, round_up

EXACT_SPLITS = 4
"""Parts of the features that Triton's h is added up from in exact mode, where the number of rows may not decide."""
_PLACES = {
    "lora_linear": (0, 3),
    "lora_linear_backward": (1, 3),
    "lora_delta": (0, 1),
    "lora_delta_backward": (1, 2),
}
"""Places of x and of the list of A among the arguments of each op; B, scales, starts, ends and slots follow A."""


def work(name: str, args: Sequence[Any], out: Any) -> list[Work] | None:
    """2 n r (K + M) forward; backward up to five halves of it: h and dh again, then dx, dA and dB where needed."""
    if name not in _PLACES:  # decoding in place, which no plan traces
        return None
    A, B, _, starts, ends, slots = args[_PLACES[name][1] : _PLACES[name][1] + 6]
    backward = name.endswith("_backward")
    found = []
    if name.startswith("lora_linear"):
        weight = args[2 if backward else 1]
        products = sum(args[-6:-4]) if backward else 1  # need_x, need_weight
        found.append(linear_work("linear_backward" if backward else "linear", args[0], weight, products, out))
    k, m, e = A[0].shape[1], B[0].shape[0], args[0].element_size()
    halves: float = 2.0
    if backward:
        need_A, need_B = args[-3:-1]
        need_x = args[-6] if name.startswith("lora_linear") else args[-4]
        halves = 2.0 + need_x + any(need_A) + any(need_B)
    ranks = [(end - start) * A[slot].shape[0] for slot, start, end in zip(slots, starts, ends, strict=True)]
    n_on = sum(ends) - sum(starts)
    kind = "lora_backward" if backward else "lora" if name.startswith("lora_linear") else "lora_delta"
    moved = n_on * e * ((2.0 * k + m) * (1.0 + backward) if backward else k + 2.0 * m) + all_bytes([*A, *B])
    calls = 0 if found else 1
    found.append(Work(kind, LORA, halves * sum(ranks) * (k + m), moved, n_on, args[0].dtype, int(halves), calls))
    return found


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
