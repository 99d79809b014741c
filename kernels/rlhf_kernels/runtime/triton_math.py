"""Functions that `triton.language` lacks, made of exp: libdevice is neither portable nor in the interpreter.

And one product for operands of any dtypes.
"""

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


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b; UPCAST: the interpreter's bf16 is wrong.

    Products of one half type are exact; next to bf16, an fp32 operand is the sum of three bf16, which is exact, too;
    everything else runs as three TF32 products, which keeps fp32's accuracy. Tensor cores cut sums off where fp32 units
    round them, so sums of three products begin at zero and are added to `acc` by fp32 units.
    """
    if UPCAST:
        acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif (a.dtype == b.dtype) & (a.dtype != tl.float32):
        acc = tl.dot(a, b, acc)
    elif (a.dtype == tl.bfloat16) & (b.dtype == tl.float32):
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        part = tl.dot(a, (rest - middle.to(tl.float32)).to(tl.bfloat16))
        part = tl.dot(a, middle, part)
        acc += tl.dot(a, high, part)
    elif (a.dtype == tl.float32) & (b.dtype == tl.bfloat16):
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        part = tl.dot((rest - middle.to(tl.float32)).to(tl.bfloat16), b)
        part = tl.dot(middle, b, part)
        acc += tl.dot(high, b, part)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    return acc
