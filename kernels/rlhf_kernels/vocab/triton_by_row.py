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


@triton.jit(do_not_specialize=["n_rows"])
def down_kernel(
    h_ptr,  # [N, H]
    a_ptr,  # [rank, H] fp32
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
    for k0 in range(0, hidden_size, BK):
        k = k0 + tl.arange(0, BK)
        in_k = k < hidden_size
        h = load_operand(h_ptr, rows.to(tl.int64)[:, None], h_stride, inside[:, None], k[None, :], in_k[None, :], True)
        a = load_operand(a_ptr, j.to(tl.int64)[None, :], a_stride, (j < rank)[None, :], k[:, None], in_k[:, None], True)
        down = dot(h, a, down, UPCAST)
    place = rows.to(tl.int64)[:, None] * rank + j[None, :]
    tl.store(down_ptr + place, down * scale, mask=inside[:, None] & (j < rank)[None, :])


@triton.jit(do_not_specialize=["n_rows"])
def down_runs_kernel(
    h_ptr,  # [N, H]
    a_ptr,  # A of one of the runs, for its dtype
    runs_ptr,  # `RunInputs.table` for blocks of BN rows
    down_ptr,  # out [N, width] fp32: scale · h Aᵀ with the scale and A of each row's run
    n_rows,
    hidden_size,
    width,
    h_stride,
    UPCAST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """The sums of `down_kernel` for each run that a block of rows meets; 0 beyond a run's rank and in rows of none."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < n_rows
    lines = rows.to(tl.int64)[:, None]
    j = tl.program_id(1) * BR + tl.arange(0, BR)
    down = tl.zeros((BN, BR), tl.float32)
    block = runs_ptr + tl.program_id(0) * _RUN_WIDTH
    for i in range(tl.load(block).to(tl.int32), tl.load(block + 1).to(tl.int32)):
        own, rank, run = run_of(runs_ptr, i, rows, inside)
        a_of_run = tl.load(run + 4).to(a_ptr.dtype)
        made = tl.zeros((BN, BR), tl.float32)
        for k0 in range(0, hidden_size, BK):
            k = k0 + tl.arange(0, BK)
            in_k = k < hidden_size
            h = load_operand(h_ptr, lines, h_stride, own[:, None], k[None, :], in_k[None, :], True)
            places = j.to(tl.int64)[None, :]
            a = load_operand(a_of_run, places, hidden_size, (j < rank)[None, :], k[:, None], in_k[:, None], True)
            made = dot(h, a, made, UPCAST)
        scale = tl.load(run + 5).to(tl.int32).to(tl.float32, bitcast=True)
        down = tl.where(own[:, None], made * scale, down)
    tl.store(down_ptr + lines * width + j[None, :], down, mask=inside[:, None] & (j < width)[None, :])


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

    Of several LoRAs r is the highest rank.
    """
    A, runs, block_r = head.lora_A, head.runs, RANK_TILE.value
    tiles = {"UPCAST": INTERPRETED, "BN": DOWN_ROWS, "BK": DOWN_DEPTH, "BR": block_r}
    if runs is not None:
        made = head.empty(head.n_rows, runs.width)
        table = runs.table(head.n_rows, DOWN_ROWS)
        sizes = (head.n_rows, head.hidden_size, runs.width, head.hidden.stride(0))
        grid = triton.cdiv(head.n_rows, DOWN_ROWS), triton.cdiv(runs.width, block_r)
        down_runs_kernel[grid](head.hidden, runs.A[0], table, made, *sizes, **tiles)
        return made
    if A is None:
        return None
    A = A if A.stride(1) == 1 else A.contiguous()
    rank = A.shape[0]
    made = head.empty(head.n_rows, rank)
    down_kernel[(triton.cdiv(head.n_rows, DOWN_ROWS), triton.cdiv(rank, block_r))](
        head.hidden,
        A,
        made,
        head.n_rows,
        head.hidden_size,
        rank,
        head.hidden.stride(0),
        A.stride(0),
        head.options.lora_scale,
        **tiles,
    )
    return made
