"""`decode_step` in plain torch, op by op as transformers' modules go; in float64 it is the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_kernels.decode_attention.reference import forward as attention
from rlhf_kernels.decode_step.model import Decoder, DecoderLayer, StepAdapter, check_caches
from rlhf_kernels.llama_ops.reference import rotary
from rlhf_kernels.lora.reference import compute_dtype
from rlhf_kernels.runtime import autocast


class Step:
    """A decoder and its slots, in torch."""

    def __init__(self, decoder: Decoder, adapters: Sequence[StepAdapter]) -> None:
        self._decoder, self._adapters = decoder, adapters

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        table: Tensor,
    ) -> Tensor:
        """See `DecodeStep.__call__`."""
        d = self._decoder
        check_caches(keys, values, d)
        block = keys[0].shape[1]
        if tokens.is_cpu:
            _check_range("tokens", tokens, 0, d.embedding.shape[0])
            _check_range("slots", slots, -1, len(self._adapters))
            _check_range("positions", positions, 0, min(cos.shape[0], table.shape[1] * block))
        page = table.gather(1, (positions // block)[:, None])[:, 0]
        if tokens.is_cpu:
            _check_range("table", page, 0, keys[0].shape[0])
        rows = [(a, (slots == s).nonzero()[:, 0]) for s, a in enumerate(self._adapters)]
        c, s = cos[positions][:, None], sin[positions][:, None]  # [N, 1, D]
        x = d.embedding[tokens]
        for i, layer in enumerate(d.layers):
            u = _norm(x, layer.input_norm, d.eps)
            q, k, v = (
                _linear(u, layer, name, i, rows).unflatten(-1, (-1, 1, d.head_dim)) for name in "qkv"
            )  # [N, heads, 1, D]
            if layer.q_norm is not None:
                q = _norm(q, layer.q_norm, d.eps)
            if layer.k_norm is not None:
                k = _norm(k, layer.k_norm, d.eps)
            q, k = rotary(q, k, c, s)
            keys[i][page, positions % block] = k[:, :, 0]
            values[i][page, positions % block] = v[:, :, 0]
            seen = table if layer.window is None else _seen(table, positions, layer.window, block)
            attended = attention(q[:, :, 0], keys[i], values[i], positions + 1, seen, d.scale, layer.window, None)
            x = x + _linear(attended.flatten(1), layer, "o", i, rows)
            u = _norm(x, layer.mlp_norm, d.eps)
            inner = F.silu(_linear(u, layer, "gate", i, rows)) * _linear(u, layer, "up", i, rows)
            x = x + _linear(inner, layer, "down", i, rows)
        return _norm(x, d.final_norm, d.eps)


_Rows = list[tuple[StepAdapter, Tensor]]  # a slot and the rows that carry it


def _linear(x: Tensor, layer: DecoderLayer, name: str, i: int, rows: _Rows) -> Tensor:
    projection = getattr(layer, name)
    with autocast.off(x):
        y = F.linear(x, projection.weight, projection.bias)
        for adapter, index in rows:
            if name in adapter.pairs[i] and index.numel():
                A, B = adapter.pairs[i][name]
                wide = compute_dtype(x, A, B)
                delta = (x[index].to(wide) @ A.to(wide).T * adapter.scale) @ B.to(wide).T
                y[index] = (y[index].to(wide) + delta).to(y.dtype)
    return y


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _seen(table: Tensor, positions: Tensor, window: int, block: int) -> Tensor:
    """The table with block 0 before every row's window, where anything may stand."""
    first = (positions + 1 - window).clamp_min(0) // block
    return table.masked_fill(torch.arange(table.shape[1], device=table.device) < first[:, None], 0)


def _check_range(name: str, index: Tensor, low: int, high: int) -> None:
    wrong = index[(index < low) | (index >= high)]
    if wrong.numel():
        raise ValueError(f"{name}: expected {low} to {high - 1}, got {int(wrong[0])}")
