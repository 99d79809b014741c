"""SDPA's kernel on the CPU: for bf16 with its backward pass in fp32, and for heads with sinks.

The forward pass for bf16 is torch's own kernel, bit for bit.

torch's fused backward works in small bf16 products, and on sequences of a hundred tokens takes ten times its forward
pass. The same kernel on fp32 copies takes half of that, and rounds the gradients once. From a few hundred tokens on the
bf16 one is as fast, and stays.

A sink is a logit of a head that joins the softmax's denominator and has no value. With ℓ the log-sum-exp of a row's
scores, ℓ' = log(e^ℓ + e^sink) is that of scores and sink, and the row's output is out · σ(ℓ − sink). Of the softmax,
SDPA's backward pass takes a row's output and ℓ alone. Given the scaled output and ℓ', its gradients are those with the
sink. The sink's own gradient is the sum over rows of −e^(sink − ℓ') (grad · out).
"""

from __future__ import annotations

from typing import Any

import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.hydra.eager import is_eager

LONGEST = 256
"""Tokens up to which the backward pass in fp32 is the faster one."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether this backward pass is wanted: bf16 on the CPU, gradients on, a short sequence."""
    return (
        is_eager()
        and query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.shape[-1] == value.shape[-1]
        and 1 < query.shape[2] <= LONGEST
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


def serves_sinks(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's kernel is there for such heads: on the CPU, not in place of the `reference` kernels."""
    return (
        is_eager()
        and query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16)
        and query.shape[-1] == value.shape[-1]
        and registry.default_backend() != "reference"
    )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    band: torch.Tensor | None,
    scale: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[n, L, H, D] for query [n, H, L, D], key and value [n, K, S, D], sinks [H]; causal, or under a bool mask."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    mask = None if band is None else torch.zeros_like(band, dtype=query.dtype).masked_fill_(~band, -torch.inf)
    out: torch.Tensor = _Attention.apply(query, key, value, sinks, mask, scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        out, lse = _forward(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)
        if sinks is not None:
            sink = sinks.to(lse.dtype)[None, :, None]
            out = (out * torch.sigmoid(lse - sink)[..., None]).to(query.dtype)
            lse = torch.logaddexp(lse, sink)
        ctx.save_for_backward(query, key, value, mask, out, lse, sinks)
        ctx.scale = scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *tensors, mask, out, lse, sinks = ctx.saved_tensors
        dtype = grad.dtype
        wide = torch.float32 if dtype == torch.bfloat16 and out.shape[2] <= LONGEST else dtype
        query, key, value, out, grad = (x.to(wide) for x in (*tensors, out, grad))
        mask = None if mask is None else mask.to(wide)
        found = _backward(grad, query, key, value, out, lse, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
        of_sinks = None
        if ctx.needs_input_grad[3]:
            share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
            of_sinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return (*(x.to(dtype) for x in found), of_sinks, None, None)
