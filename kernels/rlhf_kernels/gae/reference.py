"""`gae` and `whiten` in plain torch: oracle, fallback, benchmark baseline. Formulas: the package docstring.

`gae` is a Python loop over T, vectorised over B, in the inputs' own dtype (float32 or float64). `whiten`
computes in float64 and rounds its output once. Masked positions go through `torch.where`, never through a
product: NaN · 0 is NaN.
"""

from __future__ import annotations

import torch


def forward(
    reward: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    bootstrap: torch.Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """reward, value: [B, T]; mask: bool [B, T]; bootstrap: [B] or None → advantage, ret: [B, T]."""
    n_rows, n_columns = reward.shape
    advantage, ret = reward.new_zeros(n_rows, n_columns), reward.new_zeros(n_rows, n_columns)
    next_value = reward.new_zeros(n_rows) if bootstrap is None else bootstrap
    next_advantage = reward.new_zeros(n_rows)
    zero = reward.new_zeros(())
    for t in range(n_columns - 1, -1, -1):
        keep, v = mask[:, t], value[:, t]
        delta = (reward[:, t] + gamma * next_value) - v
        a = delta + (gamma * lam) * next_advantage
        advantage[:, t] = torch.where(keep, a, zero)
        ret[:, t] = torch.where(keep, a + v, zero)
        next_value = torch.where(keep, v, next_value)
        next_advantage = torch.where(keep, a, next_advantage)
    return advantage, ret


def backward(
    grad_advantage: torch.Tensor, grad_ret: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_advantage, grad_ret: [B, T]; mask: bool [B, T] → d_reward, d_value: [B, T], d_bootstrap: [B]."""
    n_rows, n_columns = grad_advantage.shape
    d_reward, d_value = (
        grad_advantage.new_zeros(n_rows, n_columns),
        grad_advantage.new_zeros(n_rows, n_columns),
    )
    previous = grad_advantage.new_zeros(n_rows)
    zero = grad_advantage.new_zeros(())
    for t in range(n_columns):
        keep, from_ret = mask[:, t], grad_ret[:, t]
        total = (grad_advantage[:, t] + from_ret) + (gamma * lam) * previous
        d_reward[:, t] = torch.where(keep, total, zero)
        d_value[:, t] = torch.where(keep, (gamma * previous - total) + from_ret, zero)
        previous = torch.where(keep, total, previous)
    return d_reward, d_value, gamma * previous


def masked_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float64 [3]: number, sum and sum of squares of the unmasked elements."""
    v = torch.where(mask, x.double(), 0.0)
    return torch.stack([mask.sum(dtype=torch.float64), v.sum(), v.square().sum()])


def whiten_forward(
    x: torch.Tensor, mask: torch.Tensor, moments: torch.Tensor | None, shift_mean: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, mask: one shape; moments: float64 [3] or None → y: like x, stats: float64 [3] = (n, mean, rstd)."""
    wide = x.double()
    if moments is None:
        n = mask.sum(dtype=torch.float64)
        mean = torch.where(mask, wide, 0.0).sum() / n.clamp_min(1.0)
        squares = torch.where(mask, wide - mean, 0.0).square().sum()
    else:
        n = moments[0]
        mean = moments[1] / n.clamp_min(1.0)
        squares = (moments[2] - moments[1] * mean).clamp_min(0.0)
    rstd = (squares / (n - 1.0).clamp_min(1.0) + eps).rsqrt()
    y = (wide - mean) * rstd
    if not shift_mean:
        y = y + mean
    return torch.where(mask, y, 0.0).to(x.dtype).contiguous(), torch.stack([n, mean, rstd])


def whiten_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    stats: torch.Tensor,
    shift_mean: bool,
    constant_moments: bool,
) -> torch.Tensor:
    """grad, x, mask: one shape; stats: what the forward returned → d_x, like x."""
    n, mean, rstd = stats.unbind()
    g = torch.where(mask, grad.double(), 0.0)
    d_x = rstd * g
    if not constant_moments:
        d = torch.where(mask, x.double() - mean, 0.0)
        shift = (rstd if shift_mean else rstd - 1.0) * g.sum() / n.clamp_min(1.0)
        slope = rstd**3 * (g * d).sum() / (n - 1.0).clamp_min(1.0)
        d_x = (d_x - shift) - slope * d
    return torch.where(mask, d_x, 0.0).to(x.dtype).contiguous()
