"""RMS norm, rotary embedding, SwiGLU and activations as transformers writes them, in torch; autograd does the rest."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """x: [..., H], weight: [H] → like x. Statistics in float32, rounded to x's dtype before the weight comes in.

    With `plus_one` the factors 1 + weight come in before it is rounded, as in Gemma.
    """
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (wide * rstd * (1.0 + weight.float())).to(x.dtype)
    return weight * (wide * rstd).to(x.dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: [B, heads, T, D], cos, sin: [1 or B, T, D] → like q and k."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _turn_a_quarter(q) * sin, k * cos + _turn_a_quarter(k) * sin


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up: one shape → like them."""
    return torch.nn.functional.silu(gate) * up


def activation(x: Tensor, kind: str) -> Tensor:
    """x: any shape → like it; kind: one of `rlhf_kernels.llama_ops.native.KINDS`."""
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _turn_a_quarter(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)
