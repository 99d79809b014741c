"""PPO policy and value losses in plain torch: the per-token maths, their derivatives, and the masked sums.

The per-token functions take tensors of any equal shape, in the dtype they should compute in. Masks and denominators
come after them, so every op that ends in a PPO loss can share them. Equations: package docstring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss.checks import accumulate_dtype
from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens


class _PolicyTerms(NamedTuple):
    loss: Tensor
    dloss_dnew_logprob: Tensor
    ratio: Tensor
    clipped_low: Tensor  # bool: ratio below 1 − clip_low, and its gradient cut
    clipped_high: Tensor  # bool: ratio above 1 + clip_high or dual_clip, likewise
    approx_kl: Tensor  # r − 1 − log r


def _policy_terms(new_logprob: Tensor, old_logprob: Tensor, advantage: Tensor, options: PpoOptions) -> _PolicyTerms:
    low, high, dual_clip = 1 - options.clip_low, 1 + options.clip_high, options.dual_clip
    log_ratio = new_logprob - old_logprob
    ratio = torch.exp(log_ratio)
    unclipped = -advantage * ratio
    loss = torch.maximum(unclipped, -advantage * ratio.clamp(low, high))
    clipped_low = (advantage < 0) & (ratio < low)
    clipped_high = (advantage > 0) & (ratio > high)
    if dual_clip is not None:
        beyond = (advantage < 0) & (ratio > dual_clip)
        loss = torch.where(beyond, -advantage * dual_clip, loss)
        clipped_high = clipped_high | beyond
    # Where a bound took over the token's loss is constant in new_logprob; elsewhere d(−A r) = −A r.
    dloss = torch.where(clipped_low | clipped_high, torch.zeros_like(unclipped), unclipped)
    approx_kl = torch.expm1(log_ratio) - log_ratio
    return _PolicyTerms(loss, dloss, ratio, clipped_low, clipped_high, approx_kl)


def _kl_terms(new_logprob: Tensor, ref_logprob: Tensor, kl: str) -> tuple[Tensor, Tensor]:
    """The KL estimate per token and its plain derivative with respect to new_logprob."""
    d = ref_logprob - new_logprob
    if kl == "k1":
        return -d, torch.ones_like(d)
    if kl == "k2":
        return 0.5 * d.square(), -d
    change = torch.expm1(d)  # k3 = exp(d) − 1 − d, without the cancellation of exp(d) − 1 near d = 0
    return change - d, -change


def _masked_sum(weight: Tensor, live: Tensor, x: Tensor) -> Tensor:
    """Σ weight · x over live positions; whatever a dead position holds, NaN included, is never multiplied."""
    return torch.where(live, weight * x, torch.zeros((), dtype=weight.dtype, device=x.device)).sum()


def forward(
    new_logprob: Tensor, tokens: PpoTokens, entropy: Tensor | None, options: PpoOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [9] in the order of `PpoLossOutputs` after `loss`, and ∂loss/∂new_logprob [N]."""
    dtype = accumulate_dtype(new_logprob)
    zero = torch.zeros((), dtype=dtype, device=new_logprob.device)
    live, weight, denom = tokens.mask != 0, tokens.mask.to(dtype), tokens.denom_tensor(dtype)
    new, old, adv = new_logprob.to(dtype), tokens.old_logprob.to(dtype), tokens.advantage.to(dtype)
    policy = _policy_terms(new, old, adv, options)
    policy_loss = _masked_sum(weight, live, policy.loss) / denom
    loss, dloss = policy_loss, policy.dloss_dnew_logprob
    kl_mean = entropy_mean = zero
    if tokens.ref_logprob is not None:
        kl_value, dkl = _kl_terms(new, tokens.ref_logprob.to(dtype), options.kl)
        kl_mean = _masked_sum(weight, live, kl_value) / denom
        if options.kl_coef != 0:  # 0 · inf would poison a loss that has no KL term
            loss, dloss = loss + options.kl_coef * kl_mean, dloss + options.kl_coef * dkl
    if entropy is not None:
        entropy_mean = _masked_sum(weight, live, entropy.to(dtype)) / denom
        if options.entropy_coef != 0:
            loss = loss - options.entropy_coef * entropy_mean
    low = _masked_sum(weight, live, policy.clipped_low.to(dtype)) / denom
    high = _masked_sum(weight, live, policy.clipped_high.to(dtype)) / denom
    live_ratio = torch.where(live, policy.ratio, zero)
    statistics = torch.stack(
        [
            policy_loss,
            kl_mean,
            entropy_mean,
            low + high,
            low,
            high,
            _masked_sum(weight, live, policy.approx_kl) / denom,
            live_ratio.mul(weight).sum() / denom,
            live_ratio.amax() if live_ratio.numel() else zero,
        ]
    )
    return loss, statistics, torch.where(live, weight * dloss / denom, zero)


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
    return grad_new, -entropy_coef * grad_loss * mask.to(dloss.dtype) / denom.to(dloss.dtype)


def value_forward(
    value: Tensor, old_value: Tensor | None, ret: Tensor, mask: Tensor, denom: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [6] in the order of `ValueLossOutputs` after `loss`, and ∂loss/∂value [N]."""
    dtype = accumulate_dtype(value)
    zero = torch.zeros((), dtype=dtype, device=value.device)
    live, weight, denom = mask != 0, mask.to(dtype), denom.to(dtype)
    v, target = value.to(dtype), ret.to(dtype)
    error = v - target
    worst, dloss, clipped = error.square(), error, torch.zeros_like(live)
    if clip is not None and old_value is not None:
        old = old_value.to(dtype)
        v_clip = old + (v - old).clamp(-clip, clip)
        clipped_sq = (v_clip - target).square()
        # Inside the range old + (v − old) may round away from v; only a real clip may cut a gradient.
        clipped = ((v - old).abs() > clip) & (clipped_sq > worst)
        worst = torch.where(clipped, clipped_sq, worst)
        dloss = torch.where(clipped, zero, error)
    loss = 0.5 * _masked_sum(weight, live, worst) / denom
    statistics = torch.stack(
        [
            _masked_sum(weight, live, clipped.to(dtype)) / denom,
            weight.sum(),
            _masked_sum(weight, live, -error),
            _masked_sum(weight, live, error.square()),
            _masked_sum(weight, live, target),
            _masked_sum(weight, live, target.square()),
        ]
    )
    return loss, statistics, torch.where(live, weight * dloss / denom, zero)


def value_backward(grad_loss: Tensor, dloss: Tensor) -> Tensor:
    """Gradient to value, [N]."""
    return grad_loss * dloss
