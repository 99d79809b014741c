"""`rms_norm`, `rotary`, `swiglu` and `activation` in C++ (csrc/cpu/llama_ops.cpp): outputs and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_kernels.runtime import native

KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu")
"""Kinds of activations, in the order of `Activation` in csrc/cpu/llama_ops.h."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None."""
    if dtype not in _NAMES:
        return native.unsupported(device_type, torch.float32) or f"it serves float32 and bfloat16, not {dtype}"
    return native.unsupported(device_type, torch.float32)


def _function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    if dtype not in _NAMES:
        raise TypeError(f"{name}: expected {' or '.join(map(str, _NAMES))}, got {dtype}")
    return getattr(native.extension(), f"{name}_{_NAMES[dtype]}")  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """x: [..., H], weight: [H] → y like x, rstd: float32 [..., 1]."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    _function("rms_norm_apply", x.dtype)(
        native.address("x", x, x.dtype),
        native.address("weight", weight, x.dtype, x.shape[-1:]),
        plus_one,
        eps,
        rstd.numel(),
        x.shape[-1],
        native.threads(),
        y.data_ptr(),
        rstd.data_ptr(),
    )
    return y, rstd


def rms_norm_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, plus_one: bool) -> Tensor:
    """dy, x: [..., H], weight: [H], rstd: float32 [..., 1] → dx like x."""
    dy, x, weight, rstd = dy.contiguous(), x.contiguous(), weight.contiguous(), rstd.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype)
    _function("rms_norm_gradient", x.dtype)(
        native.address("dy", dy, x.dtype, x.shape),
        native.address("x", x, x.dtype),
        native.address("weight", weight, x.dtype, x.shape[-1:]),
        plus_one,
        native.address("rstd", rstd, torch.float32, (*x.shape[:-1], 1)),
        rstd.numel(),
        x.shape[-1],
        native.threads(),
        dx.data_ptr(),
    )
    return dx


def turned_like(x: Tensor) -> Tensor:
    """An empty tensor of x's shape [B, heads, T, D] that lies in memory as [B, T, heads, D]."""
    batch, heads, tokens, dim = x.shape
    return x.new_empty((batch, tokens, heads, dim)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x: [B, heads, T, D], cos, sin: [1 or B, T, D] → like x, as `turned_like`; `back` is the gradient's way."""
    if x.dim() != 4:
        raise ValueError(f"x: expected shape [B, heads, T, D], got {tuple(x.shape)}")
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, tokens, dim = x.shape
    angles = (batch if cos.shape[:1] == (batch,) else 1, tokens, dim)
    y = turned_like(x)
    _function("rotary_gradient" if back else "rotary_apply", cos.dtype)(
        native.address("x", x, cos.dtype),
        x.stride(0),
        x.stride(1),
        x.stride(2),
        native.address("cos", cos, cos.dtype, angles),
        native.address("sin", sin, cos.dtype, angles),
        tokens * dim if angles[0] == batch else 0,
        batch,
        heads,
        tokens,
        dim,
        native.threads(),
        y.data_ptr(),
    )
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up: one shape → like them."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty(gate.shape, dtype=gate.dtype)
    _function("swiglu_apply", gate.dtype)(
        native.address("gate", gate, gate.dtype),
        native.address("up", up, gate.dtype, gate.shape),
        gate.numel(),
        native.threads(),
        y.data_ptr(),
    )
    return y


def swiglu_gradient(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dy, gate, up: one shape → d_gate, d_up of the same."""
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty(gate.shape, dtype=gate.dtype), torch.empty(gate.shape, dtype=gate.dtype)
    _function("swiglu_gradient", gate.dtype)(
        native.address("dy", dy, gate.dtype, gate.shape),
        native.address("gate", gate, gate.dtype),
        native.address("up", up, gate.dtype, gate.shape),
        gate.numel(),
        native.threads(),
        d_gate.data_ptr(),
        d_up.data_ptr(),
    )
    return d_gate, d_up


def activation(x: Tensor, kind: str) -> Tensor:
    """x: any shape → like it; kind: one of `KINDS`."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    _function("activation_apply", x.dtype)(
        native.address("x", x, x.dtype), _number(kind), x.numel(), native.threads(), y.data_ptr()
    )
    return y


def activation_gradient(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dy, x: one shape → dx of the same; kind: one of `KINDS`."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype)
    _function("activation_gradient", x.dtype)(
        native.address("dy", dy, x.dtype, x.shape),
        native.address("x", x, x.dtype),
        _number(kind),
        x.numel(),
        native.threads(),
        dx.data_ptr(),
    )
    return dx


def _number(kind: str) -> int:
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    return KINDS.index(kind)
