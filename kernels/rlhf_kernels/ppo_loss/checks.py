"""Argument checks that the policy loss and the value loss share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss.reference import accumulate_dtype


def check_tensors(required: dict[str, Tensor], optional: dict[str, Tensor | None], mask: Tensor) -> None:
    """All must be floating tensors with shape and device of the first; the mask may have any real dtype."""
    first_name, first = next(iter(required.items()))
    present = {name: x for name, x in optional.items() if x is not None}
    for name, x in (*required.items(), *present.items(), ("mask", mask)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if name != "mask" and not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if name == "mask" and x.is_complex():
            raise TypeError(f"mask: expected bool or 0/1 numbers, got {x.dtype}")
        if x.shape != first.shape:
            raise ValueError(f"{name}: expected the shape of {first_name} {tuple(first.shape)}, got {tuple(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{name}: expected the device of {first_name} ({first.device}), got {x.device}")


def as_denom(denom: float | Tensor, like: Tensor) -> Tensor:
    """denom as a 0-d tensor on `like`'s device. A tensor is not read back: that would wait for the device."""
    dtype = accumulate_dtype(like)
    if isinstance(denom, Tensor):
        if denom.dim() != 0:
            raise ValueError(f"denom: expected a number or a 0-d tensor, got shape {tuple(denom.shape)}")
        return denom.detach().to(device=like.device, dtype=dtype)
    if not (math.isfinite(denom) and denom > 0):
        raise ValueError(f"denom: expected a finite number > 0, got {denom!r}")
    return torch.full((), float(denom), dtype=dtype, device=like.device)
