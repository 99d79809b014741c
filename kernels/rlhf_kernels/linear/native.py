"""Products of a linear layer in C++ (csrc/cpu/linear.cpp).

Same functions and arguments as `reference`. A row's bits depend on that row alone. bf16 and fp16 cost what fp32
costs where the CPU has no products of them: they become floats on the way to the registers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kernels import native
from rlhf_kernels.linear import packed

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Why the native code cannot serve such tensors, or None."""
    reason = native.unsupported(device_type, torch.float32)
    if reason is None and dtype not in _TYPES:
        return f"it computes in {', '.join(map(str, _TYPES))}, not in {dtype}"
    return reason


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [.., M] = x [.., K] Wᵀ + b, dense."""
    (M, K), dtype = weight.shape, x.dtype
    y = x.new_empty((*x.shape[:-1], M))
    rows, W = _rows(x), _unit_inner_stride(weight)
    bias = None if bias is None else bias.contiguous()  # held while its address is read
    b = 0 if bias is None else native.dense("bias", bias, dtype)
    native.extension().linear_forward(
        _TYPES[dtype], *native.rows("x", rows, dtype), *native.rows("weight", W, dtype), b, y.data_ptr(), M,
        rows.shape[0], K, M, native.threads(),
    )  # fmt: skip
    return y


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dx [.., K] = dy [.., M] W; a frozen W is packed once, see `packed`."""
    (M, K), dtype = weight.shape, dy.dtype
    dx = dy.new_empty((*dy.shape[:-1], K))
    rows, W = _rows(dy), _unit_inner_stride(weight)
    address, stride = native.rows("weight", W, dtype)
    kept = packed.of(weight, _TYPES[dtype], address, stride) if W is weight else None
    native.extension().linear_input_gradient(
        _TYPES[dtype], *native.rows("dy", rows, dtype), address, stride, 0 if kept is None else kept.data_ptr(),
        dx.data_ptr(), K, rows.shape[0], K, M, native.threads(),
    )  # fmt: skip
    return dx


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [M, K] = dyᵀ x over all rows."""
    dy, x = _rows(dy), _rows(x)
    (N, M), K, dtype = dy.shape, x.shape[1], dy.dtype
    dw = dy.new_empty((M, K))
    native.extension().linear_weight_gradient(
        _TYPES[dtype], *native.rows("dy", dy, dtype), *native.rows("x", x, dtype), dw.data_ptr(), K, N, K, M,
        native.threads(),
    )  # fmt: skip
    return dw


def _rows(x: Tensor) -> Tensor:
    """All rows of x as a matrix whose columns lie side by side."""
    return _unit_inner_stride(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))


def _unit_inner_stride(x: Tensor) -> Tensor:
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
