"""`ppo_loss` and `value_loss` in C++ (csrc/cpu/ppo_loss.cpp): outputs, addresses; functions as in `reference`.

More is accepted than of other implementations (`TAKES_AS_GIVEN`), because at usual sizes the arithmetic takes less time
than preparing its arguments: per-token tensors of any one shape, which dloss has then, and denom as a number.

bfloat16 inputs are read as they are; other dtypes that differ from the one computed in, and tensors that are not
contiguous, are converted by torch first. A mask that is not bool becomes weights of the dtype computed in; a weight
that is 0 there leaves its token out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss import reference
from rlhf_kernels.ppo_loss.checks import KL_ESTIMATORS, accumulate_dtype
from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.runtime import native

TAKES_AS_GIVEN = True
_BF16 = torch.bfloat16
_KL_CODE = {name: code for code, name in enumerate(KL_ESTIMATORS)}


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None. Narrower types are computed in float32."""
    return native.unsupported(device_type, dtype if dtype == torch.float64 else torch.float32)


def _readable(argument: str, x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`x` as the C++ code reads it: contiguous, in `dtype` or, where that is float32, in bfloat16."""
    if not x.is_cpu:
        raise ValueError(f"{argument}: expected a CPU tensor, got one on {x.device}")
    if x.numel() != count:
        raise ValueError(f"{argument}: expected {count} elements, got {x.numel()}")
    if x.dtype is not dtype and (x.dtype is not _BF16 or dtype is not torch.float32):
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()


def _readable_mask(mask: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`mask` as the C++ code reads it: bool, or weights in `dtype`."""
    if mask.dtype is torch.bool:
        return _readable("mask", mask, count, torch.bool)
    return _readable("mask", mask.to(dtype), count, dtype)


def forward(
    new_logprob: Tensor, tokens: PpoTokens, entropy: Tensor | None, options: PpoOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [9] in the order of `PpoLossOutputs` after `loss`, and ∂loss/∂new_logprob."""
    dtype, count = accumulate_dtype(new_logprob), new_logprob.numel()
    new = _readable("new_logprob", new_logprob, count, dtype)
    old = _readable("old_logprob", tokens.old_logprob, count, dtype)
    advantage = _readable("advantage", tokens.advantage, count, dtype)
    ref = None if tokens.ref_logprob is None else _readable("ref_logprob", tokens.ref_logprob, count, dtype)
    entropy = None if entropy is None else _readable("entropy", entropy, count, dtype)
    mask = _readable_mask(tokens.mask, count, dtype)
    loss = torch.empty((), dtype=dtype)
    statistics = torch.empty(9, dtype=dtype)
    dloss = torch.empty(new.shape, dtype=dtype)
    native.function("ppo_loss_forward", dtype)(
        new.data_ptr(),
        old.data_ptr(),
        advantage.data_ptr(),
        0 if ref is None else ref.data_ptr(),
        0 if entropy is None else entropy.data_ptr(),
        (new.dtype is _BF16)
        | (old.dtype is _BF16) << 1
        | (advantage.dtype is _BF16) << 2
        | (ref is not None and ref.dtype is _BF16) << 3
        | (entropy is not None and entropy.dtype is _BF16) << 4,
        mask.data_ptr(),
        mask.dtype is not torch.bool,
        float(tokens.denom),
        1 - options.clip_low,
        1 + options.clip_high,
        math.inf if options.dual_clip is None else options.dual_clip,
        _KL_CODE[options.kl],
        options.kl_coef,
        options.entropy_coef,
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
    denom: Tensor | float,
    entropy_coef: float,
    need_new_logprob: bool,
    need_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients to new_logprob and entropy, like dloss; size 0 for the one that nobody needs."""
    empty = dloss.new_empty(0)
    grad_new = grad_loss * dloss if need_new_logprob else empty
    if not need_entropy:
        return grad_new, empty
    dtype, count = dloss.dtype, dloss.numel()
    mask, grad_entropy = _readable_mask(mask, count, dtype), torch.empty(dloss.shape, dtype=dtype)
    native.function("ppo_loss_entropy_gradient", dtype)(
        float(grad_loss),
        mask.data_ptr(),
        mask.dtype is not torch.bool,
        float(denom),
        entropy_coef,
        count,
        native.threads(),
        grad_entropy.data_ptr(),
    )
    return grad_new, grad_entropy


def value_forward(
    value: Tensor, old_value: Tensor | None, ret: Tensor, mask: Tensor, denom: Tensor | float, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [6] in the order of `ValueLossOutputs` after `loss`, and ∂loss/∂value."""
    dtype, count = accumulate_dtype(value), value.numel()
    value = _readable("value", value, count, dtype)
    old = None if clip is None or old_value is None else _readable("old_value", old_value, count, dtype)
    ret = _readable("ret", ret, count, dtype)
    mask = _readable_mask(mask, count, dtype)
    loss = torch.empty((), dtype=dtype)
    statistics = torch.empty(6, dtype=dtype)
    dloss = torch.empty(value.shape, dtype=dtype)
    native.function("value_loss_forward", dtype)(
        value.data_ptr(),
        0 if old is None else old.data_ptr(),
        ret.data_ptr(),
        (value.dtype is _BF16) | (old is not None and old.dtype is _BF16) << 1 | (ret.dtype is _BF16) << 2,
        mask.data_ptr(),
        mask.dtype is not torch.bool,
        float(denom),
        0.0 if clip is None else clip,
        count,
        native.threads(),
        loss.data_ptr(),
        statistics.data_ptr(),
        dloss.data_ptr(),
    )
    return loss, statistics, dloss


value_backward = reference.value_backward
