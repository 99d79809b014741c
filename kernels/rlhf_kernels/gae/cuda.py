"""`gae` and `whiten` in CUDA (csrc/cuda/gae.cu, csrc/cuda/whiten.cu): outputs, workspaces, addresses.

Same functions and shapes as `reference`. `gae` takes any strides; `whiten` copies what is not contiguous. Nothing is
read back and nothing waited for: calls can be captured in a CUDA graph (make one call before, it loads the library).
"""

from __future__ import annotations

import torch

from rlhf_kernels.runtime import cuda_support
from rlhf_kernels.runtime.cuda_support import address, matrix


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
    bootstrap = None if bootstrap is None else bootstrap.contiguous()
    advantage, ret = reward.new_empty(shape), reward.new_empty(shape)
    cuda_support.call(
        "gae_forward",
        dtype,
        reward.device,
        *matrix("reward", reward, dtype),
        *matrix("value", value, dtype),
        *matrix("mask", mask, torch.bool),
        address("bootstrap", bootstrap, dtype),
        *shape,
        gamma,
        lam,
        address("advantage", advantage, dtype),
        address("ret", ret, dtype),
    )
    return advantage, ret


def backward(
    grad_advantage: torch.Tensor, grad_ret: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_advantage, grad_ret: [B, T]; mask: bool [B, T] → d_reward, d_value: [B, T], d_bootstrap: [B]."""
    dtype, shape = grad_advantage.dtype, grad_advantage.shape
    d_reward, d_value = grad_advantage.new_empty(shape), grad_advantage.new_empty(shape)
    d_bootstrap = grad_advantage.new_empty(shape[0])
    cuda_support.call(
        "gae_backward",
        dtype,
        grad_advantage.device,
        *matrix("grad_advantage", grad_advantage, dtype),
        *matrix("grad_ret", grad_ret, dtype),
        *matrix("mask", mask, torch.bool),
        *shape,
        gamma,
        lam,
        address("d_reward", d_reward, dtype),
        address("d_value", d_value, dtype),
        address("d_bootstrap", d_bootstrap, dtype),
    )
    return d_reward, d_value, d_bootstrap


def masked_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float64 [3]: number, sum and sum of squares of the unmasked elements."""
    x, mask = x.contiguous(), mask.contiguous()
    moments = x.new_empty(3, dtype=torch.float64)
    scratch = cuda_support.workspace(x.numel(), x, torch.float64)
    cuda_support.call(
        "masked_moments",
        x.dtype,
        x.device,
        address("x", x, x.dtype),
        address("mask", mask, torch.bool),
        x.numel(),
        address("workspace", scratch, torch.float64),
        address("moments", moments, torch.float64),
    )
    return moments


def whiten_forward(
    x: torch.Tensor, mask: torch.Tensor, moments: torch.Tensor | None, shift_mean: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, mask: one shape; moments: float64 [3] or None → y: like x, stats: float64 [3] = (n, mean, rstd)."""
    x, mask = x.contiguous(), mask.contiguous()
    moments = None if moments is None else moments.contiguous()
    y, stats = torch.empty_like(x), x.new_empty(3, dtype=torch.float64)
    scratch = cuda_support.workspace(x.numel(), x, torch.float64)
    cuda_support.call(
        "whiten_forward",
        x.dtype,
        x.device,
        address("x", x, x.dtype),
        address("mask", mask, torch.bool),
        address("moments", moments, torch.float64),
        x.numel(),
        shift_mean,
        eps,
        address("workspace", scratch, torch.float64),
        address("y", y, x.dtype),
        address("stats", stats, torch.float64),
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
    grad, x, mask = grad.contiguous(), x.contiguous(), mask.contiguous()
    d_x = torch.empty_like(x)
    scratch = cuda_support.workspace(x.numel(), x, torch.float64)
    cuda_support.call(
        "whiten_backward",
        x.dtype,
        x.device,
        address("grad", grad, x.dtype),
        address("x", x, x.dtype),
        address("mask", mask, torch.bool),
        address("stats", stats, torch.float64),
        x.numel(),
        shift_mean,
        constant_moments,
        address("workspace", scratch, torch.float64),
        address("d_x", d_x, x.dtype),
    )
    return d_x
