"""Attention of one query token per row over a paged key/value cache, for decoding.

For row n with length L, query head h and its cache head c = h // (Hq / Hkv), over positions s in [lo, L):

    z_s = scale · q_h · k_{c,s};   with softcap: z_s = softcap · tanh(z_s / softcap)
    o_h = Σ_s softmax(z)_s v_{c,s};   lo = 0, or max(0, L − window)

With sinks, one logit per query head joins the softmax's denominator and has no value:

    o_h = Σ_s e^(z_s) v_{c,s} / (e^(sink_h) + Σ_s e^(z_s)) = (o_h without it) · sigmoid(log Σ_s e^(z_s) − sink_h)

A sink of −inf is none. NaN and +inf make NaN of their head, as a score would.

Position s of row n is entry s % block of block `block_table[n, s // block]`. A row of length 0 gives zeros.

Symbols: q [N,Hq,D]; k_cache, v_cache [blocks, block, Hkv, D], any strides (a view will do); sinks [Hq]; lengths [N]
and block_table [N,max_blocks], int32 or int64. What stands in `block_table` past a row's length, and
in the cache past it or before its window, may be anything, NaN and wild indices included.

dtypes: q and caches of one floating dtype in and out, sinks of that or fp32; scores, softmax and sums in fp32 (fp64
for fp64). Deterministic. Inference only: there is no backward pass.

On CPU a length above the table's capacity or a used block index out of range raises ValueError. On a device
nothing is read back, so such indices are the caller's responsibility there; a longer length counts as the capacity.

Source: Kwon et al. 2023 (paged attention); Shazeer 2019 and Ainslie et al. 2023 (shared key/value heads);
OpenAI 2025 (sinks of gpt-oss).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.decode_attention import native, reference
from rlhf_kernels.runtime import eager, registry, triton_support
from rlhf_kernels.runtime.signature import check_window

__all__ = ["decode_attention"]

registry.register("decode_attention", "reference", reference)
registry.register(
    "decode_attention", "triton", registry.Lazy("rlhf_kernels.decode_attention.triton", triton_support.unsupported)
)
registry.register("decode_attention", "cpu", native)


def _check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Raise TypeError for sinks of a dtype that is neither q's nor float32."""
    if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"sinks: expected the dtype of q ({q.dtype}) or float32, got {sinks.dtype}")


@eager.custom_op(
    "rlhf_kernels::decode_attention",
    "q: D[N, heads, d], k_cache: D[blocks, block, kv_heads, d], v_cache: D[blocks, block, kv_heads, d], "
    "lengths: int[N], block_table: int[N, most], sinks: float[heads]",
    also=lambda given: _check_sinks(given.q, given.sinks),
)
def _decode_attention_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    return registry.implementation("decode_attention", backend).forward(
        q, k_cache, v_cache, lengths, block_table, scale, window, softcap, sinks
    )


@_decode_attention_op.register_fake
def _(q, *args):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of one query token per row over a paged cache (Kwon et al. 2023); equations: the module's docstring.

    Inference only. All tensors are on one device.

    Args:
        q: [N, Hq, D], floating; queries. Hq is a multiple of Hkv.
        k_cache: [blocks, block, Hkv, D], of q's dtype and any strides; keys.
        v_cache: of k_cache's shape and q's dtype; values.
        lengths: [N], int32 or int64; a row's query sees positions below its length. 0 gives zeros.
        block_table: [N, max_blocks], int32 or int64; entry j is the block of the row's positions from j · block on.
        scale: factor of the scores, usually D^−½.
        window: integer ≥ 1, number of last positions that a query sees. None: all.
        softcap: number > 0, the bound of |scores|. None: no bound.
        sinks: [Hq], of q's dtype or float32; a logit of each head in the softmax's denominator. None: no such logit.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        Attention output [N, Hq, D] in q's dtype.

    Raises:
        TypeError: a dtype is not the one above.
        ValueError: a shape or device does not fit, window or softcap is out of its range, or backend is unknown.
        ValueError: a tensor requires grad while gradients are enabled.
        ValueError: a length or block index is out of range; the CPU alone checks it.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    if q.dim() != 3:
        raise ValueError(f"q: expected shape [N, Hq, D], got {tuple(q.shape)}")
    if not q.is_floating_point():
        raise TypeError(f"q: expected a floating dtype, got {q.dtype}")
    n, n_heads, d = q.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape[3] != d:
            raise ValueError(f"{name}: expected shape [blocks, block, Hkv, {d}], got {tuple(cache.shape)}")
        if cache.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q ({q.dtype}), got {cache.dtype}")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache: expected the shape of k_cache {tuple(k_cache.shape)}, got {tuple(v_cache.shape)}")
    if k_cache.shape[2] == 0 or n_heads % k_cache.shape[2]:
        raise ValueError(f"q: expected a multiple of the cache's {k_cache.shape[2]} heads, got {n_heads}")
    for name, index, dim in (("lengths", lengths, 1), ("block_table", block_table, 2)):
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected int32 or int64, got {index.dtype}")
        if index.dim() != dim or index.shape[0] != n:
            raise ValueError(f"{name}: expected {dim} dims with {n} rows like q, got {tuple(index.shape)}")
    if sinks is not None and sinks.shape != (n_heads,):
        raise ValueError(f"sinks: expected shape [{n_heads}], one number for each head of q, got {tuple(sinks.shape)}")
    _check_sinks(q, sinks)
    others = {"k_cache": k_cache, "v_cache": v_cache, "lengths": lengths, "block_table": block_table, "sinks": sinks}
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: expected the device of q ({q.device}), got {x.device}")
    check_window("window", window)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected None or a number > 0, got {softcap!r}")
    wanted = (x is not None and x.requires_grad for x in (q, k_cache, v_cache, sinks))
    if torch.is_grad_enabled() and any(wanted):
        raise ValueError("requires_grad: expected tensors without it, or torch.no_grad(); this op is inference only")
    return _decode_attention_op(
        q,
        k_cache,
        v_cache,
        lengths,
        block_table,
        float(scale),
        window,
        None if softcap is None else float(softcap),
        sinks,
        registry.resolve("decode_attention", backend, q, (d,)),
    )
