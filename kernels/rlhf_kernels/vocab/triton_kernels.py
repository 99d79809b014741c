"""Kernels of the vocabulary sweep; `triton_sweep` launches them, formulas are in `rlhf_kernels.vocab.triton_logits`.

State of a row: fp32 [FIELDS, N] (or [splits, FIELDS, N]), fields m, s, w, q, total, at_target, first and for a pair
m_r, s_r, at_target_r, x and centre. index [N] int64 is the target's column, −1 in rows that do not count; what such
rows hold is never loaded into arithmetic that other rows see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlhf_kernels.runtime.triton_math import expm1
from rlhf_kernels.vocab.cost import SHARE_FIELDS
from rlhf_kernels.vocab.triton_logits import (
    difference,
    joined,
    joined_sum,
    log_sum,
    moved,
    scaled_sum,
    slope,
    tile_grad,
    tile_state,
    transformed,
)
from rlhf_kernels.vocab.triton_runs import RUN_WIDTH

FIELDS = SHARE_FIELDS
SAME_ROUNDING = {"enable_fp_fusion": False}
"""Launch options of kernels that sum a row: one binary fuses a product and a sum that another one rounds twice."""
SCALE_BLOCK = tl.constexpr(1024)
_RUN_WIDTH = tl.constexpr(RUN_WIDTH)
RANK_TILE = tl.constexpr(16)  # the least that a product takes; more columns of B at once leave the registers


def padded_rank(rank: int) -> int:
    """Return the `RANKS` of an adapter: its rank, rounded up to whole tiles."""
    return triton.cdiv(rank, RANK_TILE.value) * RANK_TILE.value


@triton.jit
def load_row(ptr, rows, live):
    """A row statistic or its gradient, 0 where there is none."""
    value = tl.zeros(rows.shape, tl.float32)
    if ptr is not None:
        value = tl.load(ptr + rows, mask=live, other=0.0).to(tl.float32)
    return value


@triton.jit
def load_divisor(temperature_ptr, temperature, rows, live):
    """Temperature [R]: per row where there is a tensor; 1 in rows that do not count."""
    divisor = tl.full(rows.shape, 1.0, tl.float32) * temperature
    if temperature_ptr is not None:
        divisor = tl.load(temperature_ptr + rows, mask=live, other=1.0)
    return divisor


@triton.jit
def load_bias(bias_ptr, column, in_range):
    bias = tl.zeros(column.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=in_range, other=0.0).to(tl.float32)
    return bias[None, :]


@triton.jit
def load_state(state_ptr, stride, rows, mask):
    """The seven fields of one policy row's state."""
    m = tl.load(state_ptr + rows, mask=mask, other=float("-inf"))
    s = tl.load(state_ptr + stride + rows, mask=mask, other=0.0)
    w = tl.load(state_ptr + 2 * stride + rows, mask=mask, other=0.0)
    q = tl.load(state_ptr + 3 * stride + rows, mask=mask, other=0.0)
    total = tl.load(state_ptr + 4 * stride + rows, mask=mask, other=0.0)
    at_target = tl.load(state_ptr + 5 * stride + rows, mask=mask, other=0.0)
    first = tl.load(state_ptr + 6 * stride + rows, mask=mask, other=0.0)
    return m, s, w, q, total, at_target, first


@triton.jit
def store_state(state_ptr, stride, rows, mask, m, s, w, q, total, at_target, first):
    tl.store(state_ptr + rows, m, mask=mask)
    tl.store(state_ptr + stride + rows, s, mask=mask)
    tl.store(state_ptr + 2 * stride + rows, w, mask=mask)
    tl.store(state_ptr + 3 * stride + rows, q, mask=mask)
    tl.store(state_ptr + 4 * stride + rows, total, mask=mask)
    tl.store(state_ptr + 5 * stride + rows, at_target, mask=mask)
    tl.store(state_ptr + 6 * stride + rows, first, mask=mask)


@triton.jit
def load_reference_state(state_ptr, stride, rows, mask):
    """m_r, s_r, at_target_r and x of a pair."""
    m_r = tl.load(state_ptr + 7 * stride + rows, mask=mask, other=float("-inf"))
    s_r = tl.load(state_ptr + 8 * stride + rows, mask=mask, other=0.0)
    at_target_r = tl.load(state_ptr + 9 * stride + rows, mask=mask, other=0.0)
    x = tl.load(state_ptr + 10 * stride + rows, mask=mask, other=0.0)
    return m_r, s_r, at_target_r, x


@triton.jit
def store_reference_state(state_ptr, stride, rows, mask, m_r, s_r, at_target_r, x):
    tl.store(state_ptr + 7 * stride + rows, m_r, mask=mask)
    tl.store(state_ptr + 8 * stride + rows, s_r, mask=mask)
    tl.store(state_ptr + 9 * stride + rows, at_target_r, mask=mask)
    tl.store(state_ptr + 10 * stride + rows, x, mask=mask)


@triton.jit
def scale_rows(x_ptr, n_columns, rows, factor, mask, R: tl.constexpr, BLOCK: tl.constexpr):
    """x[rows] *= factor, x [*, n_columns]; rows whose factor is 1 cost no memory traffic."""
    mask = mask & (factor != 1.0)
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = x_ptr + rows.to(tl.int64)[:, None] * n_columns + column[None, :]
        inside = mask[:, None] & (column < n_columns)[None, :]
        tl.store(place, tl.load(place, mask=inside, other=0.0) * factor[:, None], mask=inside)


@triton.jit
def load_logits(
    z_ptr,
    z_stride,
    local,
    live,
    column,
    in_range,
    bias,
    divisor,
    logit_scale,
    softcap,
    SOFTCAP: tl.constexpr,
):
    """A tile of products turned into logits; −inf out of range, 0 in rows that do not count."""
    place = z_ptr + local.to(tl.int64)[:, None] * z_stride + column[None, :]
    y = tl.load(place, mask=live[:, None] & in_range[None, :], other=0.0)
    z = transformed(y, bias, divisor, logit_scale, softcap, SOFTCAP)
    z = tl.where(live[:, None], z, 0.0)
    return tl.where(in_range[None, :], z, float("-inf"))


# One binary whether gradients are made or not: the compiler lays a tile out by its widest store, and sums of another
# layout add in another order
@triton.jit(do_not_specialize=["ahead"])
def fold_tile_kernel(
    z_ptr,  # [n, width] products of this tile
    z_r_ptr,  # the same of the reference's rows, or None
    p_ptr,  # out [n, width]: e^(z−m) u, 0 at the target; written if ahead ≥ 1
    q_ptr,  # out [n, width]: p (z − z_r − centre), written if ahead = 2; None without z_r_ptr
    index_ptr,
    bias_ptr,
    temperature_ptr,
    state_ptr,
    sum_p_ptr,  # [N, sum_width], Σ over earlier tiles of p [W, B], rescaled here when a maximum moves; if ahead ≥ 1
    sum_q_ptr,
    ahead,
    row0,
    n_rows,  # of this chunk
    n_total,
    column0,
    width,
    z_stride,
    p_stride,
    sum_width,
    temperature,
    logit_scale,
    softcap,
    SOFTCAP: tl.constexpr,
    SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr,
    TOP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,  # ≥ width: a row of the tile is in registers, so it is read once
):
    local = tl.program_id(0) * R + tl.arange(0, R)
    inside = local < n_rows
    rows = row0 + local
    index = tl.load(index_ptr + rows, mask=inside, other=-1)
    live = inside & (index >= 0)
    divisor = load_divisor(temperature_ptr, temperature, rows, live)
    m, s, w, q, total, at_target, first = load_state(state_ptr, n_total, rows, inside)
    if z_r_ptr is not None:
        m_r, s_r, at_target_r, x = load_reference_state(state_ptr, n_total, rows, inside)
    offset = tl.arange(0, BLOCK)
    in_range = offset < width
    column = column0 + offset
    bias = load_bias(bias_ptr, column, in_range)
    z = load_logits(z_ptr, z_stride, local, live, offset, in_range, bias, divisor, logit_scale, softcap, SOFTCAP)
    e, m2, s2, w2, q2, total2, at_target2, first2 = tile_state(z, column, in_range, index, True, SUM_SQ, MEAN, TOP)
    a, a2, m, s, w, q, total, at_target, first = joined(
        m, s, w, q, total, at_target, first, m2, s2, w2, q2, total2, at_target2, first2
    )
    # Every warp reads the old state and one writes the new: the first may not be done before the last has read
    tl.debug_barrier()
    store_state(state_ptr, n_total, rows, inside, m, s, w, q, total, at_target, first)

    if z_r_ptr is not None:
        z_r = load_logits(
            z_r_ptr, z_stride, local, live, offset, in_range, bias, divisor, logit_scale, softcap, SOFTCAP
        )
        _, m_r2, s_r2, _, _, _, at_target_r2, _ = tile_state(z_r, column, in_range, index, False, False, False, False)
        m_r, s_r = joined_sum(m_r, s_r, m_r2, s_r2)
        apart = difference(e, z, z_r)
        x2 = tl.sum(e * apart, 1)
        x = scaled_sum(a, x, a2, x2)
        store_reference_state(state_ptr, n_total, rows, inside, m_r, s_r, at_target_r + at_target_r2, x)

    if ahead > 0:
        if column0 > 0:
            scale_rows(sum_p_ptr, sum_width, rows, a, inside, R, SCALE_BLOCK)
        u = slope(z, divisor, logit_scale, softcap, SOFTCAP)
        p = tl.where(live[:, None], e * a2[:, None] * u, 0.0)
        # At −inf the slope need not be finite. The target's column would be rounded here only to cancel later
        p = tl.where((e == 0.0) | (column[None, :] == index[:, None]), 0.0, p)
        to_store = inside[:, None] & in_range[None, :]
        target = local.to(tl.int64)[:, None] * p_stride + offset[None, :]
        tl.store(p_ptr + target, p.to(p_ptr.dtype.element_ty), mask=to_store)
        if z_r_ptr is not None and ahead > 1:
            # Any constant may be taken off z − z_r as long as it stays the same; near its mean nothing cancels
            centre = tl.load(state_ptr + 11 * n_total + rows, mask=inside, other=0.0)
            if column0 == 0:
                centre = tl.where(s2 > 0, x2 / s2, 0.0)
                tl.store(state_ptr + 11 * n_total + rows, centre, mask=inside)
            else:
                scale_rows(sum_q_ptr, sum_width, rows, a, inside, R, SCALE_BLOCK)
            weighted = p * (apart - centre[:, None])
            tl.store(q_ptr + target, weighted.to(q_ptr.dtype.element_ty), mask=to_store)


@triton.jit
def load_operand(ptr, lines, stride, inside, k, in_k, UPCAST: tl.constexpr):
    """[R, K] of rows of hidden states, or [K, C] of columns of the head, as `lines`, `inside` and `k` are laid out."""
    x = tl.load(ptr + lines * stride + k, mask=inside & in_k, other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def lora_products(down_ptr, lora_b_ptr, row_offset, live, column, in_range, rank, y, RANKS: tl.constexpr):
    """y [R, C] + down Bᵀ of these rows and columns in fp32; y where there is no adapter."""
    if down_ptr is not None:
        for j0 in tl.range(0, RANKS, RANK_TILE, num_stages=1):
            j = j0 + tl.arange(0, RANK_TILE)
            down = load_operand(down_ptr, row_offset, rank, live[:, None], j[None, :], (j < rank)[None, :], False)
            lines = column.to(tl.int64)[None, :]
            up = load_operand(lora_b_ptr, lines, rank, in_range[None, :], j[:, None], (j < rank)[:, None], False)
            y = tl.dot(down, up, y, input_precision="tf32x3")
    return y


@triton.jit
def run_of(runs_ptr, i, rows, live):
    """A run's rows among these, its rank, and its line of the table."""
    line = runs_ptr + i * _RUN_WIDTH
    own = live & (rows >= tl.load(line).to(tl.int32)) & (rows < tl.load(line + 1).to(tl.int32))
    return own, tl.load(line + 2).to(tl.int32), line


@triton.jit
def run_products(runs_ptr, down_ptr, b_ptr, rows, row_offset, live, column, in_range, width, y, WIDE: tl.constexpr):
    """y [R, C] + down Bᵀ, with the B of each row's run: the sums of `lora_products` there, y itself elsewhere."""
    block = runs_ptr + tl.program_id(0) * _RUN_WIDTH
    lines = column.to(tl.int64)[None, :]
    for i in range(tl.load(block).to(tl.int32), tl.load(block + 1).to(tl.int32)):
        own, rank, run = run_of(runs_ptr, i, rows, live)
        b = tl.load(run + 3).to(b_ptr.dtype)
        if WIDE:
            b, rank = tl.multiple_of(b, 16), tl.multiple_of(rank, 16)
        made = y
        for j0 in tl.range(0, rank, RANK_TILE, num_stages=1):
            j = j0 + tl.arange(0, RANK_TILE)
            down = load_operand(down_ptr, row_offset, width, own[:, None], j[None, :], (j < rank)[None, :], False)
            up = load_operand(b, lines, rank, in_range[None, :], j[:, None], (j < rank)[:, None], True)
            made = tl.dot(down, up, made, input_precision="tf32x3")
        y = tl.where(own[:, None], made, y)  # 0 · NaN is not 0: rows of another run may not meet what B holds
    return y


@triton.jit
def fused_kernel(
    h_ptr,  # [N, H]
    h_r_ptr,  # [N, H] or None
    w_ptr,  # [V, H]
    index_ptr,
    bias_ptr,
    down_ptr,  # [N, rank] fp32, scale · h Aᵀ, or None
    lora_b_ptr,  # [V, rank] fp32 or None; with runs, one of theirs, for its dtype
    runs_ptr,  # `run_table`, or None: one LoRA
    temperature_ptr,
    state_ptr,  # out [splits, FIELDS, N]
    n_rows,
    n_vocab,
    hidden_size,
    rank,
    h_stride,
    h_r_stride,
    w_stride,
    tiles_per_split,
    temperature,
    logit_scale,
    softcap,
    SOFTCAP: tl.constexpr,
    SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr,
    TOP: tl.constexpr,
    UPCAST: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    RANKS: tl.constexpr,  # padded_rank(rank)
    WIDE: tl.constexpr = False,  # addresses and ranks of runs are multiples of 16; their `rank` is the width of down
):
    split = tl.program_id(1)  # row tiles of one share run next to each other and find its part of W in the cache
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < n_rows
    index = tl.load(index_ptr + rows, mask=inside, other=-1)
    live = inside & (index >= 0)
    divisor = load_divisor(temperature_ptr, temperature, rows, live)
    m = tl.full((BN,), float("-inf"), tl.float32)
    s = tl.zeros((BN,), tl.float32)
    w = tl.zeros((BN,), tl.float32)
    q = tl.zeros((BN,), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    at_target = tl.zeros((BN,), tl.float32)
    first = tl.zeros((BN,), tl.float32)
    if h_r_ptr is not None:
        m_r = tl.full((BN,), float("-inf"), tl.float32)
        s_r = tl.zeros((BN,), tl.float32)
        at_target_r = tl.zeros((BN,), tl.float32)
        x = tl.zeros((BN,), tl.float32)
    row_offset = rows.to(tl.int64)[:, None]
    for tile in range(split * tiles_per_split, tl.minimum((split + 1) * tiles_per_split, tl.cdiv(n_vocab, BV))):
        column = tile * BV + tl.arange(0, BV)
        in_range = column < n_vocab
        y = tl.zeros((BN, BV), tl.float32)
        if runs_ptr is None:
            y = lora_products(down_ptr, lora_b_ptr, row_offset, live, column, in_range, rank, y, RANKS)
        else:
            y = run_products(runs_ptr, down_ptr, lora_b_ptr, rows, row_offset, live, column, in_range, rank, y, WIDE)
        if h_r_ptr is not None:
            y_r = tl.zeros((BN, BV), tl.float32)
        lines = column.to(tl.int64)[None, :]
        for k0 in range(0, hidden_size, BK):
            k = k0 + tl.arange(0, BK)
            in_k = k < hidden_size
            weight = load_operand(w_ptr, lines, w_stride, in_range[None, :], k[:, None], in_k[:, None], UPCAST)
            h = load_operand(h_ptr, row_offset, h_stride, live[:, None], k[None, :], in_k[None, :], UPCAST)
            y = tl.dot(h, weight.to(h.dtype), y, input_precision="ieee")
            if h_r_ptr is not None:
                h_r = load_operand(h_r_ptr, row_offset, h_r_stride, live[:, None], k[None, :], in_k[None, :], UPCAST)
                y_r = tl.dot(h_r, weight.to(h_r.dtype), y_r, input_precision="ieee")
        bias = load_bias(bias_ptr, column, in_range)
        z = transformed(y, bias, divisor, logit_scale, softcap, SOFTCAP)
        z = tl.where(in_range[None, :], z, float("-inf"))
        e, m2, s2, w2, q2, total2, at_target2, first2 = tile_state(z, column, in_range, index, True, SUM_SQ, MEAN, TOP)
        if h_r_ptr is not None:  # before states are joined: their factors would take registers beside z, e and z_r
            z_r = transformed(y_r, bias, divisor, logit_scale, softcap, SOFTCAP)
            z_r = tl.where(in_range[None, :], z_r, float("-inf"))
            x2 = tl.sum(e * difference(e, z, z_r), 1)
        a, a2, m, s, w, q, total, at_target, first = joined(
            m, s, w, q, total, at_target, first, m2, s2, w2, q2, total2, at_target2, first2
        )
        if h_r_ptr is not None:
            x = scaled_sum(a, x, a2, x2)
            _, m_r2, s_r2, _, _, _, at_target_r2, _ = tile_state(
                z_r, column, in_range, index, False, False, False, False
            )
            m_r, s_r = joined_sum(m_r, s_r, m_r2, s_r2)
            at_target_r += at_target_r2
    base = state_ptr + split.to(tl.int64) * 12 * n_rows
    store_state(base, n_rows, rows, inside, m, s, w, q, total, at_target, first)
    if h_r_ptr is not None:
        store_reference_state(base, n_rows, rows, inside, m_r, s_r, at_target_r, x)


@triton.jit
def finish_kernel(
    state_ptr,  # [splits, FIELDS, N]
    index_ptr,
    inverse_ptr,  # out [N], 1 / s, or None
    logprob_ptr,  # out [N], as the following; None where not wanted
    lse_ptr,
    entropy_ptr,
    top_ptr,
    mean_ptr,
    sum_sq_ptr,
    logprob_r_ptr,
    lse_r_ptr,
    kl_ptr,
    n_splits,
    n_rows,
    n_vocab,
    SPLITS: tl.constexpr,  # ≥ n_splits, a power of two
    R: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n_rows
    index = tl.load(index_ptr + rows, mask=inside, other=-1)
    live = index >= 0
    split = tl.arange(0, SPLITS)
    place = split.to(tl.int64)[:, None] * 12 * n_rows + rows[None, :]
    mask = (split < n_splits)[:, None] & inside[None, :]
    m2, s2, w2, q2, total2, at_target2, first2 = load_state(state_ptr, n_rows, place, mask)
    m = tl.max(m2, 0)
    a2, s2, w2, q2 = moved(m2, s2, w2, q2, m[None, :])
    s = tl.sum(s2, 0)
    log_s = tl.log(s)
    at_target = tl.sum(at_target2, 0)
    lse = log_sum(m, s)
    if inverse_ptr is not None:
        tl.store(inverse_ptr + rows, tl.where(live, 1.0 / s, 0.0), mask=inside)
    if logprob_ptr is not None:
        tl.store(logprob_ptr + rows, tl.where(live, at_target - m - log_s, 0.0), mask=inside)
    tl.store(lse_ptr + rows, tl.where(live, lse, 0.0), mask=inside)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + rows, tl.where(live, log_s - tl.sum(w2, 0) / s, 0.0), mask=inside)
    if top_ptr is not None:
        first = tl.min(tl.where(mask & (m2 == m[None, :]), first2, float("inf")), 0)
        tl.store(top_ptr + rows, tl.where(live & (first == index.to(tl.float32)), 1.0, 0.0), mask=inside)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, tl.where(live, tl.sum(total2, 0) / n_vocab, 0.0), mask=inside)
    if sum_sq_ptr is not None:
        tl.store(sum_sq_ptr + rows, tl.where(live, tl.log(tl.sum(q2, 0)) - 2.0 * log_s, 0.0), mask=inside)
    if kl_ptr is not None:
        m_r2, s_r2, at_target_r2, x2 = load_reference_state(state_ptr, n_rows, place, mask)
        m_r = tl.max(m_r2, 0)
        _, s_r2, _, _ = moved(m_r2, s_r2, 0.0 * s_r2, 0.0 * s_r2, m_r[None, :])
        s_r = tl.sum(s_r2, 0)
        lse_r = log_sum(m_r, s_r)
        at_target_r = tl.sum(at_target_r2, 0)
        kl = tl.sum(a2 * x2, 0) / s - (lse - lse_r)
        tl.store(kl_ptr + rows, tl.where(live, kl, 0.0), mask=inside)
        tl.store(lse_r_ptr + rows, tl.where(live, lse_r, 0.0), mask=inside)
        tl.store(logprob_r_ptr + rows, tl.where(live, at_target_r - m_r - tl.log(s_r), 0.0), mask=inside)


@triton.jit
def normalise_kernel(
    sum_p_ptr,  # [N, sum_width] Σ p [W, B] of the sweep; becomes E
    sum_q_ptr,  # the same for q, or None; becomes D
    inverse_ptr,
    lse_ptr,
    lse_r_ptr,
    kl_ptr,
    centre_ptr,
    n_rows,
    sum_width,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n_rows
    inverse = tl.load(inverse_ptr + rows, mask=inside, other=0.0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = inside[:, None] & (column < sum_width)[None, :]
    offset = rows.to(tl.int64)[:, None] * sum_width + column[None, :]
    expected = tl.load(sum_p_ptr + offset, mask=mask, other=0.0) * inverse[:, None]
    tl.store(sum_p_ptr + offset, expected, mask=mask)
    if sum_q_ptr is not None:
        lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
        lse_r = tl.load(lse_r_ptr + rows, mask=inside, other=0.0)
        kl = tl.load(kl_ptr + rows, mask=inside, other=0.0)
        centre = tl.load(centre_ptr + rows, mask=inside, other=0.0)
        rest = tl.where(inverse == 0.0, 0.0, lse - lse_r + kl - centre)
        weighted = tl.load(sum_q_ptr + offset, mask=mask, other=0.0) * inverse[:, None]
        tl.store(sum_q_ptr + offset, weighted - rest[:, None] * expected, mask=mask)


@triton.jit
def from_expected_kernel(
    expected_ptr,  # E [N, H]
    expected_kl_ptr,  # D [N, H], or None
    w_ptr,
    index_ptr,
    temperature_ptr,
    logprob_ptr,
    lse_ptr,
    logprob_r_ptr,  # [N] or None, as the next four
    kl_ptr,
    d_logprob_ptr,
    d_lse_ptr,
    d_kl_ptr,
    on_target_ptr,  # out [N]: the factor of W_t, or None
    out_ptr,  # [N, H]
    n_rows,
    hidden_size,
    w_stride,
    temperature,
    logit_scale,
    softcap,
    SOFTCAP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d_hidden = (g (1 − p_t) + g′ p_t + g″ p_t (d_t − kl)) u_t W_t + (g′ − g) E + g″ D, d_t = logprob − logprob_r.

    g, g′, g″ are the gradients of logprob, lse and kl; E and D are without the target. A coefficient of 0 gives 0
    whatever it meets.
    """
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n_rows
    index = tl.load(index_ptr + rows, mask=inside, other=-1)
    live = inside & (index >= 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = (column < hidden_size)[None, :]
    g = load_row(d_logprob_ptr, rows, live)
    g_lse = load_row(d_lse_ptr, rows, live)
    g_kl = load_row(d_kl_ptr, rows, live)
    on_expected = g_lse - g
    logprob = tl.load(logprob_ptr + rows, mask=live, other=0.0)
    p = tl.exp(logprob)
    on_target = g_lse * p - g * expm1(logprob)  # 1 − p_t without cancellation
    if d_kl_ptr is not None:
        gap = logprob - tl.load(logprob_r_ptr + rows, mask=live, other=0.0) - load_row(kl_ptr, rows, live)
        on_target += tl.where(p == 0.0, 0.0, g_kl * p * gap)
    divisor = load_divisor(temperature_ptr, temperature, rows, live)
    z = logprob + tl.load(lse_ptr + rows, mask=live, other=0.0)
    u = slope(z[:, None], divisor, logit_scale, softcap, SOFTCAP)
    on_target = tl.where(on_target == 0.0, 0.0, on_target * tl.sum(u, 1))
    if on_target_ptr is not None:
        tl.store(on_target_ptr + rows, on_target, mask=inside)
    offset = rows.to(tl.int64)[:, None] * hidden_size + column[None, :]
    mask = (live & (on_expected != 0.0))[:, None] & in_range
    d = tl.load(expected_ptr + offset, mask=mask, other=0.0) * on_expected[:, None]
    mask = (live & (on_target != 0.0))[:, None] & in_range
    target = tl.load(w_ptr + index[:, None] * w_stride + column[None, :], mask=mask, other=0.0)
    d += target.to(tl.float32) * on_target[:, None]
    if expected_kl_ptr is not None:
        mask = (live & (g_kl != 0.0))[:, None] & in_range
        d += tl.load(expected_kl_ptr + offset, mask=mask, other=0.0) * g_kl[:, None]
    out = out_ptr + rows.to(tl.int64)[:, None] * hidden_size + column[None, :]
    tl.store(out, d.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_range)


@triton.jit
def grad_tile_kernel(
    z_ptr,  # [n, width] products of this tile
    z_r_ptr,
    g_ptr,  # out [n, width] dL/dy; may be z_ptr
    index_ptr,
    bias_ptr,
    temperature_ptr,
    lse_ptr,  # [N], as all that follow; None where not needed
    lse_r_ptr,
    entropy_ptr,
    sum_sq_ptr,
    kl_ptr,
    d_logprob_ptr,
    d_lse_ptr,
    d_entropy_ptr,
    d_mean_ptr,
    d_sum_sq_ptr,
    d_kl_ptr,
    row0,
    n_rows,
    column0,
    width,
    n_vocab,
    z_stride,
    g_stride,
    temperature,
    logit_scale,
    softcap,
    SOFTCAP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    local = tl.program_id(0) * R + tl.arange(0, R)
    inside = local < n_rows
    rows = row0 + local
    index = tl.load(index_ptr + rows, mask=inside, other=-1)
    live = inside & (index >= 0)
    divisor = load_divisor(temperature_ptr, temperature, rows, live)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = offset < width
    column = column0 + offset
    bias = load_bias(bias_ptr, column, in_range)
    z = load_logits(z_ptr, z_stride, local, live, offset, in_range, bias, divisor, logit_scale, softcap, SOFTCAP)
    z_r = z
    if z_r_ptr is not None:
        z_r = load_logits(
            z_r_ptr, z_stride, local, live, offset, in_range, bias, divisor, logit_scale, softcap, SOFTCAP
        )
    lse = tl.load(lse_ptr + rows, mask=live, other=float("inf"))  # p = 0 in rows that do not count
    g = tile_grad(
        z,
        z_r,
        column[None, :] == index[:, None],
        lse,
        load_row(lse_r_ptr, rows, live),
        load_row(entropy_ptr, rows, live),
        load_row(sum_sq_ptr, rows, live),
        load_row(kl_ptr, rows, live),
        load_row(d_logprob_ptr, rows, live),
        load_row(d_lse_ptr, rows, live),
        load_row(d_entropy_ptr, rows, live),
        load_row(d_mean_ptr, rows, live) / n_vocab,
        load_row(d_sum_sq_ptr, rows, live),
        load_row(d_kl_ptr, rows, live),
        d_entropy_ptr is not None,
        d_sum_sq_ptr is not None,
        d_kl_ptr is not None,
    )
    g = tl.where(g == 0.0, 0.0, g * slope(z, divisor, logit_scale, softcap, SOFTCAP))
    place = g_ptr + local.to(tl.int64)[:, None] * g_stride + offset[None, :]
    tl.store(place, g.to(g_ptr.dtype.element_ty), mask=inside[:, None] & in_range[None, :])
