"""`ppo_loss` and `value_loss` in CUDA (csrc/cuda/ppo_loss.cu): outputs, workspaces, addresses.

Same functions and shapes as `reference`. Each loss is two launches (terms and partial sums per block, then one block
that adds them up), each gradient one. Inputs that are not of the accumulation dtype, or not contiguous, are converted
first; a bool mask is read as it is. Nothing is read back and nothing waited for: calls can be captured in a CUDA graph
(make one call before, it loads the library).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss.checks import KL_ESTIMATORS, accumulate_dtype
from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.runtime import cuda_support
from rlhf_kernels.runtime.cuda_support import address


def _dense(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


def _mask(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, int, bool]:
    """The mask in memory that must stay alive, its address, and whether it is bytes (else weights in `dtype`)."""
    is_bytes = mask.dtype == torch.bool
    mask = mask.contiguous() if is_bytes else mask.to(dtype).contiguous()
    return mask, address("mask", mask, mask.dtype), is_bytes


def forward(
    new_logprob: Tensor, tokens: PpoTokens, entropy: Tensor | None, options: PpoOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [9] in the order of `PpoLossOutputs` after `loss`, and ∂loss/∂new_logprob [N]."""
    dtype = accumulate_dtype(new_logprob)
    count = new_logprob.numel()
    new, old, adv = (x.to(dtype).contiguous() for x in (new_logprob, tokens.old_logprob, tokens.advantage))
    ref, ent, denom = _dense(tokens.ref_logprob, dtype), _dense(entropy, dtype), tokens.denom_tensor(dtype)
    _kept, mask_address, mask_is_bytes = _mask(tokens.mask, dtype)
    loss, statistics, slope = new.new_empty(()), new.new_empty(9), torch.empty_like(new)
    scratch = cuda_support.workspace(count, new, dtype)
    cuda_support.call(
        "ppo_loss_forward",
        dtype,
        new.device,
        address("new_logprob", new, dtype),
        address("old_logprob", old, dtype),
        address("advantage", adv, dtype),
        mask_address,
        mask_is_bytes,
        address("denom", denom, dtype),
        address("ref_logprob", ref, dtype),
        address("entropy", ent, dtype),
        count,
        1 - options.clip_low,
        1 + options.clip_high,
        options.dual_clip or 0.0,
        1 + KL_ESTIMATORS.index(options.kl),
        options.kl_coef,
        options.entropy_coef,
        address("workspace", scratch, dtype),
        address("loss", loss, dtype),
        address("statistics", statistics, dtype),
        address("slope", slope, dtype),
    )
    return loss, statistics, slope


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
    dtype, count = dloss.dtype, dloss.numel()
    grad_loss, dloss, denom = grad_loss.to(dtype), dloss.contiguous(), denom.to(dtype)
    mask, mask_address, mask_is_bytes = _mask(mask, dtype)
    grad_new = dloss.new_empty(count if need_new_logprob else 0)
    grad_entropy = dloss.new_empty(count if need_entropy else 0)
    if need_new_logprob or need_entropy:
        cuda_support.call(
            "ppo_loss_backward",
            dtype,
            dloss.device,
            address("grad_loss", grad_loss, dtype),
            address("dloss", dloss, dtype),
            mask_address,
            mask_is_bytes,
            address("denom", denom, dtype),
            entropy_coef,
            count,
            address("grad_new", grad_new, dtype) if need_new_logprob else 0,
            address("grad_entropy", grad_entropy, dtype) if need_entropy else 0,
        )
    return grad_new, grad_entropy


def value_forward(
    value: Tensor, old_value: Tensor | None, ret: Tensor, mask: Tensor, denom: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [6] in the order of `ValueLossOutputs` after `loss`, and ∂loss/∂value [N]."""
    dtype = accumulate_dtype(value)
    count = value.numel()
    v, target, denom = value.to(dtype).contiguous(), ret.to(dtype).contiguous(), denom.to(dtype)
    old = None if clip is None else _dense(old_value, dtype)
    mask, mask_address, mask_is_bytes = _mask(mask, dtype)
    loss, statistics, slope = v.new_empty(()), v.new_empty(6), torch.empty_like(v)
    scratch = cuda_support.workspace(count, v, dtype)
    cuda_support.call(
        "value_loss_forward",
        dtype,
        v.device,
        address("value", v, dtype),
        address("old_value", old, dtype),
        address("ret", target, dtype),
        mask_address,
        mask_is_bytes,
        address("denom", denom, dtype),
        count,
        clip or 0.0,
        address("workspace", scratch, dtype),
        address("loss", loss, dtype),
        address("statistics", statistics, dtype),
        address("slope", slope, dtype),
    )
    return loss, statistics, slope


def value_backward(grad_loss: Tensor, dloss: Tensor) -> Tensor:
    """Gradient to value, [N]."""
    dtype = dloss.dtype
    grad_loss, dloss = grad_loss.to(dtype), dloss.contiguous()
    grad = torch.empty_like(dloss)
    cuda_support.call(
        "ppo_loss_backward",
        dtype,
        dloss.device,
        address("grad_loss", grad_loss, dtype),
        address("dloss", dloss, dtype),
        0,
        True,
        0,
        0.0,
        dloss.numel(),
        address("grad", grad, dtype),
        0,
    )
    return grad
