"""`attention` in Triton, and `decode_attention` as exact mode has it: one kernel, so that a row's bits are the same.

A program attends from a tile of queries of one sequence, and from all heads that share one key head. Keys come in
blocks of `BS` positions that begin at multiples of it, one after the other; no partial results are joined. A tile has
the same size whether it holds many queries or one, so its products are the same instructions. A row's bits depend on
its keys alone: blocks that a row does not see add zeros to it.

Scores are products of the inputs' own dtype, summed in fp32. Weights, and the gradients of scores, are rounded to the
inputs' dtype for their products, as in FlashAttention; the softmax's denominator adds the unrounded ones.
Gradients have a fixed order without atomics: of a query over its keys; of a key over the queries of its own sequence,
then over those of the sequences that share it.

A row's result is not affected by keys that it does not see, unless one of its own sequence is not finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.runtime.device_tables import Cache, upload
from rlhf_kernels.runtime.triton_math import dot, tanh
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase
from rlhf_kernels.vocab.triton_logits import exponentials, scaled_sum, shift_to

QUERY_WIDTH, KEY_WIDTH, MEMBER_WIDTH = 5, 6, 3
_QUERY, _KEY, _MEMBER = tl.constexpr(QUERY_WIDTH), tl.constexpr(KEY_WIDTH), tl.constexpr(MEMBER_WIDTH)
STAGES = 2


@triton.jit
def _heads_at(row, head, stride_row, stride_head, stride_inner, r, d, GROUP: tl.constexpr, GP: tl.constexpr):
    """Offsets [BM, BD] of a tile's queries: place r holds head r % GP of the row row[r]."""
    heads = head * GROUP + r % GP
    return (row * stride_row + heads * stride_head)[:, None] + d[None, :].to(tl.int64) * stride_inner


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr):
    """z [BM, BS] of queries [BM, BD] and keys [BD, BS], before masks."""
    z = dot(q, k, tl.zeros((BM, BS), tl.float32), UPCAST) * scale
    if SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def _seen(position, of_query, window, WINDOW: tl.constexpr):
    """Whether the query at each position [BM] sees the key at each position [BS]."""
    seen = position[None, :] <= of_query[:, None]
    if WINDOW:
        seen = seen & (position[None, :] > of_query[:, None] - window)
    return seen


@triton.jit(do_not_specialize=["n_positions", "window"])
def attend_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D], or paged [blocks, block, Hkv, D]
    v_ptr,
    sink_ptr,  # [Hq] or None
    out_ptr,  # out [T, Hq, D], dense
    totals_ptr,  # out [T, Hq, 2] fp32: m and l; None where paged
    tile_ptr,  # [tiles, 5]: first row of the sequence, its first position, parent's first row, first query, queries
    length_ptr,  # paged: [T], positions that each row sees
    table_ptr,  # paged: [T, max_blocks]
    n_heads,
    n_positions,  # paged: that the table holds
    block,
    q_row,
    q_head,
    q_inner,
    k_block,
    k_row,
    k_head,
    k_inner,
    v_block,
    v_row,
    v_head,
    v_inner,
    sink_stride,
    length_stride,
    table_row,
    table_column,
    scale,
    window,
    softcap,
    PAGED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    GP: tl.constexpr,  # ≥ GROUP, a power of two
    D: tl.constexpr,
    BM: tl.constexpr,  # a multiple of GP
    BD: tl.constexpr,  # ≥ D and 16, a power of two
    BS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    r, d = tl.arange(0, BM), tl.arange(0, BD)
    if PAGED:
        own = tl.program_id(0).to(tl.int64)
        length = tl.load(length_ptr + own * length_stride)
        after = tl.minimum(tl.maximum(length, 0), n_positions).to(tl.int32)
        base, parent, lowest = after - 1, own, after - 1
        query, queries = r // GP, 1
    else:
        at = tile_ptr + tl.program_id(0).to(tl.int64) * _QUERY
        own, parent = tl.load(at), tl.load(at + 2)
        base, first, queries = tl.load(at + 1).to(tl.int32), tl.load(at + 3).to(tl.int32), tl.load(at + 4).to(tl.int32)
        query = first + r // GP
        after, lowest = base + tl.minimum(first + BM // GP, queries), base + first
    live = (r % GP < GROUP) & (query < queries)
    rows, of_query = own + query, base + query
    begin = after * 0
    if WINDOW:
        begin = tl.maximum(lowest + 1 - window, 0)
    at_q = _heads_at(rows, head, q_row, q_head, q_inner, r, d, GROUP, GP)
    q = tl.load(q_ptr + at_q, mask=live[:, None] & (d < D)[None, :], other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    s = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, BD), tl.float32)
    for start in range(begin // BS * BS, after, BS):
        position = start + tl.arange(0, BS)
        used = (position >= begin) & (position < after)
        if PAGED:
            column = (position // block).to(tl.int64) * table_column
            page = tl.load(table_ptr + own * table_row + column, mask=used, other=0).to(tl.int64)
            inside = (position % block).to(tl.int64)
            at_k, at_v = page * k_block + inside * k_row, page * v_block + inside * v_row
        else:
            inside = tl.where(position < base, parent + position, own + position - base)
            at_k, at_v = inside * k_row, inside * v_row
        k = tl.load(
            k_ptr + (at_k + head * k_head)[None, :] + d[:, None].to(tl.int64) * k_inner,
            mask=used[None, :] & (d < D)[:, None],
            other=0.0,
        )
        # Before the scores, so that both tiles are on their way at once
        v = tl.load(
            v_ptr + (at_v + head * v_head)[:, None] + d[None, :].to(tl.int64) * v_inner,
            mask=used[:, None] & (d < D)[None, :],
            other=0.0,
        )
        z = _scores(q, k, scale, softcap, SOFTCAP, UPCAST, BM, BS)
        z = tl.where(used[None, :] & _seen(position, of_query, window, WINDOW), z, float("-inf"))
        to = tl.maximum(m, tl.max(z, 1))
        _, e = exponentials(z, to)
        a = tl.exp(shift_to(m, to))
        m = to
        s = tl.fma(s, a, tl.sum(e, 1))
        total = dot(e.to(v.dtype), v, total * a[:, None], UPCAST)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + (head * GROUP + r % GP) * sink_stride, mask=live, other=0.0).to(tl.float32)
        to = tl.maximum(m, sink)
        a = tl.exp(shift_to(m, to))
        s = scaled_sum(a, s, tl.exp(shift_to(sink, to)), tl.full((BM,), 1.0, tl.float32))
        total *= a[:, None]
        m = to
    out = total / s[:, None]
    if PAGED:
        out = tl.where(after > 0, out, 0.0)  # 0 / 0 in an empty row
    place = rows * n_heads + head * GROUP + r % GP
    at_out = out_ptr + place[:, None] * D + d[None, :]
    tl.store(at_out, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    if not PAGED:
        tl.store(totals_ptr + place * 2, m, mask=live)
        tl.store(totals_ptr + place * 2 + 1, s, mask=live)


@triton.jit
def _score_gradient(z, dp, m, s, delta, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """p and the gradient of the product q · k, both [BM, BS]; zero where a query does not see a key."""
    p = tl.where(seen, tl.exp(z - m[:, None]) / s[:, None], 0.0)
    dz = p * (dp - delta[:, None])
    if SOFTCAP:
        part = z / softcap
        dz *= 1.0 - part * part
    return p, tl.where(seen, dz * scale, 0.0)


@triton.jit(do_not_specialize=["window"])
def query_gradient_kernel(
    d_out_ptr,  # [T, Hq, D]
    q_ptr,
    k_ptr,  # [T, Hkv, D]
    v_ptr,
    out_ptr,  # [T, Hq, D], dense
    totals_ptr,  # [T, Hq, 2]
    d_q_ptr,  # out [T, Hq, D], dense
    delta_ptr,  # out [T, Hq] fp32: do · o
    tile_ptr,  # as in `attend_kernel`
    n_heads,
    g_row,
    g_head,
    g_inner,
    q_row,
    q_head,
    q_inner,
    k_row,
    k_head,
    k_inner,
    v_row,
    v_head,
    v_inner,
    scale,
    window,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    r, d = tl.arange(0, BM), tl.arange(0, BD)
    at = tile_ptr + tl.program_id(0).to(tl.int64) * _QUERY
    own, parent = tl.load(at), tl.load(at + 2)
    base, first, queries = tl.load(at + 1).to(tl.int32), tl.load(at + 3).to(tl.int32), tl.load(at + 4).to(tl.int32)
    query = first + r // GP
    live = (r % GP < GROUP) & (query < queries)
    rows, of_query = own + query, base + query
    after, begin = base + tl.minimum(first + BM // GP, queries), base * 0
    if WINDOW:
        begin = tl.maximum(base + first + 1 - window, 0)
    whole = live[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + _heads_at(rows, head, q_row, q_head, q_inner, r, d, GROUP, GP), mask=whole, other=0.0)
    g = tl.load(d_out_ptr + _heads_at(rows, head, g_row, g_head, g_inner, r, d, GROUP, GP), mask=whole, other=0.0)
    place = rows * n_heads + head * GROUP + r % GP
    dense = place[:, None] * D + d[None, :]
    out = tl.load(out_ptr + dense, mask=whole, other=0.0)
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + place, delta, mask=live)
    m = tl.load(totals_ptr + place * 2, mask=live, other=0.0)
    s = tl.load(totals_ptr + place * 2 + 1, mask=live, other=1.0)
    total = tl.zeros((BM, BD), tl.float32)
    for start in range(begin // BS * BS, after, BS):
        position = start + tl.arange(0, BS)
        used = (position >= begin) & (position < after)
        inside = tl.where(position < base, parent + position, own + position - base)
        keys = used[:, None] & (d < D)[None, :]
        at_d = d[None, :].to(tl.int64)
        k = tl.load(k_ptr + (inside * k_row + head * k_head)[:, None] + at_d * k_inner, mask=keys, other=0.0)
        v = tl.load(v_ptr + (inside * v_row + head * v_head)[:, None] + at_d * v_inner, mask=keys, other=0.0)
        z = _scores(q, tl.trans(k), scale, softcap, SOFTCAP, UPCAST, BM, BS)
        dp = dot(g, tl.trans(v), tl.zeros((BM, BS), tl.float32), UPCAST)
        seen = used[None, :] & live[:, None] & _seen(position, of_query, window, WINDOW)
        _, dz = _score_gradient(z, dp, m, s, delta, seen, scale, softcap, SOFTCAP)
        total = dot(dz.to(q.dtype), k, total, UPCAST)
    tl.store(d_q_ptr + dense, total.to(d_q_ptr.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["window"])
def key_gradient_kernel(
    d_out_ptr,  # [T, Hq, D]
    q_ptr,
    k_ptr,  # [T, Hkv, D]
    v_ptr,
    totals_ptr,  # [T, Hq, 2]
    delta_ptr,  # [T, Hq]
    d_k_ptr,  # out [T, Hkv, D], dense
    d_v_ptr,
    tile_ptr,  # [tiles, 6]: first row and position of the sequence, first key, keys, bounds of its members
    member_ptr,  # [members, 3]: first row, first position and queries of a sequence that sees the keys
    n_heads,
    n_kv,
    g_row,
    g_head,
    g_inner,
    q_row,
    q_head,
    q_inner,
    k_row,
    k_head,
    k_inner,
    v_row,
    v_head,
    v_inner,
    scale,
    window,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    r, d = tl.arange(0, BM), tl.arange(0, BD)
    at = tile_ptr + tl.program_id(0).to(tl.int64) * _KEY
    own, base, first = tl.load(at), tl.load(at + 1).to(tl.int32), tl.load(at + 2).to(tl.int32)
    keys, members, end_members = tl.load(at + 3).to(tl.int32), tl.load(at + 4), tl.load(at + 5)
    key = first + tl.arange(0, BS)
    position = base + key
    lowest, highest = base + first, base + tl.minimum(first + BS, keys) - 1
    used = (key < keys)[:, None] & (d < D)[None, :]
    at_d = d[None, :].to(tl.int64)
    k = tl.load(k_ptr + ((own + key) * k_row + head * k_head)[:, None] + at_d * k_inner, mask=used, other=0.0)
    v = tl.load(v_ptr + ((own + key) * v_row + head * v_head)[:, None] + at_d * v_inner, mask=used, other=0.0)
    d_k, d_v = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BD), tl.float32)
    for member in range(members, end_members):
        at_member = member_ptr + member * _MEMBER
        its, its_base = tl.load(at_member), tl.load(at_member + 1).to(tl.int32)
        end = tl.load(at_member + 2).to(tl.int32)
        queries = end
        if WINDOW:
            end = tl.minimum(end, highest + window - its_base)
        for start in range(tl.maximum(lowest - its_base, 0) // (BM // GP) * (BM // GP), end, BM // GP):
            query = start + r // GP
            live = (r % GP < GROUP) & (query < queries)
            rows = its + query
            whole = live[:, None] & (d < D)[None, :]
            q = tl.load(q_ptr + _heads_at(rows, head, q_row, q_head, q_inner, r, d, GROUP, GP), mask=whole, other=0.0)
            at_g = _heads_at(rows, head, g_row, g_head, g_inner, r, d, GROUP, GP)
            g = tl.load(d_out_ptr + at_g, mask=whole, other=0.0)
            place = rows * n_heads + head * GROUP + r % GP
            m = tl.load(totals_ptr + place * 2, mask=live, other=0.0)
            s = tl.load(totals_ptr + place * 2 + 1, mask=live, other=1.0)
            delta = tl.load(delta_ptr + place, mask=live, other=0.0)
            z = _scores(q, tl.trans(k), scale, softcap, SOFTCAP, UPCAST, BM, BS)
            dp = dot(g, tl.trans(v), tl.zeros((BM, BS), tl.float32), UPCAST)
            seen = live[:, None] & (key < keys)[None, :] & _seen(position, its_base + query, window, WINDOW)
            p, dz = _score_gradient(z, dp, m, s, delta, seen, scale, softcap, SOFTCAP)
            d_v = dot(tl.trans(p.to(q.dtype)), g, d_v, UPCAST)
            d_k = dot(tl.trans(dz.to(q.dtype)), q, d_k, UPCAST)
    dense = (((own + key) * n_kv + head) * D)[:, None] + d[None, :]
    tl.store(d_k_ptr + dense, d_k.to(d_k_ptr.dtype.element_ty), mask=used)
    tl.store(d_v_ptr + dense, d_v.to(d_v_ptr.dtype.element_ty), mask=used)


# ---- launches --------------------------------------------------------------------------------------------------------


class QueryTiles(NamedTuple):
    """Table of the tiles of queries of one packing, on its device."""

    rows: Tensor
    """int64 [tiles, 5], see `attend_kernel`."""


class KeyTiles(NamedTuple):
    """Tables of the tiles of keys of one packing, on its device."""

    rows: Tensor
    """int64 [tiles, 6], see `key_gradient_kernel`."""
    members: Tensor
    """int64 [members, 3], sequences that see the keys of a sequence: itself, then its children in order."""


_TILES = Cache(1 << 8)
"""Tables by packing, which all layers share; those of earlier batches are not used again."""


def query_tiles(lengths: Sequence[int], parents: Sequence[int], size: int, device: torch.device) -> QueryTiles:
    """Tiles of so many queries."""

    def make() -> QueryTiles:
        starts, bases = _places(lengths, parents)
        rows = [
            [starts[i], bases[i], starts[max(parents[i], 0)], first, length]
            for i, length in enumerate(lengths)
            for first in range(0, length, size)
        ]
        return QueryTiles(upload(rows, QUERY_WIDTH, device))

    return _TILES.get(("queries", tuple(lengths), tuple(parents), size), device, make)


def key_tiles(lengths: Sequence[int], parents: Sequence[int], size: int, device: torch.device) -> KeyTiles:
    """Tiles of so many keys."""

    def make() -> KeyTiles:
        starts, bases = _places(lengths, parents)
        children: list[list[int]] = [[] for _ in lengths]
        for i, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(i)
        rows: list[list[int]] = []
        members: list[list[int]] = []
        for i, length in enumerate(lengths):
            begin = len(members)
            members += [[starts[j], bases[j], lengths[j]] for j in (i, *children[i]) if lengths[j]]
            rows += [[starts[i], bases[i], first, length, begin, len(members)] for first in range(0, length, size)]
        return KeyTiles(upload(rows, KEY_WIDTH, device), upload(members, MEMBER_WIDTH, device))

    return _TILES.get(("keys", tuple(lengths), tuple(parents), size), device, make)


def _places(lengths: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """First row and first position of each sequence."""
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    return starts, [0 if parent < 0 else lengths[parent] for parent in parents]


# Queries times heads, keys and warps of a program, by kernel, for heads of at most so many bytes of padded features.
# What registers and shared memory hold without spills (`rlhf_kernels.runtime.aot`); float32 heads of 256 do spill.
_HALF = {
    "attend": {128: (64, 64, 4), 256: (64, 64, 8), 512: (64, 32, 8)},
    "query_gradient": {128: (64, 64, 4), 256: (64, 64, 8), 512: (64, 32, 8)},
    "key_gradient": {128: (64, 64, 8), 256: (32, 64, 8), 512: (32, 32, 8)},
}
_FLOAT = {
    "attend": {256: (32, 32, 4), 512: (32, 32, 8), 1024: (16, 16, 8)},
    "query_gradient": {256: (32, 32, 8), 512: (16, 16, 8), 1024: (16, 16, 8)},
    "key_gradient": {256: (16, 32, 8), 512: (16, 16, 8), 1024: (16, 16, 8)},
}


def tile_sizes(kernel: str, group: int, d: int, item: int) -> dict[str, int]:
    """Tile and warps of a kernel for values of `item` bytes: a function of the heads alone, never of rows.

    Decoding has the tile of many queries for its one: another would be other instructions, and other bits.
    """
    padded, block_d = triton.next_power_of_2(group), max(16, triton.next_power_of_2(d))
    sizes = (_FLOAT if item == 4 else _HALF)[kernel]
    rows, keys, warps = next((x for most, x in sizes.items() if block_d * item <= most), (16, 16, 8))
    return {
        "GROUP": group,
        "GP": padded,
        "D": d,
        "BM": max(rows, padded),
        "BD": block_d,
        "BS": keys,
        "num_warps": warps,
    }


def _options(kernel: str, q: Tensor, n_kv: int, most: int, window: int | None, softcap: float | None) -> dict[str, Any]:
    """Constants of a launch."""
    return tile_sizes(kernel, q.shape[1] // n_kv, q.shape[2], q.element_size()) | {
        "WINDOW": window is not None and window < most,
        "SOFTCAP": softcap is not None,
        "UPCAST": INTERPRETED,
        "num_stages": STAGES,
        "enable_fp_fusion": False,  # a product and a sum are rounded where the code says so, in every variant
    }


def longest(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """Positions that the last query of some sequence sees at most, without a window."""
    return max((n + (lengths[p] if p >= 0 else 0) for n, p in zip(lengths, parents, strict=True)), default=0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D], dense; largest score and sum of exponentials, float32 [T, Hq, 2]."""
    t, n_heads, _ = q.shape
    n_kv = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    totals = torch.empty((t, n_heads, 2), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, totals
    most = longest(lengths, parents)
    options = _options("attend", q, n_kv, most, window, softcap)
    tiles = query_tiles(lengths, parents, options["BM"] // options["GP"], q.device).rows
    attend_kernel[(len(tiles), n_kv)](
        q,
        k,
        v,
        sinks,
        out,
        totals,
        tiles,
        None,
        None,
        n_heads,
        0,
        0,
        *q.stride(),
        0,
        *k.stride(),
        0,
        *v.stride(),
        0 if sinks is None else sinks.stride(0),
        0,
        0,
        0,
        scale,
        0 if window is None else min(window, most),
        softcap or 0.0,
        PAGED=False,
        **options,
    )
    return out, totals


def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    totals: Tensor,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, dense, and of sinks; those of absent sinks are float32 [0]."""
    t, n_heads, _ = q.shape
    n_kv = k.shape[1]
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty((t, n_heads), dtype=torch.float32, device=q.device)
    out, totals = out.contiguous(), totals.contiguous()
    if q.numel():
        most = longest(lengths, parents)
        strides = (*d_out.stride(), *q.stride(), *k.stride(), *v.stride())
        rule = (scale, 0 if window is None else min(window, most), softcap or 0.0)
        options = _options("query_gradient", q, n_kv, most, window, softcap)
        tiles = query_tiles(lengths, parents, options["BM"] // options["GP"], q.device).rows
        query_gradient_kernel[(len(tiles), n_kv)](
            d_out, q, k, v, out, totals, d_q, delta, tiles, n_heads, *strides, *rule, **options
        )
        options = _options("key_gradient", q, n_kv, most, window, softcap)
        of_keys = key_tiles(lengths, parents, options["BS"], q.device)
        key_gradient_kernel[(len(of_keys.rows), n_kv)](
            d_out,
            q,
            k,
            v,
            totals,
            delta,
            d_k,
            d_v,
            of_keys.rows,
            of_keys.members,
            n_heads,
            n_kv,
            *strides,
            *rule,
            **options,
        )
    if sinks is None:
        return d_q, d_k, d_v, q.new_empty(0, dtype=torch.float32)
    share = torch.exp(sinks.float() - totals[..., 0]) / totals[..., 1]
    return d_q, d_k, d_v, (share * delta).sum(0).neg().to(sinks.dtype)


def decode(
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
    """`decode_attention` with the bits of `attention`: output [N, Hq, D], dense."""
    n, n_heads, d = q.shape
    block, n_kv = k_cache.shape[1], k_cache.shape[2]
    n_positions = block_table.shape[1] * block
    out = torch.empty((n, n_heads, d), dtype=q.dtype, device=q.device)
    if out.numel() == 0 or n_positions == 0:
        return out.zero_()
    attend_kernel[(n, n_kv)](
        q,
        k_cache,
        v_cache,
        sinks,
        out,
        None,
        None,
        lengths,
        block_table,
        n_heads,
        n_positions,
        block,
        *q.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        0 if sinks is None else sinks.stride(0),
        lengths.stride(0),
        *block_table.stride(),
        scale,
        n_positions if window is None else min(window, n_positions),
        softcap or 0.0,
        PAGED=True,
        **_options("attend", q, n_kv, n_positions, window, softcap),
    )
    return out


def aot_cases() -> list[AotCase]:
    """bf16 as models train and decode: groups and single heads of 64 to 256, windows, softcap, sinks; fp16, fp32."""
    kinds = {"bf16": 2, "fp16": 2, "fp32": 4}
    fp32 = ("totals_ptr", "delta_ptr")
    tables = ("tile_ptr", "member_ptr", "length_ptr", "table_ptr")

    def signature(kernel: Any, dtype: str, constexprs: dict[str, Any]) -> dict[str, str]:
        known = dict.fromkeys(fp32, "*fp32") | dict.fromkeys(tables, "*i64")
        known |= dict.fromkeys(("scale", "softcap"), "fp32")
        kind = {n: known.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
        return {n: t for n, t in kind.items() if n not in constexprs}

    def cases(dtype: str, group: int, d: int, **options: bool) -> list[AotCase]:
        sinks = options.pop("sinks", False)
        name = ", ".join([f"{dtype}, {group} heads of {d}", *options, *(["sinks"] if sinks else [])])
        common: dict[str, Any] = {"WINDOW": False, "SOFTCAP": False, "UPCAST": False}
        common |= {n.upper(): on for n, on in options.items()}
        common |= dict.fromkeys(("q_inner", "k_inner", "v_inner"), 1)
        no_sink: dict[str, Any] = {} if sinks else {"sink_ptr": None}
        unpaged = dict.fromkeys(("length_ptr", "table_ptr")) | {"PAGED": False}
        paged = {"tile_ptr": None, "totals_ptr": None, "PAGED": True, "length_stride": 1, "table_column": 1}
        cases = []
        for kernel, more, suffix in (
            (attend_kernel, unpaged | no_sink, "packed"),
            (attend_kernel, paged | no_sink, "paged"),
            (query_gradient_kernel, {"g_inner": 1}, "packed"),
            (key_gradient_kernel, {"g_inner": 1}, "packed"),
        ):
            tile = tile_sizes(kernel.__name__.removesuffix("_kernel"), group, d, kinds[dtype])
            num_warps = tile.pop("num_warps")
            constexprs = common | more | tile
            types = signature(kernel, dtype, constexprs)
            cases.append(
                AotCase(
                    name=f"{name}, {suffix}",
                    kernel=kernel,
                    signature=types,
                    constexprs=constexprs,
                    num_warps=num_warps,
                    num_stages=STAGES,
                    enable_fp_fusion=False,
                    divisible_by_16=tuple(
                        n for n in types if n.endswith(("_ptr", "_row", "_head", "_block")) and n != "table_row"
                    ),
                )
            )
        return cases

    return [
        *cases("bf16", 4, 128),
        *cases("bf16", 7, 64),
        *cases("bf16", 1, 80, window=True),
        *cases("bf16", 2, 256, window=True, softcap=True),
        *cases("bf16", 8, 64, window=True, sinks=True),
        *cases("fp16", 4, 128),
        *cases("fp32", 4, 128),
        *cases("fp32", 7, 64),
    ]
