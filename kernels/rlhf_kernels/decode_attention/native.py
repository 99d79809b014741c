"""`decode_attention` in C++ (csrc/cpu/decode_attention.cpp): addresses and strides. Same function as `reference`.

The caches are read where they lie, whatever their strides and the table: nothing is gathered, and what no row uses is
never read. Memory beyond the output: per thread the scores of one row and one cache head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.runtime import native

_TYPES = (torch.float32, torch.bfloat16)


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None."""
    reason = native.unsupported(device_type, torch.float32)
    if reason is None and dtype not in _TYPES:
        return f"it reads {' or '.join(map(str, _TYPES))}, not {dtype}"
    return reason


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
    """Attention output [N, Hq, D], dense."""
    if q.dim() != 3 or k_cache.dim() != 4:
        raise ValueError(f"q, k_cache: expected 3 and 4 dimensions, got {tuple(q.shape)} and {tuple(k_cache.shape)}")
    n, n_heads, d = q.shape
    blocks, block, n_kv, _ = k_cache.shape
    cache = (blocks, block, n_kv, d)
    lengths, block_table = lengths.to(torch.int64).contiguous(), block_table.to(torch.int64).contiguous()
    sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
    out = torch.empty((n, n_heads, d), dtype=q.dtype)
    native.extension().decode_attention(
        native.type_number("q", q.dtype, _TYPES) == 1,
        (n, n_heads, n_kv, d),
        native.address("q", q, q.dtype),
        q.stride(),
        native.address("k_cache", k_cache, q.dtype, cache),
        k_cache.stride(),
        native.address("v_cache", v_cache, q.dtype, cache),
        v_cache.stride(),
        native.address("lengths", lengths, torch.int64, (n,)),
        native.rows("block_table", block_table, torch.int64, (n, block_table.shape[-1]))[0],
        (block_table.shape[-1], blocks, block),
        scale,
        0 if window is None else window,
        0.0 if softcap is None else softcap,
        0 if sinks is None else native.dense("sinks", sinks, torch.float32, (n_heads,)),
        out.data_ptr(),
        native.threads(),
    )
    return out
