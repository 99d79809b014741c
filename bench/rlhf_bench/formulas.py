"""PPO's formulas in plain torch, left to autograd: what a trainer writes by hand, and what torch.compile gets.

They compute the same statistics as the kernels, so that nobody wins by computing less.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLIP = 0.2


def ppo_policy(
    new_logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor, denom: float
) -> tuple[Tensor, Tensor]:
    """Clipped policy loss [] and statistics [6]: policy loss, clipped low, high, approximate KL, ratio mean, max."""
    log_ratio = new_logprob - old_logprob
    ratio = log_ratio.exp()
    terms = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
    weight = mask.to(terms.dtype)
    loss = (weight * terms).sum() / denom
    with torch.no_grad():
        low = (weight * ((advantage < 0) & (ratio < 1 - CLIP))).sum() / denom
        high = (weight * ((advantage > 0) & (ratio > 1 + CLIP))).sum() / denom
        approx_kl = (weight * (torch.expm1(log_ratio) - log_ratio)).sum() / denom
        mean = (weight * ratio).sum() / denom
        highest = torch.where(mask, ratio, 0.0).max()
        statistics = torch.stack([loss.detach(), low, high, approx_kl, mean, highest])
    return loss, statistics


def ppo_full(
    new_logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    ref_logprob: Tensor,
    entropy: Tensor,
    denom: float,
    kl_coef: float,
    entropy_coef: float,
) -> tuple[Tensor, Tensor]:
    """`ppo_policy` with a k3 penalty and an entropy bonus; statistics [9] in the order of `PpoLossOutputs`."""
    loss, s = ppo_policy(new_logprob, old_logprob, advantage, mask, denom)
    weight = mask.to(new_logprob.dtype)
    d = ref_logprob - new_logprob
    kl = (weight * (torch.expm1(d) - d)).sum() / denom
    bonus = (weight * entropy).sum() / denom
    loss = loss + kl_coef * kl - entropy_coef * bonus
    head = torch.stack([s[0], kl.detach(), bonus.detach(), s[1] + s[2]])
    return loss, torch.cat([head, s[1:]])


def clipped_value(value: Tensor, old_value: Tensor, ret: Tensor, mask: Tensor, denom: float) -> tuple[Tensor, Tensor]:
    """Clipped value loss [] and statistics [6] in the order of `ValueLossOutputs`."""
    weight = mask.to(value.dtype)
    clipped = old_value + (value - old_value).clamp(-CLIP, CLIP)
    plain_error, clipped_error = (value - ret).square(), (clipped - ret).square()
    loss = 0.5 * (weight * torch.maximum(plain_error, clipped_error)).sum() / denom
    with torch.no_grad():
        error = weight * (ret - value)
        clip_fraction = (weight * (clipped_error > plain_error)).sum() / denom
        sums = [weight.sum(), error.sum(), (error * (ret - value)).sum()]
        statistics = torch.stack([clip_fraction, *sums, (weight * ret).sum(), (weight * ret * ret).sum()])
    return loss, statistics


def whitened(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean 0 and unbiased variance 1 over unmasked elements, 0 elsewhere."""
    weight = mask.to(x.dtype)
    n = weight.sum()
    mean = (weight * x).sum() / n
    variance = (weight * (x - mean).square()).sum() / (n - 1)
    return weight * (x - mean) * torch.rsqrt(variance + eps)


def log_ratios(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """log(π/π_old): nine in ten small, the others far outside the clip range, none near its borders.

    A ratio at a border would make the gradient's error a matter of luck: it jumps there.
    """
    x = torch.empty(shape, device=device)
    small = x.uniform_(-0.12, 0.12, generator=generator).clone()
    far = x.uniform_(0.3, 0.5, generator=generator).clone()
    sign = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
    return torch.where(x.uniform_(generator=generator) < 0.9, small, far * sign)
