"""`ppo_loss` and `value_loss` in C++ (csrc/cpu/ppo_loss.cpp): outputs, addresses; functions as in `reference`.

bfloat16 inputs are read as they are; other dtypes that differ from the one computed in, and tensors that are not
contiguous, are converted by torch first. A mask that is not bool becomes weights of the dtype computed in; a weight
that is 0 there leaves its token out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import native
from . import reference
from .reference import KL_ESTIMATORS, accumulate_dtype

_KL_CODE = {name: code for code, name in enumerate(KL_ESTIMATORS)}


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Why the native code cannot serve such tensors, or None. Narrower types are computed in float32."""
    return native.unsupported(device_type, dtype if dtype == torch.float64 else torch.float32)


def _input(argument: str, x: Tensor | None, count: int, dtype: torch.dtype) -> Tensor | None:
    """`x` as the C++ code reads it: contiguous, in `dtype` or, where that is float32, in bfloat16."""
    if x is None:
        return None
    if not x.is_cpu:
        raise ValueError(f"{argument}: expected a CPU tensor, got one on {x.device}")
    if x.numel() != count:
        raise ValueError(f"{argument}: expected {count} elements, got {x.numel()}")
    if x.dtype != dtype and (x.dtype != torch.bfloat16 or dtype == torch.float64):
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()


def _mask(mask: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`mask` as the C++ code reads it: bool, or weights in `dtype`."""
    if mask.dtype is torch.bool:
        return _input("mask", mask, count, torch.bool)
    return _input("mask", mask.to(dtype), count, dtype)


def _addresses(*inputs: Tensor | None) -> tuple[int, ...]:
    """The addresses (0 for None), and then as bits which inputs are bfloat16."""
    addresses, narrow = [], 0
    for bit, x in enumerate(inputs):
        if x is None:
            addresses.append(0)
        else:
            addresses.append(x.data_ptr())
            if x.dtype is torch.bfloat16:
                narrow |= 1 << bit
    return (*addresses, narrow)


def forward(
    new_logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    denom: Tensor,
    ref_logprob: Tensor | None,
    entropy: Tensor | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [9] in the order of `PpoLossOutputs` after `loss`, and ∂loss/∂new_logprob [N]."""
    dtype, count = accumulate_dtype(new_logprob), new_logprob.numel()
    inputs = (
        _input("new_logprob", new_logprob, count, dtype),
        _input("old_logprob", old_logprob, count, dtype),
        _input("advantage", advantage, count, dtype),
        _input("ref_logprob", ref_logprob, count, dtype),
        _input("entropy", entropy, count, dtype),
    )
    mask, denom = _mask(mask, count, dtype), _input("denom", denom.to(dtype), 1, dtype)
    loss = torch.empty((), dtype=dtype)
    statistics = torch.empty(9, dtype=dtype)
    dloss = torch.empty(new_logprob.shape, dtype=dtype)
    native.function("ppo_loss_forward", dtype)(
        *_addresses(*inputs),
        mask.data_ptr(),
        mask.dtype is not torch.bool,
        denom.data_ptr(),
        1 - clip_low,
        1 + clip_high,
        math.inf if dual_clip is None else dual_clip,
        _KL_CODE[kl],
        kl_coef,
        entropy_coef,
        count,
        native.threads(),
        loss.data_ptr(),
        statistics.data_ptr(),
        dloss.data_ptr(),
    )
    return loss, statistics, dloss


def backward(
    grad_loss: Tensor,
    dloss: Tensor,
    mask: Tensor,
    denom: Tensor,
    entropy_coef: float,
    need_new_logprob: bool,
    need_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients to new_logprob and entropy, [N] each; size 0 for the one that nobody needs."""
    empty = dloss.new_empty(0)
    grad_new = grad_loss * dloss if need_new_logprob else empty
    if not need_entropy:
        return grad_new, empty
    dtype, count = dloss.dtype, dloss.numel()
    grad_loss, denom = grad_loss.to(dtype), _input("denom", denom.to(dtype), 1, dtype)
    mask, grad_entropy = _mask(mask, count, dtype), torch.empty(dloss.shape, dtype=dtype)
    native.function("ppo_loss_entropy_gradient", dtype)(
        native.address("grad_loss", grad_loss, dtype),
        mask.data_ptr(),
        mask.dtype is not torch.bool,
        denom.data_ptr(),
        entropy_coef,
        count,
        native.threads(),
        grad_entropy.data_ptr(),
    )
    return grad_new, grad_entropy


def value_forward(
    value: Tensor, old_value: Tensor | None, ret: Tensor, mask: Tensor, denom: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [6] in the order of `ValueLossOutputs` after `loss`, and ∂loss/∂value [N]."""
    dtype, count = accumulate_dtype(value), value.numel()
    inputs = (
        _input("value", value, count, dtype),
        None if clip is None else _input("old_value", old_value, count, dtype),
        _input("ret", ret, count, dtype),
    )
    mask, denom = _mask(mask, count, dtype), _input("denom", denom.to(dtype), 1, dtype)
    loss = torch.empty((), dtype=dtype)
    statistics = torch.empty(6, dtype=dtype)
    dloss = torch.empty(value.shape, dtype=dtype)
    native.function("value_loss_forward", dtype)(
        *_addresses(*inputs),
        mask.data_ptr(),
        mask.dtype is not torch.bool,
        denom.data_ptr(),
        0.0 if clip is None else clip,
        count,
        native.threads(),
        loss.data_ptr(),
        statistics.data_ptr(),
        dloss.data_ptr(),
    )
    return loss, statistics, dloss


value_backward = reference.value_backward
