"""Functions that `triton.language` lacks, made of exp: libdevice is neither portable nor in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Accurate relative to x: a series below 0.25, where 1 − e^(−2x) would cancel."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    y = x * x
    series = x * (1.0 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885))))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(a < 0.25, series, tl.where(x < 0, -far, far))


@triton.jit
def expm1_minus(d):
    """exp(d) − 1 − d; below ½ by its series, where the difference would cancel."""
    series = 1.0 / 362880
    series = series * d + 1.0 / 40320
    series = series * d + 1.0 / 5040
    series = series * d + 1.0 / 720
    series = series * d + 1.0 / 120
    series = series * d + 1.0 / 24
    series = series * d + 1.0 / 6
    series = series * d + 0.5
    return tl.where(tl.abs(d) < 0.5, series * d * d, tl.exp(d) - 1.0 - d)


@triton.jit
def expm1(d):
    """exp(d) − 1, accurate relative to its value; −1 at −inf."""
    return tl.where(tl.abs(d) < 0.5, expm1_minus(d) + d, tl.exp(d) - 1.0)
