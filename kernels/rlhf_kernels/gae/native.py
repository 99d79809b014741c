"""`gae` and `whiten` in C++ (csrc/cpu/gae.cpp, csrc/cpu/whiten.cpp): checks, outputs, addresses.

Same functions and shapes as `reference`. Rows may be strided; a tensor whose inner stride is not 1 (a
transposed one, an expanded gradient) is copied first.
"""

from __future__ import annotations

import torch

from rlhf_kernels.runtime import native


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None. Narrower types arrive as float32."""
    return native.unsupported(device_type, dtype if dtype == torch.float64 else torch.float32)


def forward(
    reward: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    bootstrap: torch.Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """reward, value: [B, T]; mask: bool [B, T]; bootstrap: [B] or None → advantage, ret: [B, T]."""
    dtype, shape = reward.dtype, reward.shape
    reward, value, mask = map(native.unit_inner_stride, (reward, value, mask))
    bootstrap = None if bootstrap is None else bootstrap.contiguous()
    advantage, ret = reward.new_empty(shape), reward.new_empty(shape)
    native.function("gae_forward", dtype)(
        *native.rows("reward", reward, dtype),
        *native.rows("value", value, dtype, shape),
        *native.rows("mask", mask, torch.bool, shape),
        0 if bootstrap is None else native.dense("bootstrap", bootstrap, dtype, shape[:1]),
        *shape,
        gamma,
        lam,
        native.threads(),
        native.dense("advantage", advantage, dtype),
        native.dense("ret", ret, dtype),
    )
    return advantage, ret


def backward(
    grad_advantage: torch.Tensor, grad_ret: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_advantage, grad_ret: [B, T]; mask: bool [B, T] → d_reward, d_value: [B, T], d_bootstrap: [B]."""
    dtype, shape = grad_advantage.dtype, grad_advantage.shape
    grad_advantage, grad_ret, mask = map(native.unit_inner_stride, (grad_advantage, grad_ret, mask))
    d_reward, d_value = grad_advantage.new_empty(shape), grad_advantage.new_empty(shape)
    d_bootstrap = grad_advantage.new_empty(shape[0])
    native.function("gae_backward", dtype)(
        *native.rows("grad_advantage", grad_advantage, dtype),
        *native.rows("grad_ret", grad_ret, dtype, shape),
        *native.rows("mask", mask, torch.bool, shape),
        *shape,
        gamma,
        lam,
        native.threads(),
        native.dense("d_reward", d_reward, dtype),
        native.dense("d_value", d_value, dtype),
        native.dense("d_bootstrap", d_bootstrap, dtype),
    )
    return d_reward, d_value, d_bootstrap


def masked_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float64 [3]: number, sum and sum of squares of the unmasked elements."""
    x, mask = x.contiguous(), mask.contiguous()
    moments = x.new_empty(3, dtype=torch.float64)
    native.function("masked_moments", x.dtype)(
        native.dense("x", x, x.dtype),
        native.dense("mask", mask, torch.bool, x.shape),
        x.numel(),
        native.threads(),
        native.dense("moments", moments, torch.float64),
    )
    return moments


def whiten_forward(
    x: torch.Tensor, mask: torch.Tensor, moments: torch.Tensor | None, shift_mean: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, mask: one shape; moments: float64 [3] or None → y: like x, stats: float64 [3] = (n, mean, rstd)."""
    dtype = x.dtype
    x, mask = x.contiguous(), mask.contiguous()
    moments = None if moments is None else moments.contiguous()
    y, stats = torch.empty(x.shape, dtype=dtype), torch.empty(3, dtype=torch.float64)
    native.function("whiten_forward", dtype)(
        native.address("x", x, dtype),
        native.address("mask", mask, torch.bool, x.shape),
        0 if moments is None else native.address("moments", moments, torch.float64, (3,)),
        x.numel(),
        shift_mean,
        eps,
        native.threads(),
        y.data_ptr(),
        stats.data_ptr(),
    )
    return y, stats


def whiten_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    stats: torch.Tensor,
    shift_mean: bool,
    constant_moments: bool,
) -> torch.Tensor:
    """grad, x, mask: one shape; stats: what the forward returned → d_x, like x."""
    dtype = x.dtype
    grad, x, mask = grad.contiguous(), x.contiguous(), mask.contiguous()
    d_x = torch.empty(x.shape, dtype=dtype)
    native.function("whiten_backward", dtype)(
        native.address("grad", grad, dtype, x.shape),
        native.address("x", x, dtype),
        native.address("mask", mask, torch.bool, x.shape),
        native.dense("stats", stats, torch.float64, (3,)),
        x.numel(),
        shift_mean,
        constant_moments,
        native.threads(),
        d_x.data_ptr(),
    )
    return d_x
