"""Tiles of heads that never depend on the number of rows: a row's bits do not depend on what it is batched with.

`sample` draws with them, and in exact mode the statistics of all linear_* ops are made with them: a token's log-prob
then has the bits that it was drawn with.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.runtime.triton_math import dot
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.vocab.triton_inputs import HeadInputs
from rlhf_kernels.vocab.triton_kernels import RANK_TILE, load_operand, padded_rank, run_of
from rlhf_kernels.vocab.triton_runs import RUN_WIDTH

# The defaults, by bytes per operand.
ROWS = {2: 64, 4: 16}  # fp32 products take registers in place of tensor cores
COLUMNS = {2: (128, 64), 4: (64, 64)}  # plain; with a bias, LoRA or softcap, which take registers
DEPTH, WARPS, STAGES = {2: 64, 4: 32}, {2: 8, 4: 4}, {2: 4, 4: 3}
DOWN_ROWS, DOWN_DEPTH = 16, 64
_RUN_WIDTH = tl.constexpr(RUN_WIDTH)


@triton.jit
def _scaled(
    h_ptr,
    a_ptr,
    rows,
    live,
    j,
    hidden_size,
    rank,
    h_stride,
    a_stride,
    scale,
    down,
    UPCAST: tl.constexpr,
    BK: tl.constexpr,
):
    """scale · h Aᵀ [BN, BR] of these rows and ranks, from sums that are 0."""
    for k0 in range(0, hidden_size, BK):
        k = k0 + tl.arange(0, BK)
        in_k = k < hidden_size
        h = load_operand(h_ptr, rows.to(tl.int64)[:, None], h_stride, live[:, None], k[None, :], in_k[None, :], True)
        a = load_operand(a_ptr, j.to(tl.int64)[None, :], a_stride, (j < rank)[None, :], k[:, None], in_k[:, None], True)
        down = dot(h, a, down, UPCAST)
    return down * scale


@triton.jit(do_not_specialize=["n_rows"])
def down_kernel(
    h_ptr,  # [N, H]
    a_ptr,  # [rank, H] fp32; with runs, one of theirs, for its dtype
    runs_ptr,  # `run_table`, or None: one LoRA
    down_ptr,  # out [N, rank] fp32: scale · h Aᵀ
    n_rows,
    hidden_size,
    rank,
    h_stride,
    a_stride,
    scale,
    UPCAST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < n_rows
    j = tl.program_id(1) * BR + tl.arange(0, BR)
    down = tl.zeros((BN, BR), tl.float32)
    if runs_ptr is None:
        down = _scaled(h_ptr, a_ptr, rows, inside, j, hidden_size, rank, h_stride, a_stride, scale, down, UPCAST, BK)
    else:
        block = runs_ptr + tl.program_id(0) * _RUN_WIDTH
        for i in range(tl.load(block).to(tl.int32), tl.load(block + 1).to(tl.int32)):
            own, its_rank, run = run_of(runs_ptr, i, rows, inside)
            a, factor = tl.load(run + 4).to(a_ptr.dtype), tl.load(run + 5).to(tl.int32).to(tl.float32, bitcast=True)
            made = tl.zeros((BN, BR), tl.float32)
            made = _scaled(h_ptr, a, rows, own, j, hidden_size, its_rank, h_stride, a_stride, factor, made, UPCAST, BK)
            down = tl.where(own[:, None], made, down)
    place = rows.to(tl.int64)[:, None] * rank + j[None, :]
    tl.store(down_ptr + place, down, mask=inside[:, None] & (j < rank)[None, :])


def is_plain(head: HeadInputs) -> bool:
    """Whether a head has no bias, no LoRA and no softcap."""
    return head.bias is None and head.lora_A is None and head.runs is None and not head.options.softcap


def tile_sizes(item: int, *, plain: bool, rank: int) -> dict[str, int]:
    """Tiles, warps and stages for operands of `item` bytes; plain: see `is_plain`."""
    return {
        "BN": ROWS[item],
        "BV": COLUMNS[item][0 if plain else 1],
        "BK": DEPTH[item],
        "RANKS": padded_rank(rank),
        "num_warps": WARPS[item],
        "num_stages": STAGES[item],
    }


def down(head: HeadInputs) -> Tensor | None:
    """scale · h Aᵀ [N, r] fp32, in tiles of one size: torch's product may round a row by what it is batched with.

    Of runs r is their highest rank; beyond its own a row holds anything.
    """
    A, runs = head.lora_A, head.runs
    if runs is not None:
        A, rank = runs.A[0], runs.width
    elif A is not None:
        A, rank = A if A.stride(1) == 1 else A.contiguous(), A.shape[0]
    else:
        return None
    block_r = RANK_TILE.value
    made = head.empty(head.n_rows, rank)
    down_kernel[(triton.cdiv(head.n_rows, DOWN_ROWS), triton.cdiv(rank, block_r))](
        head.hidden,
        A,
        None if runs is None else runs.table(head.n_rows, DOWN_ROWS),
        made,
        head.n_rows,
        head.hidden_size,
        rank,
        head.hidden.stride(0),
        A.stride(0),
        head.options.lora_scale,
        UPCAST=INTERPRETED,
        BN=DOWN_ROWS,
        BK=DOWN_DEPTH,
        BR=block_r,
    )
    return made
