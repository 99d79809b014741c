"""`sample` in Triton: one sweep over W, whose shares of the vocabulary meet in a second kernel. Same as `reference`.

A program owns a tile of rows (`triton_by_row`) and a share of the vocabulary. Tile by tile it makes logits and the
noise of their columns and folds both into the rows' states: maximum, sum and entropy sum of the softmax, and the best
score with its column and logit. Nothing but states leaves the chip. `finish_kernel` joins the shares of a row.

The tiles, the shares and the order in which they are joined depend on V, H, the dtypes and whether there are options
alone. Programs see the number of rows only as a bound, so a row's bits do not depend on what it is batched with. Few
rows fill a tile in part: what counts there is the one read of W.

The words of the noise are those of the reference. Logits and the two logarithms of a Gumbel number are rounded
differently, so a token may differ where the two best scores are within some ulp of each other. Scores compare as in
torch: NaN is above everything, the first of equal ones wins.

Several LoRAs take a sweep each, or by `vocab.runs.use_variant` one for all, which no GPU has run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.runtime.philox_triton import gumbel, random_words
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase
from rlhf_kernels.sample.reference import STREAM
from rlhf_kernels.vocab import triton_by_row as by_row
from rlhf_kernels.vocab.cost import SHARES
from rlhf_kernels.vocab.logits import HeadOptions
from rlhf_kernels.vocab.runs import HeadRuns, Together
from rlhf_kernels.vocab.triton_aot import NO_LORA, PLAIN, head_case
from rlhf_kernels.vocab.triton_inputs import HeadInputs
from rlhf_kernels.vocab.triton_kernels import (
    RANK_TILE,
    SAME_ROUNDING,
    load_bias,
    load_divisor,
    load_operand,
    lora_products,
    run_products,
)
from rlhf_kernels.vocab.triton_logits import capped, joined, moved, tile_state

PROGRAMS = SHARES
"""Shares of the vocabulary."""
FIELDS, CHOICES = 4, 2
"""Numbers that a share leaves per row: m, s, w and the best column's logit; the best score's key and its column."""
_STREAM = tl.constexpr(STREAM)
_LOWEST_KEY = tl.constexpr(-(2**31))
_NAN_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(x):
    """int32 in the order of x: −0 is 0, NaN is above +inf, and −inf is above `_LOWEST_KEY`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN_KEY, bits ^ ((bits >> 31) & _NAN_KEY))


@triton.jit(do_not_specialize=["n_rows", "n_forbidden", "nothing"])
def sample_kernel(
    h_ptr,  # [N, H]
    w_ptr,  # [V, H]
    bias_ptr,
    down_ptr,  # [N, rank] fp32, scale · h Aᵀ, or None
    lora_b_ptr,  # [V, rank] fp32 or None; with runs, one of theirs, for its dtype
    runs_ptr,  # `run_table`, or None: one LoRA
    temperature_ptr,
    seed_ptr,
    position_ptr,
    greedy_ptr,  # [N] uint8 or None
    forbidden_ptr,  # [n_forbidden] int64 or None: columns that are not for rows marked in the next
    forbids_ptr,  # [N] uint8
    state_ptr,  # out [splits, FIELDS, N] fp32
    choice_ptr,  # out [splits, CHOICES, N] int32
    n_rows,
    n_vocab,
    hidden_size,
    rank,
    n_forbidden,
    h_stride,
    w_stride,
    tiles_per_split,
    nothing,  # 0, which the compiler must not know: it would keep ten rounds' keys of every row from tile to tile
    temperature,
    logit_scale,
    softcap,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    UPCAST: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    RANKS: tl.constexpr,  # padded_rank(rank)
    WIDE: tl.constexpr = False,  # addresses and ranks of runs are multiples of 16; their `rank` is the width of down
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    inside = rows < n_rows
    divisor = load_divisor(temperature_ptr, temperature, rows, inside)
    seed = tl.load(seed_ptr + rows, mask=inside, other=0)
    position = tl.load(position_ptr + rows, mask=inside, other=0)
    m = tl.full((BN,), float("-inf"), tl.float32)
    s = tl.zeros((BN,), tl.float32)
    w = tl.zeros((BN,), tl.float32)
    at_best = tl.zeros((BN,), tl.float32)
    best = tl.full((BN,), _LOWEST_KEY, tl.int32)
    token = tl.zeros((BN,), tl.int32)
    row_offset = rows.to(tl.int64)[:, None]
    for tile in range(split * tiles_per_split, tl.minimum((split + 1) * tiles_per_split, tl.cdiv(n_vocab, BV))):
        column = tile * BV + tl.arange(0, BV)
        in_range = column < n_vocab
        y = tl.zeros((BN, BV), tl.float32)
        if runs_ptr is None:
            y = lora_products(down_ptr, lora_b_ptr, row_offset, inside, column, in_range, rank, y, RANKS)
        else:
            y = run_products(runs_ptr, down_ptr, lora_b_ptr, rows, row_offset, inside, column, in_range, rank, y, WIDE)
        lines = column.to(tl.int64)[None, :]
        for k0 in range(0, hidden_size, BK):
            k = k0 + tl.arange(0, BK)
            in_k = k < hidden_size
            weight = load_operand(w_ptr, lines, w_stride, in_range[None, :], k[:, None], in_k[:, None], UPCAST)
            h = load_operand(h_ptr, row_offset, h_stride, inside[:, None], k[None, :], in_k[None, :], UPCAST)
            y = tl.dot(h, weight.to(h.dtype), y, input_precision="ieee")
        c = capped(y, load_bias(bias_ptr, column, in_range), logit_scale, softcap, SOFTCAP)
        if forbidden_ptr is not None:
            banned = column < 0
            for i in range(n_forbidden):
                banned = banned | (column == tl.load(forbidden_ptr + i))
            forbids = tl.load(forbids_ptr + rows, mask=inside, other=0) != 0
            c = tl.where(forbids[:, None] & banned[None, :], float("-inf"), c)
        z = tl.where(in_range[None, :], c / divisor[:, None], float("-inf"))
        words = random_words((seed + tile * nothing)[:, None], position[:, None], _STREAM, tile * BV, BN, BV)
        score = z + gumbel(words)
        if greedy_ptr is not None:  # before the temperature: dividing could round two different logits onto each other
            greedy = tl.load(greedy_ptr + rows, mask=inside, other=0) != 0
            score = tl.where(greedy[:, None], c, score)
        key = tl.where(in_range[None, :], order_key(score), _LOWEST_KEY)
        best2 = tl.max(key, 1)
        token2 = tl.min(tl.where(key == best2[:, None], column[None, :], n_vocab), 1)
        _, m2, s2, w2, _, _, at_best2, _ = tile_state(z, column, in_range, token2, ENTROPY, False, False, False)
        token = tl.where(best2 > best, token2, token)
        at_best = tl.where(best2 > best, at_best2, at_best)
        best = tl.maximum(best, best2)
        none = tl.zeros((BN,), tl.float32)
        _, _, m, s, w, _, _, _, _ = joined(m, s, w, none, none, none, none, m2, s2, w2, none, none, none, none)
    state = state_ptr + split.to(tl.int64) * 4 * n_rows + rows
    tl.store(state, m, mask=inside)
    tl.store(state + n_rows, s, mask=inside)
    tl.store(state + 2 * n_rows, w, mask=inside)
    tl.store(state + 3 * n_rows, at_best, mask=inside)
    choice = choice_ptr + split.to(tl.int64) * 2 * n_rows + rows
    tl.store(choice, best, mask=inside)
    tl.store(choice + n_rows, token, mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def finish_kernel(
    state_ptr,  # [splits, FIELDS, N]
    choice_ptr,  # [splits, CHOICES, N]
    token_ptr,  # out [N] int64
    logprob_ptr,  # out [N]
    entropy_ptr,  # out [N] or None
    n_splits,
    n_rows,
    SPLITS: tl.constexpr,  # ≥ n_splits, a power of two
    R: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    split = tl.arange(0, SPLITS).to(tl.int64)[:, None]
    mask = (split < n_splits) & (rows < n_rows)[None, :]
    state = state_ptr + split * 4 * n_rows + rows[None, :]
    m2 = tl.load(state, mask=mask, other=float("-inf"))
    s2 = tl.load(state + n_rows, mask=mask, other=0.0)
    w2 = tl.load(state + 2 * n_rows, mask=mask, other=0.0)
    at_best2 = tl.load(state + 3 * n_rows, mask=mask, other=0.0)
    choice = choice_ptr + split * 2 * n_rows + rows[None, :]
    best2 = tl.load(choice, mask=mask, other=_LOWEST_KEY)
    token2 = tl.load(choice + n_rows, mask=mask, other=0)
    best = tl.max(best2, 0)
    # Shares are in the order of their columns, so the first of equal ones has the lowest
    token = tl.min(tl.where(mask & (best2 == best[None, :]), token2, _NAN_KEY), 0)
    chosen = mask & (best2 == best[None, :]) & (token2 == token[None, :])
    m = tl.max(m2, 0)
    _, s2, w2, _ = moved(m2, s2, w2, 0.0 * s2, m[None, :])
    s = tl.sum(s2, 0)
    log_s = tl.log(s)
    inside = rows < n_rows
    tl.store(token_ptr + rows, token.to(tl.int64), mask=inside)
    tl.store(logprob_ptr + rows, tl.sum(tl.where(chosen, at_best2, 0.0), 0) - m - log_s, mask=inside)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + rows, log_s - tl.sum(w2, 0) / s, mask=inside)


def together(hidden: Tensor, weight: Tensor, options: HeadOptions) -> Together:
    """Let slots share a sweep whose rows have the same tiles; so rows without LoRA may have one of their own."""
    item = torch.promote_types(hidden.dtype, weight.dtype).itemsize
    bare = options.bias is None and not options.softcap
    return lambda _, rank: by_row.COLUMNS[item][0 if bare and rank is None else 1]


def forward(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    position: Tensor,
    greedy: Tensor | None,
    bans: tuple[Tensor, Tensor] | None,
    options: HeadOptions,
    top_k: int,
    top_p: float,
    min_p: float,
    with_entropy: bool,
    runs: HeadRuns | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token, logprob, entropy), each [N]; entropy [0] unless wanted. No filter: top_k = 0, top_p = 1, min_p = 0."""
    assert (top_k, top_p, min_p) == (0, 1.0, 0.0)
    head = HeadInputs(hidden, weight, options, torch.ones_like(seed, dtype=torch.bool), runs=runs)
    n = head.n_rows
    token = torch.empty(n, dtype=torch.int64, device=hidden.device)
    logprob, entropy = head.empty(n), head.empty(n if with_entropy else 0)
    if n == 0:
        return token, logprob, entropy
    down = by_row.down(head)
    ranks = 0 if down is None or runs is not None else down.shape[1]
    sizes = {**by_row.tile_sizes(head.dtype.itemsize, plain=by_row.is_plain(head), rank=ranks), "PROGRAMS": PROGRAMS}
    down, lora_B, table, rank, wide = head.lora(down, sizes["BN"])
    forbidden, forbids = (None, None) if bans is None else (bans[0].contiguous(), bans[1].contiguous())
    n_tiles = triton.cdiv(head.n_vocab, sizes["BV"])
    per_split = triton.cdiv(n_tiles, sizes.pop("PROGRAMS"))
    splits = triton.cdiv(n_tiles, per_split)
    state, choice = head.empty(splits, FIELDS, n), head.empty(splits, CHOICES, n, dtype=torch.int32)
    # Row tiles of one share run next to each other and find its part of W in the cache
    sample_kernel[(triton.cdiv(n, sizes["BN"]), splits)](
        head.hidden,
        head.weight,
        head.bias,
        down,
        lora_B,
        table,
        head.temperature,
        seed.contiguous(),
        position.contiguous(),
        None if greedy is None else greedy.contiguous().view(torch.uint8),
        forbidden,
        None if forbids is None else forbids.view(torch.uint8),
        state,
        choice,
        n,
        head.n_vocab,
        head.hidden_size,
        rank,
        0 if forbidden is None else len(forbidden),
        head.hidden.stride(0),
        head.weight.stride(0),
        per_split,
        0,
        **head.transform(),
        ENTROPY=with_entropy,
        UPCAST=INTERPRETED,
        WIDE=wide,
        **sizes,
        **SAME_ROUNDING,
    )
    finish_splits = triton.next_power_of_2(splits)
    per_program = max(1, 128 // finish_splits)
    finish_kernel[(triton.cdiv(n, per_program),)](
        state,
        choice,
        token,
        logprob,
        entropy if with_entropy else None,
        splits,
        n,
        SPLITS=finish_splits,
        R=per_program,
        **SAME_ROUNDING,
    )
    return token, logprob, entropy


def aot_cases() -> list[AotCase]:
    """bf16 as it decodes, with every option, an fp32 head, and what joins the shares."""
    types = dict.fromkeys(("seed_ptr", "position_ptr", "forbidden_ptr", "token_ptr"), "*i64")
    types |= {"greedy_ptr": "*u8", "forbids_ptr": "*u8", "choice_ptr": "*i32"}
    free = ("forbidden_ptr", "forbids_ptr")
    fp16 = dict.fromkeys(("h_ptr", "w_ptr", "bias_ptr"), "*fp16")
    fp32 = types | dict.fromkeys(("h_ptr", "w_ptr"), "*fp32")

    def case(
        name: str,
        *,
        item: int = 2,
        rank: int = 0,
        absent: tuple[str, ...] = (),
        more: dict[str, str] | None = None,
        **flags: bool,
    ) -> AotCase:
        plain = "bias_ptr" in absent and not rank and not flags["SOFTCAP"] and not flags.get("runs")
        sizes: dict[str, Any] = by_row.tile_sizes(item, plain=plain, rank=rank)
        kinds = (types if item == 2 else fp32) | (more or {})
        return head_case(name, sample_kernel, absent=absent, types=kinds, UPCAST=False, **flags, **sizes)

    down: dict[str, Any] = {"UPCAST": False, "BN": by_row.DOWN_ROWS, "BK": by_row.DOWN_DEPTH}
    return [
        case("bf16", absent=(*NO_LORA, *free, "bias_ptr"), SOFTCAP=False, ENTROPY=True),
        case("bf16, one temperature", absent=(*NO_LORA, *PLAIN, *free, "greedy_ptr"), SOFTCAP=False, ENTROPY=False),
        case("bf16, every output and option", rank=16, SOFTCAP=True, ENTROPY=True),
        case("bf16, r128", rank=128, absent=("bias_ptr", *free), SOFTCAP=False, ENTROPY=True),
        case("fp32", item=4, absent=(*NO_LORA, *free, "bias_ptr"), SOFTCAP=False, ENTROPY=True),
        case("fp32, every output and option", item=4, rank=16, SOFTCAP=True, ENTROPY=True),
        case("bf16, runs", runs=True, absent=("bias_ptr", *free), SOFTCAP=False, ENTROPY=True),
        case("fp16, runs", runs=True, absent=("bias_ptr", *free), more=fp16, SOFTCAP=False, ENTROPY=True),
        case("fp32, runs", runs=True, item=4, absent=("bias_ptr", *free), SOFTCAP=False, ENTROPY=True),
        case("bf16, runs, every output and option", runs=True, SOFTCAP=True, ENTROPY=True),
        head_case("128 shares", finish_kernel, types=types, SPLITS=128, R=1),
        head_case("bf16, r16", by_row.down_kernel, BR=RANK_TILE.value, **down),
        head_case("fp32, r128", by_row.down_kernel, types=fp32, BR=RANK_TILE.value, **down),
        head_case("bf16, runs", by_row.down_runs_kernel, runs=True, BR=RANK_TILE.value, **down),
        head_case("fp32, runs", by_row.down_runs_kernel, types=fp32, runs=True, BR=RANK_TILE.value, **down),
    ]
