"""Causal attention of packed sequences in plain torch: oracle, fallback, baseline. Formulas: the package docstring.

Differentiable by autograd, in float64 too. A sequence at a time; its scores [heads, rows, keys] exist as a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_kernels.runtime import autocast


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q: [T, Hq, D], k and v: [T, Hkv, D] → [T, Hq, D] in q's dtype."""
    with autocast.off(q):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        group = q.shape[1] // k.shape[1]
        pieces = [[x.to(dtype) for x in tensor.split(list(lengths))] for tensor in (q, k, v)]
        limits = None if sinks is None else sinks.to(dtype)
        outs = []
        for i, parent in enumerate(parents):
            seen = [[piece[j] for j in ((parent, i) if parent >= 0 else (i,))] for piece in pieces[1:]]
            keys, values = (torch.cat(x).transpose(0, 1).repeat_interleave(group, 0) for x in seen)  # [Hq, S, D]
            outs.append(_attend(pieces[0][i].transpose(0, 1) * scale, keys, values, window, softcap, limits))
        out = torch.cat(outs, 1) if outs else q.to(dtype).transpose(0, 1)
        return out.transpose(0, 1).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """q: [Hq, L, D] (scaled), k and v: [Hq, S, D], of which the last L are q's own → [Hq, L, D]."""
    scores = q @ k.transpose(1, 2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)
    unseen = key > position
    if window is not None:
        unseen |= key <= position - window
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
