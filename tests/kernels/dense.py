"""What ops over the vocabulary have to equal: matrices of logits, in torch's own ops and the dtype of the inputs."""

from __future__ import annotations

from typing import Any

import torch
from rlhf_kernels.vocab.logits import OUTPUTS
from torch import Tensor

DIFFERENTIABLE = tuple(name for name in OUTPUTS if name != "is_top1")


def heated(z: Tensor, temperature: Any) -> Tensor:
    """Logits [..., V] over a temperature, or one for each row."""
    return z / (temperature[..., None].to(z.dtype) if isinstance(temperature, Tensor) else temperature)


def logits(
    hidden: Tensor, weight: Tensor, *, bias: Any = None, softcap: Any = None, logit_scale: Any = None, lora: Any = None
) -> Tensor:
    """Logits [N, V] before the temperature."""
    z = hidden @ weight.T
    if lora is not None:
        z = z + lora.scale * (hidden @ lora.A.to(z.dtype).T) @ lora.B.to(z.dtype).T
    if bias is not None:
        z = z + bias.to(z.dtype)
    if logit_scale is not None:
        z = logit_scale * z
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def statistics(z: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Every output of rows of logits [..., V]; zeros where the target is to be ignored."""
    log_p = torch.log_softmax(z, -1)
    finite = log_p.clamp_min(torch.finfo(z.dtype).min)  # 0 · −∞ is nothing
    outputs = {
        "logprob": log_p.gather(-1, target.clamp_min(0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * finite).sum(-1),
        "lse": torch.logsumexp(z, -1),
        "is_top1": (z.argmax(-1) == target).to(z.dtype),
        "mean_logit": z.mean(-1),
        "log_sum_sq_prob": torch.logsumexp(2 * log_p, -1),
    }
    return {name: torch.where(target != -100, x, 0.0) for name, x in outputs.items()}


def dense(hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: Any = 1.0, **head: Any) -> dict[str, Tensor]:
    """Every output of `linear_logprob`."""
    return statistics(heated(logits(hidden, weight, **head), temperature), target)


def make(
    n: int, h: int, v: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and target."""
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(n, h, generator=g)).to(dtype).requires_grad_(grad)
    weight = torch.randn(v, h, generator=g).to(dtype).requires_grad_(grad)
    return hidden, weight, torch.randint(0, v, (n,), generator=g)


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().double().requires_grad_(x.requires_grad) for x in tensors)
