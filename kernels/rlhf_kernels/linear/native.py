"""Products of a linear layer in C++ (csrc/cpu/linear.cpp).

Same functions and arguments as `reference`. A row's bits depend on that row alone. bf16 and fp16 cost what fp32
costs where the CPU has no products of them: they become floats on the way to the registers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kernels.linear import packed
from rlhf_kernels.runtime import native

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None."""
    reason = native.unsupported(device_type, torch.float32)
    if reason is None and dtype not in _TYPES:
        return f"it computes in {', '.join(map(str, _TYPES))}, not in {dtype}"
    return reason


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [.., M] = x [.., K] Wᵀ + b, dense. A W that lies as [K, M], turned, is read so, with the same bits."""
    if _is_turned(weight):
        return _across(x, weight.t(), bias)
    return _along(x, weight, bias)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dx [.., K] = dy [.., M] W; a frozen W is packed once, see `packed`."""
    if _is_turned(weight):
        return _along(dy, weight.t(), None)
    return _across(dy, weight, None)


def _along(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[.., M] = x [.., K] Wᵀ + b, along the rows of W [M, K]."""
    (M, K), dtype = _sizes(weight), x.dtype
    y = x.new_empty((*x.shape[:-1], M))
    rows, W = _rows(x), native.unit_inner_stride(weight)
    bias, b = _bias(bias, dtype, M)
    native.extension().linear_forward(
        native.type_number("x", dtype, _TYPES), *native.rows("x", rows, dtype, (rows.shape[0], K)),
        *native.rows("weight", W, dtype), b, y.data_ptr(), M, rows.shape[0], K, M, native.threads(),
    )  # fmt: skip
    return y


def _across(dy: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[.., K] = dy [.., M] W + b, across the rows of W [M, K]."""
    (M, K), dtype = _sizes(weight), dy.dtype
    dx = dy.new_empty((*dy.shape[:-1], K))
    rows, W = _rows(dy), native.unit_inner_stride(weight)
    address, stride = native.rows("weight", W, dtype)
    number = native.type_number("dy", dtype, _TYPES)
    kept = packed.of(weight, number, address, stride) if W is weight else None
    bias, b = _bias(bias, dtype, K)
    native.extension().linear_input_gradient(
        number, *native.rows("dy", rows, dtype, (rows.shape[0], M)), address, stride,
        0 if kept is None else kept.data_ptr(), b,
        dx.data_ptr(), K, rows.shape[0], K, M, native.threads(),
    )  # fmt: skip
    return dx


def _is_turned(weight: Tensor) -> bool:
    """Whether W [M, K] lies in memory as [K, M] does, with dense rows."""
    return weight.dim() == 2 and weight.stride(0) == 1 and weight.stride(1) >= weight.shape[0] > 1


def _bias(bias: Tensor | None, dtype: torch.dtype, size: int) -> tuple[Tensor | None, int]:
    """A bias, to be held while its address is read, and the address; 0 for none."""
    if bias is None:
        return None, 0
    bias = bias.contiguous()
    return bias, native.dense("bias", bias, dtype, (size,))


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [M, K] = dyᵀ x over all rows."""
    dy, x = _rows(dy), _rows(x)
    (N, M), K, dtype = dy.shape, x.shape[1], dy.dtype
    dw = dy.new_empty((M, K))
    native.extension().linear_weight_gradient(
        native.type_number("dy", dtype, _TYPES), *native.rows("dy", dy, dtype), *native.rows("x", x, dtype, (N, K)),
        dw.data_ptr(), K, N, K, M, native.threads(),
    )  # fmt: skip
    return dw


def _rows(x: Tensor) -> Tensor:
    """All rows of x as a matrix whose columns lie side by side."""
    return native.unit_inner_stride(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))


def _sizes(weight: Tensor) -> tuple[int, int]:
    if weight.dim() != 2:
        raise ValueError(f"weight: expected shape [M, K], got {tuple(weight.shape)}")
    return weight.shape  # type: ignore[return-value]
