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
    """q: [T, Hq, D], k and v: [T, Hkv, D] → [T, Hq, D] in q's dtype, rounded once."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with autocast.off(q):
        q_wide, k_wide, v_wide = (x.to(dtype) for x in (q, k, v))
        return in_its_dtype(q_wide, k_wide, v_wide, lengths, parents, scale, window, softcap, sinks).to(q.dtype)


def in_its_dtype(
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
    """The same as eager ops of q's dtype, each of which rounds."""
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (x.split(list(lengths)) for x in (q, k, v))
    sinks = None if sinks is None else sinks.to(q.dtype)
    outs = []
    for i, parent in enumerate(parents):
        members = (parent, i) if parent >= 0 else (i,)
        k, v = (torch.cat([x[j] for j in members]).transpose(0, 1) for x in (keys, values))  # [Hkv, S, D]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        outs.append(_attend(queries[i].transpose(0, 1) * scale, k, v, window, softcap, sinks))
    if not outs:  # nothing, with gradients
        return q + 0.0 * sum(x.sum() for x in (k, v, sinks) if x is not None)
    return torch.cat(outs, 1).transpose(0, 1)


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
