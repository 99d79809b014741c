"""Device functions of the Triton backends that end in a softmax over the vocabulary: every formula once.

A tile is a block [R, C] of fp32 logits, out-of-range columns −inf. The statistics of a row are folded tile by tile
into a state. It is relative to the running maximum m (from −inf), so that rows of any sign and size are safe:
    s = Σ e^(z−m)    w = Σ e^(z−m) (z−m)    q = Σ e^(2(z−m))    total = Σ z    at_target = z_t
    first = the first column with z = m, as fp32 (exact: V ≤ 2²⁴)
For a pair there are also m_r, s_r, at_target_r of the reference's row and x = Σ e^(z−m) (z − z_r).
Two states are joined by moving both to the larger maximum and adding; that is exact but for rounding, and the order of
tiles is fixed, so results are bitwise deterministic. Transform and derivatives: `rlhf_kernels.vocab.logits`
and `linear_logprob.reference`, whose names these functions follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlhf_kernels.runtime.triton_math import tanh

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that 0 · LOWEST is 0 and not NaN


@triton.jit
def capped(y, bias, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """c [R, C] from the head's raw product y: bias, logit scale, softcap; what a greedy draw compares."""
    c = (y + bias) * logit_scale
    if SOFTCAP:
        c = softcap * tanh(c / softcap)
    return c


@triton.jit
def transformed(y, bias, divisor, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """z [R, C]: `capped` over the temperature (divisor [R])."""
    c = capped(y, bias, logit_scale, softcap, SOFTCAP)
    return c / divisor[:, None]


@triton.jit
def slope(z, divisor, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """u = dz/dy [R, C]."""
    u = tl.broadcast_to((logit_scale / divisor)[:, None], z.shape)
    if SOFTCAP:
        c = z * divisor[:, None] / softcap
        u = u * (1.0 - c * c)
    return u


@triton.jit
def exponentials(z, m):
    """z − m and e^(z−m) [R, C]; all zero where m = −inf."""
    d = z - tl.where(m == float("-inf"), 0.0, m)[:, None]
    return d, tl.exp(d)


@triton.jit
def tile_state(
    z,
    column,
    in_range,
    index,
    ENTROPY: tl.constexpr,
    SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr,
    TOP: tl.constexpr,
):
    """e^(z−m) [R, C] and the state (m, s, w, q, total, at_target, first), each [R], of one tile alone.

    column, in_range [C]; index [R], the target's column. What no flag asks for stays 0.
    """
    m = tl.max(z, 1)
    d, e = exponentials(z, m)
    s = tl.sum(e, 1)
    at_target = tl.sum(tl.where(column[None, :] == index[:, None], z, 0.0), 1)
    w = tl.zeros_like(m)
    q = tl.zeros_like(m)
    total = tl.zeros_like(m)
    first = tl.zeros_like(m)
    if ENTROPY:
        w = tl.sum(e * tl.maximum(d, LOWEST), 1)
    if SUM_SQ:
        q = tl.sum(e * e, 1)
    if MEAN:
        total = tl.sum(tl.where(in_range[None, :], z, 0.0), 1)
    if TOP:
        first = tl.min(tl.where(z == m[:, None], column[None, :], 2147483647), 1).to(tl.float32)
    return e, m, s, w, q, total, at_target, first


@triton.jit
def shift_to(m, to):
    """m − to for a maximum that becomes `to` ≥ m; −inf where both are −inf."""
    return m - tl.where(to == float("-inf"), 0.0, to)


@triton.jit
def moved(m, s, w, q, to):
    """(factor, s, w, q) of a state whose maximum m becomes `to` ≥ m."""
    shift = shift_to(m, to)
    a = tl.exp(shift)
    return a, a * s, a * tl.fma(s, tl.maximum(shift, LOWEST), w), a * a * q


@triton.jit
def scaled_sum(a, x, a2, x2):
    """a x + a2 x2, where the compiler cannot choose which of the products is rounded."""
    return tl.fma(a, x, a2 * x2)


@triton.jit
def joined(m, s, w, q, total, at_target, first, m2, s2, w2, q2, total2, at_target2, first2):
    """Factors a, a2 by which the two sums of exponentials were scaled, and the joint state."""
    to = tl.maximum(m, m2)
    shift, shift2 = shift_to(m, to), shift_to(m2, to)
    a, a2 = tl.exp(shift), tl.exp(shift2)
    w = tl.fma(s, tl.maximum(shift, LOWEST), w)
    w2 = tl.fma(s2, tl.maximum(shift2, LOWEST), w2)
    first = tl.where(m2 > m, first2, tl.where(m2 == m, tl.minimum(first, first2), first))
    s, w, q = scaled_sum(a, s, a2, s2), scaled_sum(a, w, a2, w2), scaled_sum(a * a, q, a2 * a2, q2)
    return a, a2, to, s, w, q, total + total2, at_target + at_target2, first


@triton.jit
def joined_sum(m, s, m2, s2):
    """The maximum and the sum of exponentials of two states that have nothing else."""
    to = tl.maximum(m, m2)
    return to, scaled_sum(tl.exp(shift_to(m, to)), s, tl.exp(shift_to(m2, to)), s2)


@triton.jit
def log_sum(m, s):
    """lse of a state."""
    return m + tl.log(s)


@triton.jit
def difference(e, z, z_r):
    """z − z_r where e is not 0, else 0: a column without probability counts nothing, even at −inf − (−inf)."""
    return tl.where(e == 0.0, 0.0, z - z_r)


@triton.jit
def tile_grad(
    z,
    z_r,
    is_target,
    lse,
    lse_r,
    entropy,
    sum_sq,
    kl,
    d_logprob,
    d_lse,
    d_entropy,
    d_mean,
    d_sum_sq,
    d_kl,
    ENTROPY: tl.constexpr,
    SUM_SQ: tl.constexpr,
    KL: tl.constexpr,
):
    """dL/dz [R, C] from values and gradients [R] of the row statistics; d_mean is already divided by V."""
    log_p = z - lse[:, None]
    p = tl.exp(log_p)
    factor = tl.broadcast_to((d_lse - d_logprob - 2.0 * d_sum_sq)[:, None], z.shape)
    if ENTROPY:
        factor -= d_entropy[:, None] * tl.where(p == 0.0, 0.0, log_p + entropy[:, None])
    if SUM_SQ:
        factor += p * (2.0 * d_sum_sq * tl.exp(-sum_sq))[:, None]
    if KL:
        log_ratio = tl.where(p == 0.0, 0.0, (z - z_r) - (lse - lse_r)[:, None])
        factor += d_kl[:, None] * (log_ratio - kl[:, None])
    return p * factor + d_mean[:, None] + tl.where(is_target, d_logprob[:, None], 0.0)
