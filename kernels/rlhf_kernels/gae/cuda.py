"""`gae` in CUDA (csrc/cuda/gae.cu): outputs, addresses.

Same functions and shapes as `reference`, with any strides. Nothing is read back and nothing waited for: calls can be
captured in a CUDA graph (make one call before, it loads the library).
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
