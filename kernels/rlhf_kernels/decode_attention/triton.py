"""`decode_attention` in Triton: positions are cut into splits, whose sums meet in a second kernel. Same as `reference`.

A program attends from one row and one cache head to one split of the positions. It takes all query heads that share the
cache head, so that a key and a value are read once. Splits lie at fixed positions, whatever a row's length, and are
joined in their order, so a row's bits do not depend on what it is batched with; nor on the table's width, as long as
that holds no more than `MAX_SPLITS` splits of `SPLIT` positions (beyond, splits grow). Programs past a row's length, or
before its window, end at once: the host knows no length. What no row uses is never read.

A sink is no position: where splits are joined, a head's maximum and sum begin with it.

In exact mode the kernel of the op `attention` serves in their place, which has one order for training and decoding.

Scores are products of the inputs' own dtype, summed in fp32. Weights stay fp32: next to bf16 values as three bf16,
next to fp16 and fp32 as three TF32 products.

`use_variant` names two other ways that no GPU has run: weights of the values' dtype, so that a tile is one product, and
no second kernel where there is one split.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.attention import triton as attention
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_math import dot, tanh
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase
from rlhf_kernels.vocab.triton_logits import exponentials

WARPS, STAGES = 4, 3  # never by the batch
SPLIT, MAX_SPLITS = 256, 64  # positions of a split, and most splits; beyond, splits grow
JOINED = tl.constexpr(8)  # splits that are added at a time


def use_variant(*, rounded: bool = False, whole: bool = False) -> contextlib.AbstractContextManager[None]:
    """Take other ways through the kernels within a `with` block; no GPU has run them, so nothing else takes them.

    They are those of this thread, and of what a CUDA graph captures meanwhile. In exact mode they change nothing.

    Args:
        rounded: weights are rounded to the values' dtype, in the softmax's denominator, too: one product a tile. Values
            of fp32 change no bit.
        whole: one kernel does all where the table holds no more than one split. No bit changes.

    Returns:
        A context manager, for a `with` block; what was on before it comes back at its end.
    """
    return registry.use_ways("decode_attention", *["rounded"] * rounded, *["whole"] * whole)


@triton.jit
def _seen(length_ptr, row, length_stride, n_positions, window, WINDOW: tl.constexpr):
    """[first, after): the positions that a row sees."""
    length = tl.load(length_ptr + row * length_stride)
    after = tl.minimum(tl.maximum(length, 0), n_positions).to(tl.int32)
    first = after * 0
    if WINDOW:
        first = tl.maximum(after - window, 0)
    return first, after


@triton.jit
def _group_at(out_ptr, first, g, d, D: tl.constexpr):
    """Places [BG, BD] of the heads of a group, which begins with head `first` of all rows' heads."""
    return out_ptr + first * D + (g[:, None] * D + d[None, :])


@triton.jit(do_not_specialize=["n_positions", "n_splits", "split_size", "window"])
def attend_kernel(
    q_ptr,  # [N, Hq, D]
    k_ptr,  # [blocks, block, Hkv, D]
    v_ptr,
    length_ptr,  # [N]
    table_ptr,  # [N, max_blocks]
    sink_ptr,  # [Hq] or None; whole
    out_ptr,  # out [N, Hq, D]; whole: one split is all
    sum_ptr,  # out [N, Hq, splits, D] fp32: Σ e^(z−m) v of a split; not whole
    state_ptr,  # out [N, Hq, splits, 2] fp32: m and Σ e^(z−m)
    n_heads,
    n_kv,
    n_positions,  # that the table holds
    n_splits,
    split_size,  # a multiple of BS
    block,
    q_row,
    q_head,
    q_inner,
    k_block,
    k_position,
    k_head,
    k_inner,
    v_block,
    v_position,
    v_head,
    v_inner,
    sink_stride,
    length_stride,
    table_row,
    table_column,
    scale,
    window,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUNDED: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per cache head
    D: tl.constexpr,
    BG: tl.constexpr,  # ≥ GROUP and 16, a power of two
    BD: tl.constexpr,  # ≥ D and 16, a power of two
    BS: tl.constexpr,
):
    row = (tl.program_id(0) // n_kv).to(tl.int64)
    head = (tl.program_id(0) % n_kv).to(tl.int64)
    split = tl.program_id(1)
    first, after = _seen(length_ptr, row, length_stride, n_positions, window, WINDOW)
    begin = tl.maximum(split * split_size, first // BS * BS)
    end = tl.minimum((split + 1) * split_size, after)
    if out_ptr is None:  # noqa: SIM102
        if begin >= end:
            return
    g, d = tl.arange(0, BG), tl.arange(0, BD)
    own = (g < GROUP)[:, None] & (d < D)[None, :]
    heads = head * GROUP + g
    if out_ptr is not None:  # noqa: SIM102
        if begin >= end:  # an empty row
            tl.store(_group_at(out_ptr, row * n_heads + head * GROUP, g, d, D), 0.0, mask=own)
            return
    at = row * q_row + heads[:, None] * q_head + d[None, :].to(tl.int64) * q_inner
    q = tl.load(q_ptr + at, mask=own, other=0.0)
    m = tl.full((BG,), float("-inf"), tl.float32)
    s = tl.zeros((BG,), tl.float32)
    total = tl.zeros((BG, BD), tl.float32)
    for start in range(begin, end, BS):
        position = start + tl.arange(0, BS)
        used = (position >= first) & (position < end)
        column = (position // block).to(tl.int64) * table_column
        page = tl.load(table_ptr + row * table_row + column, mask=used, other=0).to(tl.int64)
        inside = (position % block).to(tl.int64)
        keys = page * k_block + inside * k_position + head * k_head
        k = tl.load(
            k_ptr + keys[None, :] + d[:, None].to(tl.int64) * k_inner,
            mask=used[None, :] & (d < D)[:, None],
            other=0.0,
        )
        # Before the scores, so that both tiles are on their way at once
        values = page * v_block + inside * v_position + head * v_head
        v = tl.load(
            v_ptr + values[:, None] + d[None, :].to(tl.int64) * v_inner,
            mask=used[:, None] & (d < D)[None, :],
            other=0.0,
        )
        z = dot(q, k, tl.zeros((BG, BS), tl.float32), UPCAST) * scale
        if SOFTCAP:
            z = softcap * tanh(z / softcap)
        z = tl.where(used[None, :], z, float("-inf"))
        to = tl.maximum(m, tl.max(z, 1))
        _, e = exponentials(z, to)
        a = tl.exp(m - tl.where(to == float("-inf"), 0.0, to))
        m = to
        if ROUNDED:
            e = e.to(v.dtype)
        s = s * a + tl.sum(e.to(tl.float32), 1)
        total = dot(e, v, total * a[:, None], UPCAST)
    if out_ptr is None:
        place = (row * n_heads + heads) * n_splits + split
        tl.store(sum_ptr + place[:, None] * D + d[None, :], total, mask=own)
        tl.store(state_ptr + place * 2, m, mask=g < GROUP)
        tl.store(state_ptr + place * 2 + 1, s, mask=g < GROUP)
    else:
        # With the bits of `join_kernel`: adding 0 makes −0 a 0, and lets no product be fused with the sum
        if sink_ptr is None:
            total += 0.0
        else:
            sink = tl.load(sink_ptr + heads * sink_stride, mask=g < GROUP, other=0.0).to(tl.float32)
            to = tl.maximum(sink, m)
            finite = tl.where(to == float("-inf"), 0.0, to)
            a = tl.exp(m - finite)
            s = tl.exp(sink - finite) + tl.fma(a, s, 0.0)
            total = tl.fma(a[:, None], total, 0.0)
        out = (total / s[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(_group_at(out_ptr, row * n_heads + head * GROUP, g, d, D), out, mask=own)


@triton.jit(do_not_specialize=["n_positions", "n_splits", "split_size", "window"])
def join_kernel(
    sum_ptr,  # [N, Hq, splits, D]
    state_ptr,  # [N, Hq, splits, 2]
    length_ptr,
    sink_ptr,  # [Hq] or None
    out_ptr,  # out [N, Hq, D]
    n_heads,
    n_positions,
    n_splits,
    split_size,
    length_stride,
    sink_stride,
    window,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, after = _seen(length_ptr, row, length_stride, n_positions, window, WINDOW)
    d = tl.arange(0, BD)
    m = tl.full((1,), float("-inf"), tl.float32)
    s = tl.zeros((1,), tl.float32)
    if sink_ptr is not None:
        m = tl.zeros((1,), tl.float32) + tl.load(sink_ptr + head * sink_stride).to(tl.float32)
        s += 1.0  # e^(sink − m); a sink of −inf loses it at the first split
    total = tl.zeros((1, BD), tl.float32)
    end = (after + split_size - 1) // split_size
    for start in range(first // split_size // JOINED * JOINED, end, JOINED):
        split = start + tl.arange(0, JOINED)
        used = (split >= first // split_size) & (split < end)
        place = (row * n_heads + head) * n_splits + split
        m2 = tl.load(state_ptr + place * 2, mask=used, other=float("-inf"))
        s2 = tl.load(state_ptr + place * 2 + 1, mask=used, other=0.0)
        part = tl.load(sum_ptr + place[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
        to = tl.maximum(m, tl.max(m2, 0))
        finite = tl.where(to == float("-inf"), 0.0, to)
        a, a2 = tl.exp(m - finite), tl.exp(m2 - finite)
        m = to
        s = s * a + tl.sum(a2 * s2, 0)
        total = total * a[:, None] + tl.sum(a2[:, None] * part, 0)[None, :]
    out = tl.where(after > 0, tl.sum(total / s[:, None], 0), 0.0)  # 0 / 0 in an empty row
    at = out_ptr + (row * n_heads + head) * D + d
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=d < D)


def split_size(n_positions: int) -> int:
    """Positions per split: a function of what the table holds, at least SPLIT."""
    size = SPLIT
    while size * MAX_SPLITS < n_positions:
        size *= 2
    return size


def tile_sizes(group: int, d: int, item: int) -> dict[str, int]:
    """Tiles of `attend_kernel` for values of `item` bytes."""
    block_d = max(16, triton.next_power_of_2(d))
    return {
        "GROUP": group,
        "D": d,
        "BG": max(16, triton.next_power_of_2(group)),
        "BD": block_d,
        "BS": 64 if block_d * item <= 256 else 32,
    }


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
    if registry.is_exact():
        return attention.decode(q, k_cache, v_cache, lengths, block_table, scale, window, softcap, sinks)
    n, n_heads, d = q.shape
    block, n_kv = k_cache.shape[1], k_cache.shape[2]
    n_positions = block_table.shape[1] * block
    out = torch.empty((n, n_heads, d), dtype=q.dtype, device=q.device)
    if out.numel() == 0 or n_positions == 0:
        return out.zero_()
    tile = tile_sizes(n_heads // n_kv, d, q.element_size())
    size = split_size(n_positions)
    n_splits = triton.cdiv(n_positions, size)
    ways = registry.ways("decode_attention")
    whole, sums, state = "whole" in ways and n_splits == 1, None, None
    if not whole:
        sums = torch.empty((n, n_heads, n_splits, d), dtype=torch.float32, device=q.device)
        state = torch.empty((n, n_heads, n_splits, 2), dtype=torch.float32, device=q.device)
    sink_stride = 0 if sinks is None else sinks.stride(0)
    window = n_positions if window is None else min(window, n_positions)
    windowed = window < n_positions
    attend_kernel[(n * n_kv, n_splits)](
        q,
        k_cache,
        v_cache,
        lengths,
        block_table,
        sinks if whole else None,
        out if whole else None,
        sums,
        state,
        n_heads,
        n_kv,
        n_positions,
        n_splits,
        size,
        block,
        *q.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        sink_stride if whole else 0,
        lengths.stride(0),
        *block_table.stride(),
        scale,
        window,
        softcap or 0.0,
        WINDOW=windowed,
        SOFTCAP=softcap is not None,
        ROUNDED="rounded" in ways,
        UPCAST=INTERPRETED,
        **tile,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if whole:
        return out
    join_kernel[(n, n_heads)](
        sums,
        state,
        lengths,
        sinks,
        out,
        n_heads,
        n_positions,
        n_splits,
        size,
        lengths.stride(0),
        sink_stride,
        window,
        WINDOW=windowed,
        D=d,
        BD=tile["BD"],
        num_warps=WARPS,
    )
    return out


def aot_cases() -> list[AotCase]:
    """bf16 as models decode: groups and single heads of 64 to 256, windows, softcap, sinks; then fp16 and fp32."""
    kinds = {"bf16": 2, "fp16": 2, "fp32": 4}

    def signature(kernel: Any, dtype: str, constexprs: dict[str, Any]) -> dict[str, str]:
        known = {"length_ptr": "*i64", "table_ptr": "*i64", "sum_ptr": "*fp32", "state_ptr": "*fp32"}
        known |= dict.fromkeys(("scale", "softcap"), "fp32")
        kind = {n: known.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
        return {n: t for n, t in kind.items() if n not in constexprs}

    def cases(dtype: str, group: int, d: int, *options: str) -> list[AotCase]:
        window, sinks, whole = ("window" in options, "sinks" in options, "whole" in options)
        tile = tile_sizes(group, d, kinds[dtype])
        attend: dict[str, Any] = dict.fromkeys(("sum_ptr", "state_ptr") if whole else ("out_ptr",))
        attend |= {"WINDOW": window, "SOFTCAP": "softcap" in options, "ROUNDED": "rounded" in options, "UPCAST": False}
        attend |= {**tile, "k_inner": 1, "v_inner": 1, "q_inner": 1, "length_stride": 1, "table_column": 1}
        attend |= {"sink_stride": 1} if sinks and whole else {"sink_ptr": None}
        join: dict[str, Any] = {"WINDOW": window, "D": d, "BD": tile["BD"], "length_stride": 1}
        join |= {"sink_stride": 1} if sinks else {"sink_ptr": None}
        cases = []
        for kernel, constexprs in ((attend_kernel, attend), (join_kernel, join))[
            : 1 if whole or "rounded" in options else 2
        ]:
            types = signature(kernel, dtype, constexprs)
            wide = tuple(n for n in types if n.endswith(("_ptr", "_row", "_head", "_block", "_position")))
            cases.append(
                AotCase(
                    name=", ".join([f"{dtype}, {group} heads of {d}", *options]),
                    kernel=kernel,
                    signature=types,
                    constexprs=constexprs,
                    num_warps=WARPS,
                    num_stages=STAGES,
                    divisible_by_16=tuple(n for n in wide if n != "table_row"),
                )
            )
        return cases

    ways: tuple[tuple[str, ...], ...] = ((), ("rounded",), ("whole",), ("rounded", "whole"))
    return [
        case
        for way in ways
        for case in [
            *cases("bf16", 4, 128, *way),
            *cases("bf16", 7, 64, *way),
            *cases("bf16", 1, 80, "window", *way),
            *cases("bf16", 2, 256, "window", "softcap", *way),
            *cases("bf16", 8, 64, "window", "sinks", *way),
            *cases("fp16", 4, 128, *way),
            *cases("fp32", 4, 128, *way),
        ]
    ]
