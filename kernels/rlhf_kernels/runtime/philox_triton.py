"""The words of `rlhf_kernels.runtime.philox` in Triton kernels: same key, counter and layout, so the same draws."""

from __future__ import annotations

import triton
import triton.language as tl

BELOW_ONE = tl.constexpr(1 - 2.0**-24)
UNIT = tl.constexpr(2.0**-32)


@triton.jit
def random_groups(seed, row, stream, first_group, BN: tl.constexpr, BG: tl.constexpr):
    """Four uint32 [BN, BG]: the draws of columns 4 g, …, 4 g + 3 for the groups g from `first_group` on.

    seed, row: int64 scalars or [BN, 1].
    """
    group = (first_group + tl.arange(0, BG))[None, :].to(tl.uint32) + tl.zeros([BN, 1], tl.uint32)
    zero = tl.zeros([BN, BG], tl.uint32)
    low = (row & 0xFFFFFFFF).to(tl.uint32) + zero
    high = ((row >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    return tl.philox(seed, group, zero + stream, low, high)


@triton.jit
def random_words(seed, row, stream, first_column, BN: tl.constexpr, BD: tl.constexpr):
    """uint32 draws [BN, BD] of columns first_column … (a multiple of 4)."""
    w0, w1, w2, w3 = random_groups(seed, row, stream, first_column // 4, BN, BD // 4)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(words):
    """−log(−log1p(−u)), u = min((word + ½)·2⁻³², 1 − 2⁻²⁴), with u rounded to fp32 once as `philox.gumbel` does."""
    # Both halves are exact, so only their sum is rounded; word + ½ may need 33 bits
    scaled = (words >> 16).to(tl.float32) * 65536.0 + ((words & 0xFFFF).to(tl.float32) + 0.5)
    u = tl.minimum(scaled * UNIT, BELOW_ONE)
    rest = 1.0 - u
    lost = u - (1.0 - rest)  # by the rounding of 1 − u: log1p(−u) = log(rest) − lost / rest, and 1 / rest is near 1 + u
    return -tl.log(lost * (1.0 + u) - tl.log(rest))
