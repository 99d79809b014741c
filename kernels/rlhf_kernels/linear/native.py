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
    """y [.., M] = x [.., K] Wᵀ + b, dense."""
    (M, K), dtype = _sizes(weight), x.dtype
    y = x.new_empty((*x.shape[:-1], M))
    rows, W = _rows(x), native.unit_inner_stride(weight)
    bias = None if bias is None else bias.contiguous()  # held while its address is read
    b = 0 if bias is None else native.dense("bias", bias, dtype, (M,))
    native.extension().linear_forward(
        native.type_number("x", dtype, _TYPES), *native.rows("x", rows, dtype, (rows.shape[0], K)),
        *native.rows("weight", W, dtype), b, y.data_ptr(), M, rows.shape[0], K, M, native.threads(),
    )  # fmt: skip
    return y


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dx [.., K] = dy [.., M] W; a frozen W is packed once, see `packed`."""
    (M, K), dtype = _sizes(weight), dy.dtype
    dx = dy.new_empty((*dy.shape[:-1], K))
    rows, W = _rows(dy), native.unit_inner_stride(weight)
    address, stride = native.rows("weight", W, dtype)
    number = native.type_number("dy", dtype, _TYPES)
    kept = packed.of(weight, number, address, stride) if W is weight else None
    native.extension().linear_input_gradient(
        number, *native.rows("dy", rows, dtype, (rows.shape[0], M)), address, stride,
        0 if kept is None else kept.data_ptr(),
        dx.data_ptr(), K, rows.shape[0], K, M, native.threads(),
    )  # fmt: skip
    return dx


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
