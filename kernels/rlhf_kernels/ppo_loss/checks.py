"""Argument checks and conversions that the policy loss and the value loss share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kernels.runtime.eager import eager

KL_ESTIMATORS = ("k1", "k2", "k3")


def accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """fp64 for an fp64 tensor, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_tensors(**tensors: Tensor | None) -> None:
    """All must be floating tensors with shape and device of the first; `mask` may have any real dtype.

    None is accepted for `ref_logprob`, `entropy` and `old_value`.
    """
    first_name = next(iter(tensors))
    shape = device = None
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            if x is None and name in ("ref_logprob", "entropy", "old_value"):
                continue
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if name == "mask":
            if x.is_complex():
                raise TypeError(f"mask: expected bool or 0/1 numbers, got {x.dtype}")
        elif not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if shape is None:
            shape, device = x.shape, x.device
        elif x.shape != shape:
            raise ValueError(f"{name}: expected the shape of {first_name} {tuple(shape)}, got {tuple(x.shape)}")
        elif x.device != device:
            raise ValueError(f"{name}: expected the device of {first_name} ({device}), got {x.device}")


def check_kl(kl: str) -> None:
    """Raise unless `kl` names an estimator."""
    if kl not in KL_ESTIMATORS:
        raise ValueError(f"kl: expected one of {KL_ESTIMATORS}, got {kl!r}")


def check_denom(denom: float | Tensor) -> None:
    """Raise unless a denominator is positive. A tensor must be 0-d, and is read on a CPU alone: elsewhere it waits."""
    if isinstance(denom, Tensor):
        if denom.dim() != 0:
            raise ValueError(f"denom: expected a number or a 0-d tensor, got shape {tuple(denom.shape)}")
        if not (denom.is_cpu and eager(denom)):
            return
        denom = denom.item()
    if not (math.isfinite(denom) and denom > 0):
        raise ValueError(f"denom: expected a finite number > 0, got {denom!r}")


def as_denom(denom: float | Tensor, like: Tensor) -> Tensor:
    """denom, once checked, as a 0-d tensor on `like`'s device."""
    check_denom(denom)
    dtype = accumulate_dtype(like)
    if isinstance(denom, Tensor):
        return denom.detach().to(device=like.device, dtype=dtype)
    return torch.full((), float(denom), dtype=dtype, device=like.device)


def flat(x: Tensor) -> Tensor:
    """The numbers of `x` in one dimension, without its history."""
    return x.detach().reshape(-1)


def flat_or_none(x: Tensor | None) -> Tensor | None:
    """`flat` of what was given."""
    return None if x is None else flat(x)


def is_one(grad_loss: Tensor) -> bool:
    """Whether a gradient is 1, where reading it costs nothing: then dloss is the result and needs no pass of its own.

    dloss may be handed out because it was saved: if somebody writes to it, a second backward raises.
    """
    return grad_loss.is_cpu and grad_loss.item() == 1.0


def like(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A contiguous gradient in the shape and dtype of its input."""
    grad = grad if grad.shape == shape else grad.view(shape)
    return grad if grad.dtype is dtype else grad.to(dtype)
