"""Paged decode attention in plain torch.

Equations and symbols: see the package docstring; S cache positions, G = Hq / Hkv query heads per cache head.

Unused cache positions may hold NaN. A masked score becomes −inf whatever it was, but its weight 0 times a NaN
value would still be NaN, so values are cleaned too. That is a copy, which `_attend_packed` avoids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.runtime import autocast
from rlhf_kernels.runtime.registry import is_gpu

# Up to this many features per position, one GEMM with all cache heads side by side beats a copy per head.
_PACKED_FEATURES = 256


def forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    n, n_heads, d = q.shape
    block, n_kv = k_cache.shape[1], k_cache.shape[2]
    on_cpu = not is_gpu(q.device)
    lo, hi, any_empty = 0, block_table.shape[1] * block, True  # [lo, hi): positions that any row may use
    if on_cpu and n:  # reading lengths costs little here; on a device it would stall the stream
        lo, hi, any_empty = _used_range(lengths, hi, window)
    if n == 0 or hi == lo or n_heads == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    k, v = _gather(k_cache, v_cache, lengths, block_table, lo, hi)
    limit, position = lengths[:, None], torch.arange(lo, hi, device=q.device)
    unused = position >= limit  # [N,S]
    if window is not None:
        unused |= position < limit - window
    if any_empty:  # such a row sees everything, which keeps its softmax finite, and is blanked at the end
        unused &= limit > 0
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.reshape(n, n_kv, n_heads // n_kv, d).to(dtype) * scale
    sinks = None if sinks is None else sinks.to(dtype)
    with autocast.off(q):
        out = None
        if on_cpu and n_kv * d <= _PACKED_FEATURES and k.stride(2) == v.stride(2) == d:  # heads side by side
            out = _attend_packed(grouped, k.to(dtype), v.to(dtype), unused, softcap, sinks)
        if out is None:
            out = _attend(grouped, k.to(dtype), v.to(dtype), unused, softcap, sinks)
    if any_empty:
        out = out.masked_fill(limit[:, :, None, None] <= 0, 0.0)
    return out.reshape(n, n_heads, d).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, unused: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """q [N,Hkv,G,D] (scaled), k and v [N,S,Hkv,D] → [N,Hkv,G,D]."""
    scores = _capped(q @ k.permute(0, 2, 3, 1), softcap)  # [N,Hkv,G,S]
    weights = _softmax(scores.masked_fill(unused[:, None, None], float("-inf")), sinks)
    return weights @ v.permute(0, 2, 1, 3).masked_fill(unused[:, None, :, None], 0.0)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, unused: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor | None:
    """The same through block-diagonal queries [N, Hkv·G, Hkv·D], so that k and v are read where they lie.

    None if the result is not finite: NaN may have leaked from unused positions, which `_attend` sorts out.
    If it is finite nothing can have leaked, because the weight there is exactly 0.
    """
    n, n_kv, group, d = q.shape
    packed = q.new_zeros(n, n_kv, group, n_kv, d)
    packed.diagonal(dim1=1, dim2=3).copy_(q.permute(0, 2, 3, 1))
    scores = _capped(packed.view(n, n_kv * group, n_kv * d) @ k.flatten(2).transpose(1, 2), softcap)
    bias = torch.zeros(unused.shape, dtype=q.dtype).masked_fill_(unused, float("-inf"))
    weights = _softmax(scores.add_(bias[:, None]), sinks)  # [N, Hkv·G, S]
    every_pair = (weights @ v.flatten(2)).view(n, n_kv, group, n_kv, d)
    out = every_pair.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # [N,Hkv,G,D]
    return out if bool(out.sum().isfinite()) else None


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over positions of scores [N, ..., S], whose heads [...] may each have a sink; its weight is dropped."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.view(scores.shape[1:-1])[..., None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _used_range(lengths: Tensor, capacity: int, window: int | None) -> tuple[int, int, bool]:
    """First and one past the last position that some row uses, and whether some row is empty."""
    shortest, longest = (int(x) for x in torch.aminmax(lengths))
    if shortest < 0 or longest > capacity:
        wrong = shortest if shortest < 0 else longest
        raise ValueError(f"lengths: expected 0 to {capacity} (what block_table can hold), got {wrong}")
    return (0 if window is None else max(0, shortest - window)), longest, shortest == 0


def _gather(
    k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor, lo: int, hi: int
) -> tuple[Tensor, Tensor]:
    """Positions [lo, hi) of every row, [N, hi − lo, Hkv, D] each; a view of the cache if possible."""
    n, blocks, block = block_table.shape[0], k_cache.shape[0], k_cache.shape[1]
    on_cpu = not is_gpu(block_table.device)
    first, after = lo // block, -(-hi // block)
    table = block_table[:, first:after].long()
    lo, hi = lo - first * block, hi - first * block
    own = torch.arange(n, device=table.device)
    if on_cpu and after - first == 1 and n <= blocks and torch.equal(table[:, 0], own):
        return k_cache[:n, lo:hi], v_cache[:n, lo:hi]
    start = torch.arange(first, after, device=table.device) * block
    table = table.masked_fill(start >= lengths[:, None], 0)  # unused entries mean nothing; block 0 exists
    if on_cpu:
        smallest, largest = (int(x) for x in torch.aminmax(table))
        if smallest < 0 or largest >= blocks:
            wrong = smallest if smallest < 0 else largest
            raise ValueError(f"block_table: expected block indices below {blocks}, got {wrong}")
    if after - first == 1:
        return k_cache[:, lo:hi].index_select(0, table[:, 0]), v_cache[:, lo:hi].index_select(0, table[:, 0])
    return k_cache[table].flatten(1, 2)[:, lo:hi], v_cache[table].flatten(1, 2)[:, lo:hi]
